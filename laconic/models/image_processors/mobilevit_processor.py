"""MobileViT's image processor: channels in the order blue, green, red; never normalized."""

from laconic.models.image_processors.standard_processor import Settings, read_standard
from laconic.tasks.image_preprocess import ImagePreprocess


def read_mobilevit(settings: Settings, *, channels: int) -> ImagePreprocess:
    """As most processors, then the channels in reverse. A mean and a deviation in the settings are not used."""
    made = read_standard({**settings, "do_normalize": False}, channels=channels)
    return made.model_copy(update={"bgr": bool(settings.get("do_flip_channel_order"))})
