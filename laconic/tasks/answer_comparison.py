"""The comparison of a model's answers with the original's, and with labels."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from laconic.arrays import Array, Arrays
from laconic.errors import InputError
from laconic.metrics import Scorer
from laconic.tasks.named_task import NamedTask
from laconic.tasks.null_answers import repeat_mean, shuffle_rows
from laconic.tasks.tolerance import Tolerance

if TYPE_CHECKING:
    from laconic.tasks.agreement import Agreement
    from laconic.tasks.generation_settings import GenerationSettings


Labels = Sequence[Any] | None
"""The labels of all samples; None where there are none."""


class AnswerComparison(NamedTask, ABC):
    """How outputs are compared with the original's, and with labels."""

    tolerance: ClassVar[Tolerance]
    """How faithful an artifact must be where a goal says nothing."""

    measures_perplexity: ClassVar[bool] = False
    """Whether the metric is the mean log-likelihood of a token: minus it is the logarithm of the perplexity."""

    @abstractmethod
    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        """Return the similarity of each answer to its reference, [samples] float64; 1 = identical."""

    def divergence(self, reference: Arrays, candidate: Arrays) -> Array:
        """Return how far each answer is from its reference, [samples] float64; 0 = identical. The sensitivity of layers
        is measured by it."""
        return 1 - self.fidelity(reference, candidate)

    @property
    def reference_settings(self) -> "GenerationSettings | None":
        """How the original writes the answers of samples without; None where a model writes nothing."""
        return None

    def align(self, reference: Arrays, candidate: Arrays) -> Arrays:
        """Return the candidate's outputs in the order of the reference's, where the order within a sample says
        nothing."""
        return candidate

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterable["Agreement"]:
        """Return what the candidate's answers keep of the information in the reference's, over all samples, by the
        task's own matching; nothing more than their fidelity by default. labels: of the samples, where there are
        any."""
        return ()

    def null_answers(self, reference: Arrays) -> dict[str, Arrays]:
        """Return answers that say nothing about their samples, by name: no verdict may pass them. reference: the
        original's.

        The fidelity of the best of them is what chance gives; the verdict asks how much better an artifact is.
        """
        return {"constant": repeat_mean(reference), "shuffled": shuffle_rows(reference)}

    def make_null_samples(self, samples: Sequence[Any]) -> Sequence[Any] | None:
        """Return samples that lack what an answer depends on, in the order of those given; the original's answers to
        them, by the name of the output behind NULL, are among its outputs to `null_answers`. None where null answers
        follow from its answers alone."""
        return None

    def label_samples(self, samples: Sequence[Any], labels: Labels) -> Labels:
        """Return what the metric compares outputs with: the labels; tasks that learn from samples alone make them of
        these."""
        return labels

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        """Return the metric of these outputs against labels, as a function of sample indices; higher is better.

        Raises InputError where the task has none.
        """
        raise InputError(f"task {self.name!r} has no metric against labels")
