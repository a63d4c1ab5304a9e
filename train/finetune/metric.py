"""The interface of a metric of the evaluations: a figure from the outputs of a model and the labels."""

from abc import ABC, abstractmethod
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from laconic.arrays import Array


class Metric(BaseModel, ABC):
    """The settings of a metric, and how it is computed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    higher_is_better: ClassVar[bool] = True

    @abstractmethod
    def compute(self, outputs: Array, labels: Array) -> float:
        """Compute the figure over all samples. outputs: the model's first output, [samples, ...]; of pairs of samples
        that are compared, their cosines [pairs]. labels: [samples, ...], numbers of classes for a classifier.

        Raises DataError where these are not for this metric.
        """
