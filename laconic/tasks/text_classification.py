"""Text classification: a text to one of several classes."""

from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from laconic.tasks.classification import Classification
from laconic.tasks.preprocessing import Preprocessing
from laconic.tasks.text import TextTask
from laconic.tensor import TensorSpec


class TextClassification(Classification, TextTask):
    """Text to one of several classes."""

    name = "text-classification"
    has_class_head = True
    auto_class = "AutoModelForSequenceClassification"
    architectures = ("ForSequenceClassification",)

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
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        return super().from_preprocessing(preprocessing).with_labels(preprocessing.labels)

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        task = super().from_assets(folder, inputs)
        task.labels = cls.read_labels(folder)
        return task

    def assets(self) -> dict[str, bytes]:
        return super().assets() | self.label_assets()
