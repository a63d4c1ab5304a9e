"""How the image processor of a vision-language model makes frames of images, and what its texts have around them."""

from pathlib import Path
from typing import Any

from laconic.arrays import Array
from laconic.errors import SourceError
from laconic.models.image_processor import SETTINGS, check_preprocess, name_processor, open_processor, read_preprocess
from laconic.models.image_rules import read_standard
from laconic.tasks.image_blocks import ImageBlocks
from laconic.tasks.image_frames import ImageFrames

TILED = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
"""The image processors that cut images into tiles."""
BLOCKS = ("Qwen2VLImageProcessor",)
"""Those that cut images of any size into patches, some of which are merged into a token."""
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
    if name_processor(processor) in BLOCKS:
        settings = processor.to_dict()
        made = read_blocks(settings, folder, channels)
        check_preprocess(folder, processor, made, lambda pixels: join_patches(pixels, settings, channels))
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


def read_blocks(settings: dict[str, Any], folder: Path, channels: int) -> ImageBlocks:
    """Read the settings of an image processor that cuts images into blocks of patches. Raises SourceError."""
    size = (settings.get("size") or {}) if settings.get("do_resize") else {}
    fewest, most = size.get("shortest_edge"), size.get("longest_edge")
    if not fewest or not most:
        raise SourceError(
            f"{folder / SETTINGS} has no 'shortest_edge' and 'longest_edge' of 'size', between which the pixels of an "
            f"image are. Add them, and 'do_resize'"
        )
    frame = read_standard({**settings, "do_resize": False, "do_center_crop": False}, channels=channels)
    side = settings["patch_size"] * settings["merge_size"]
    return ImageBlocks(frame=frame, side=side, fewest=fewest, most=most)


def join_patches(pixels: Array, settings: dict[str, Any], channels: int) -> Array:
    """Join the patches of an image, [patches, numbers], to blocks, [blocks, channels, height, width]. An image is in
    them as often as frames of a video would be."""
    side, merged, times = (settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
    patches = pixels.reshape(-1, merged, merged, channels, times, side, side).transpose(4, 0, 3, 1, 5, 2, 6)
    blocks = patches.reshape(times, -1, channels, merged * side, merged * side)
    return blocks[0] if (blocks == blocks[0]).all() else blocks
