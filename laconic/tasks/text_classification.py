"""Text classification: a text to one of several classes."""

from laconic.tasks.classes import LabelledText
from laconic.tasks.classification import Classification


class TextClassification(Classification, LabelledText):
    """Text, or a pair of texts, to one of several classes."""

    name = "text-classification"
    auto_class = "AutoModelForSequenceClassification"
    architectures = ("ForSequenceClassification",)
