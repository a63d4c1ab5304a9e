"""The image processors of DETR and its relatives: the shorter side gets a size, as far as the longer one allows."""

from laconic.models.image_processors.standard_processor import Settings, read_standard
from laconic.tasks.image_preprocess import ImagePreprocess


def read_detr(settings: Settings, *, channels: int) -> ImagePreprocess:
    """As most processors, with a limit to the longer side. An image alone is not padded; of a batch only images of one
    size are run together."""
    made = read_standard(settings, channels=channels)
    return made.model_copy(update={"longest_edge": (settings.get("size") or {}).get("longest_edge")})
