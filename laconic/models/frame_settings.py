"""How the image processor of a vision-language model makes frames of images, and what its texts have around them."""

from pathlib import Path
from typing import Any

from laconic.errors import SourceError
from laconic.models.image_processor import SETTINGS, check_preprocess, name_processor, open_processor, read_preprocess
from laconic.models.image_rules import read_standard
from laconic.tasks.image_frames import ImageFrames

TILED = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
"""The image processors that cut images into tiles."""
MARKS: dict[str, Any] = {
    "around": "<fake_token_around_image>",
    "tile": "<row_{row}_col_{column}>",
    "whole": "<global-img>",
    "line_end": "\n",
}
"""What stands around the frames of their images in a text."""


def read_frames(folder: Path, *, channels: int) -> ImageFrames:
    """Read how images become frames, checked against transformers'. Raises SourceError for images whose frames are not
    all of one size."""
    processor = open_processor(folder)
    if name_processor(processor) in TILED:
        made = read_tiles(processor.to_dict(), folder, channels)
        check_preprocess(folder, processor, made)
        return made
    made = ImageFrames(frame=read_preprocess(folder, channels=channels))
    if made.sides is None:
        raise SourceError(
            "the image processor leaves images their size, and vision-language models are supported whose images all "
            "have one"
        )
    return made


def read_tiles(settings: dict[str, Any], folder: Path, channels: int) -> ImageFrames:
    """Read the settings of an image processor that cuts images into tiles. Raises SourceError."""
    side = (settings.get("max_image_size") or {}).get("longest_edge")
    size = (settings.get("size") or {}) if settings.get("do_resize") else {}
    longest = size.get("longest_edge")
    if not side or (size and not longest):
        raise SourceError(f"{folder / SETTINGS} has no 'longest_edge' of 'size' or 'max_image_size'. Add it")
    square = {"size": {"height": side, "width": side}, "do_resize": True, "do_center_crop": False}
    return ImageFrames(
        frame=read_standard({**settings, **square}, channels=channels),
        longest_edge=longest,
        is_split=bool(settings.get("do_image_splitting")),
        **MARKS,
    )
