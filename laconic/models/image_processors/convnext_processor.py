"""ConvNeXt's image processor: small images are cropped, those of 384 pixels and more squeezed."""

from laconic.models.image_processors.standard_processor import Settings, read_standard
from laconic.tasks.image_preprocess import ImagePreprocess

CROPPED_BELOW = 384
"""The shortest edge from which on an image is squeezed into a square, and nothing of it cut away."""


def read_convnext(settings: Settings, *, channels: int) -> ImagePreprocess:
    """The shortest edge becomes 1 / crop_pct of the input, whose centre is cropped."""
    made = read_standard(settings, channels=channels)
    side = made.shortest_edge
    if side is None:
        return made
    if side >= CROPPED_BELOW:
        return made.model_copy(update={"shortest_edge": None, "resize": (side, side), "crop": None})
    return made.model_copy(update={"shortest_edge": int(side / settings["crop_pct"]), "crop": (side, side)})
