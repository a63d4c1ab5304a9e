"""Text classification: a text to one of several classes."""

from laconic.tasks.classification import Classification
from laconic.tasks.labelled_text import LabelledText


class TextClassification(Classification, LabelledText):
    """Text, or a pair of texts, to one of several classes."""

    name = "text-classification"
    auto_class = "AutoModelForSequenceClassification"
    architectures = ("ForSequenceClassification",)
