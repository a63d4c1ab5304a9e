"""The rules that most image processors of transformers follow."""

from collections.abc import Mapping
from typing import Any

from laconic.tasks.image_preprocess import ImagePreprocess

Settings = Mapping[str, Any]
"""The settings of an image processor, complete with the defaults of its class."""


def read_standard(settings: Settings, *, channels: int) -> ImagePreprocess:
    """Resize, crop the centre, rescale, normalize, each where its `do_` setting is true."""
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
    """Height, width and shortest edge. A bare number is the shortest edge, or both sides of a square."""
    if isinstance(size, int):
        return (size, size, None) if square else (None, None, size)
    size = size or {}
    return size.get("height"), size.get("width"), size.get("shortest_edge")
