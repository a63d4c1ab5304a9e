"""YOLOS's image processor: as DETR's, with both sides cut down to a multiple of the patches."""

from laconic.models.image_processors.detr_processor import read_detr
from laconic.models.image_processors.standard_processor import Settings
from laconic.tasks.image_preprocess import ImagePreprocess

PATCH = 16
"""What both sides are a multiple of, whatever the model's patches."""


def read_yolos(settings: Settings, *, channels: int) -> ImagePreprocess:
    """The shorter side gets a size, as far as the longer one allows; a size that is given in full stays as it is."""
    return read_detr(settings, channels=channels).model_copy(update={"multiple": PATCH})
