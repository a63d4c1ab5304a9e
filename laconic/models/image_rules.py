"""What the image processors of transformers make of their settings: the rules of most, and those of some classes."""

from collections.abc import Mapping
from typing import Any

from laconic.tasks.image_preprocess import ImagePreprocess

Settings = Mapping[str, Any]
"""The settings of an image processor, complete with the defaults of its class."""


def read_standard(settings: Settings, *, channels: int) -> ImagePreprocess:
    """Read the rules of most processors: resize, crop the centre, rescale, normalize, each where its `do_` setting is
    true."""
    height, width, shortest = read_sides(settings.get("size") if settings.get("do_resize") else None)
    crop_height, crop_width, _ = read_sides(
        settings.get("crop_size") if settings.get("do_center_crop") else None, square=True
    )
    normalize = settings.get("do_normalize")
    return ImagePreprocess(
        channels=channels,
        resize=(height, width) if height and width else None,
        shortest_edge=shortest,
        crop=(crop_height, crop_width) if crop_height and crop_width else None,
        scale=settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale") else 1.0,
        mean=tuple(settings.get("image_mean") or (0.0,)) if normalize else (0.0,),
        std=tuple(settings.get("image_std") or (1.0,)) if normalize else (1.0,),
        resample=int(settings.get("resample") or 0),
    )


def read_sides(size: Any, *, square: bool = False) -> tuple[int | None, int | None, int | None]:
    """Return height, width and shortest edge. A bare number is the shortest edge, or both sides of a square."""
    if isinstance(size, int):
        return (size, size, None) if square else (None, None, size)
    size = size or {}
    return size.get("height"), size.get("width"), size.get("shortest_edge")


CROPPED_BELOW = 384
"""The shortest edge from which on an image is squeezed into a square, and nothing of it cut away."""


def read_convnext(settings: Settings, *, channels: int) -> ImagePreprocess:
    """Read ConvNeXt's rules: the shortest edge becomes 1 / crop_pct of the input, whose centre is cropped; images of
    384 pixels and more are squeezed."""
    made = read_standard(settings, channels=channels)
    side = made.shortest_edge
    if side is None:
        return made
    if side >= CROPPED_BELOW:
        return made.model_copy(update={"shortest_edge": None, "resize": (side, side), "crop": None})
    return made.model_copy(update={"shortest_edge": int(side / settings["crop_pct"]), "crop": (side, side)})


def read_detr(settings: Settings, *, channels: int) -> ImagePreprocess:
    """Read the rules of DETR and its relatives: the shorter side gets a size, as far as the longer one allows.

    An image alone is not padded; of a batch only images of one size are run together.
    """
    made = read_standard(settings, channels=channels)
    return made.model_copy(update={"longest_edge": (settings.get("size") or {}).get("longest_edge")})


def read_efficientnet(settings: Settings, *, channels: int) -> ImagePreprocess:
    """Read EfficientNet's rules: rescale_offset subtracts 1 before the mean; include_top, of classifiers, divides by
    the deviation again, normalized or not."""
    made = read_standard(settings, channels=channels)
    mean, std = made.mean, made.std
    if settings.get("rescale_offset") and settings.get("do_rescale"):
        mean = tuple(value + 1 for value in mean)
    if settings.get("include_top"):
        again = tuple(settings["image_std"])
        std = tuple(value * other for value, other in zip(std * (len(again) // len(std)), again, strict=True))
    return made.model_copy(update={"mean": mean, "std": std})


def read_levit(settings: Settings, *, channels: int) -> ImagePreprocess:
    """Read LeViT's rules: the shortest edge becomes 256/224 of what the settings say, before the centre is cropped."""
    made = read_standard(settings, channels=channels)
    if made.shortest_edge is None:
        return made
    return made.model_copy(update={"shortest_edge": int((256 / 224) * made.shortest_edge)})


def read_mobilevit(settings: Settings, *, channels: int) -> ImagePreprocess:
    """Read MobileViT's rules: channels in the order blue, green, red. A mean and a deviation in the settings are not
    used."""
    made = read_standard({**settings, "do_normalize": False}, channels=channels)
    return made.model_copy(update={"bgr": bool(settings.get("do_flip_channel_order"))})


def read_poolformer(settings: Settings, *, channels: int) -> ImagePreprocess:
    """Read PoolFormer's rules: the image is enlarged by 1 / crop_pct, before its centre is cropped. A square size
    counts as a shortest edge; one that is not square is enlarged as it is."""
    made = read_standard(settings, channels=channels)
    share = settings.get("crop_pct")
    if not settings.get("do_resize") or share is None:
        return made
    height, width, shortest = read_sides(settings.get("size"))
    if not shortest and height and width and height != width:
        return made.model_copy(update={"resize": (int(height / share), int(width / share))})
    side = shortest or height
    return made.model_copy(update={"resize": None, "shortest_edge": side and int(side / share)})


PATCH = 16
"""What both sides are a multiple of, whatever the model's patches."""


def read_yolos(settings: Settings, *, channels: int) -> ImagePreprocess:
    """Read YOLOS's rules: as DETR's, with both sides cut down to a multiple of PATCH."""
    return read_detr(settings, channels=channels).model_copy(update={"multiple": PATCH})
