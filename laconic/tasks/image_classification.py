"""Image classification: an image to one of several classes."""

from laconic.tasks.classes import LabelledTask
from laconic.tasks.classification import Classification
from laconic.tasks.image import ImageTask


class ImageClassification(Classification, LabelledTask, ImageTask):
    """Image to one of several classes."""

    name = "image-classification"
    has_class_head = True
    auto_class = "AutoModelForImageClassification"
    architectures = ("ForImageClassification",)
