"""LeViT's image processor: the shortest edge becomes 256/224 of what the settings say."""

from laconic.models.image_processors.standard_processor import Settings, read_standard
from laconic.tasks.image_preprocess import ImagePreprocess


def read_levit(settings: Settings, *, channels: int) -> ImagePreprocess:
    """As most processors, but for the size that the image has before its centre is cropped."""
    made = read_standard(settings, channels=channels)
    if made.shortest_edge is None:
        return made
    return made.model_copy(update={"shortest_edge": int((256 / 224) * made.shortest_edge)})
