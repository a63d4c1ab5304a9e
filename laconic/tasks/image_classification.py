"""Image classification: an image to one of several classes."""

from pathlib import Path
from typing import Self

from laconic.tasks.classes import label_assets, read_labels
from laconic.tasks.classification import Classification
from laconic.tasks.image import ImageTask
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tasks.preprocessing import Preprocessing
from laconic.tensor import TensorSpec


class ImageClassification(Classification, ImageTask):
    """Image to one of several classes."""

    name = "image-classification"
    has_class_head = True
    auto_class = "AutoModelForImageClassification"
    architectures = ("ForImageClassification",)

    def __init__(
        self, inputs: tuple[TensorSpec, ...], *, preprocess: ImagePreprocess, labels: tuple[str, ...] = ()
    ) -> None:
        super().__init__(inputs, preprocess=preprocess)
        self.labels = labels

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        return super().from_preprocessing(preprocessing).with_labels(preprocessing.labels)

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        return super().from_assets(folder, inputs).with_labels(read_labels(folder))

    def assets(self) -> dict[str, bytes]:
        return super().assets() | label_assets(self.labels)
