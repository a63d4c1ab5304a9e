"""PoolFormer's image processor: the image is enlarged by 1 / crop_pct, before its centre is cropped."""

from laconic.models.image_processors.standard_processor import Settings, read_sides, read_standard
from laconic.tasks.image_preprocess import ImagePreprocess


def read_poolformer(settings: Settings, *, channels: int) -> ImagePreprocess:
    """A square size counts as a shortest edge; one that is not square is enlarged as it is."""
    made = read_standard(settings, channels=channels)
    share = settings.get("crop_pct")
    if not settings.get("do_resize") or share is None:
        return made
    height, width, shortest = read_sides(settings.get("size"))
    if not shortest and height and width and height != width:
        return made.model_copy(update={"resize": (int(height / share), int(width / share))})
    side = shortest or height
    return made.model_copy(update={"resize": None, "shortest_edge": side and int(side / share)})
