"""Texts to classes: what all tasks share whose samples are texts and whose model has an output for each class."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from laconic.tasks.checkpoint_loading import reads_waveforms
from laconic.tasks.classes import label_assets, read_labels
from laconic.tasks.preprocessing import Preprocessing
from laconic.tasks.text import TextTask
from laconic.tensor import TensorSpec


class LabelledText(TextTask):
    """A text task whose classes have names, which the artifact holds."""

    has_class_head = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        inputs: tuple[TensorSpec, ...],
        *,
        max_tokens: int,
        pad_id: int,
        labels: tuple[str, ...] = (),
    ) -> None:
        super().__init__(tokenizer, inputs, max_tokens=max_tokens, pad_id=pad_id)
        self.labels = labels

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        return not reads_waveforms(config) and cls.fits(config)

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        return super().from_preprocessing(preprocessing).with_labels(preprocessing.labels)

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        task = super().from_assets(folder, inputs)
        task.labels = read_labels(folder)
        return task

    def assets(self) -> dict[str, bytes]:
        return super().assets() | label_assets(self.labels)
