"""The image processor of a checkpoint, and the proof that images are prepared as by transformers' own."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image

from laconic.errors import SourceError
from laconic.models.source_json import read_source_json
from laconic.tasks.image_preprocess import ImagePreprocess

SETTINGS = "preprocessor_config.json"


def read_preprocess(folder: Path, *, channels: int) -> ImagePreprocess:
    """The preprocessing of a checkpoint, checked against transformers'.

    Raises SourceError for a folder without it, since with a guessed mean and deviation the predictions are wrong; and
    for one that transformers reads in another way.
    """
    made = parse_preprocess(read_source_json(folder / SETTINGS), channels=channels)
    check_preprocess(folder, made)
    return made


def parse_preprocess(settings: Mapping[str, Any], *, channels: int) -> ImagePreprocess:
    """The preprocessing that the content of a preprocessor_config.json describes."""
    size = settings.get("size") if settings.get("do_resize", True) else None
    height, width, shortest = _sides(size)
    crop_height, crop_width, _ = _sides(
        settings.get("crop_size") if settings.get("do_center_crop") else None, square=True
    )
    crop = (crop_height, crop_width) if crop_height and crop_width else None
    resize = (height, width) if height and width else None
    if shortest and "crop_pct" in settings:  # ConvNeXT: small images are cropped, large ones squeezed
        crop = (shortest, shortest) if shortest < 384 else None
        resize = None if crop else (shortest, shortest)
        shortest = int(shortest / settings["crop_pct"]) if crop else None
    normalize = settings.get("do_normalize", True)
    return ImagePreprocess(
        channels=channels,
        resize=resize,
        shortest_edge=shortest,
        crop=crop,
        scale=settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0,
        mean=tuple(settings.get("image_mean") or (0.0,)) if normalize else (0.0,),
        std=tuple(settings.get("image_std") or (1.0,)) if normalize else (1.0,),
        resample=settings.get("resample", 2),
    )


UNDERSTOOD = {"do_resize", "size", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize"} | {
    "image_mean", "image_std", "resample", "crop_pct", "do_convert_rgb", "image_processor_type", "data_format",
}  # fmt: skip
"""The keys of preprocessor_config.json that `read_preprocess` follows, and those that change no pixel."""

PROBES = ((20, 31), (224, 224), (300, 200), (480, 640), (512, 256))
"""Heights and widths of the images by which preprocessing is compared."""

PIXEL_ERROR = 1e-5
"""The largest difference of a normalized pixel. Rounding alone differs by 1e-6."""


def check_preprocess(folder: Path, made: ImagePreprocess) -> None:
    """Raise SourceError unless images are prepared as by the image processor that transformers reads from the folder.

    Compared on probe images of several sizes; and of several modes, where the processor converts them itself.
    """
    try:
        own = transformers.AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, backend="pil"
        )
    except Exception as error:  # the type is of a later version, or of no transformers
        raise SourceError(
            f"transformers does not read {folder / SETTINGS}, so nothing shows that images would be "
            f"prepared as the model needs them: {type(error).__name__}, {' '.join(str(error).split())}"
        ) from error
    for image in make_probe_images(made.channels, converts=bool(getattr(own, "do_convert_rgb", False))):
        difference = measure_pixel_error(own, made, image)
        if difference > PIXEL_ERROR:
            fields = sorted(key for key, value in own.to_dict().items() if key not in UNDERSTOOD and value)
            which = ", ".join(fields) or "rule, which no field states"
            raise SourceError(
                f"{folder / SETTINGS} is for {type(own).__name__.removesuffix('Pil')}, and Laconic does not follow its "
                f"{which}: for an image of {image.width} x {image.height} pixels, {describe_difference(difference)}. "
                f"Models with this processor are not supported yet"
            )


def describe_difference(difference: float) -> str:
    """A difference of pixels, in words."""
    finite = math.isfinite(difference)
    return f"normalized values differ by up to {difference:.3g}" if finite else "the input has another shape"


def make_probe_images(channels: int, *, converts: bool) -> Iterator[Image.Image]:
    """Images with edges and with noise, for a model of so many channels. converts: also of other modes."""
    rng = np.random.default_rng(0)
    for height, width in PROBES:
        tiles = Image.fromarray(rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8))
        yield tiles.resize((width, height), Image.Resampling.NEAREST).convert("L" if channels == 1 else "RGB")
    for mode in ("L", "P", "RGBA", "LA", "1") if converts else ():
        yield Image.fromarray(rng.integers(0, 256, (40, 60, 4), np.uint8)).convert(mode)


def measure_pixel_error(own: Any, made: ImagePreprocess, image: Image.Image) -> float:
    """The largest difference of a pixel between a processor of transformers and ours; infinite for inputs of different
    shapes, and for an image that the processor refuses."""
    try:
        found = np.asarray(own(images=image, return_tensors="np")["pixel_values"][0])
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError):  # not the channels it expects
        return float("inf")
    pixels = made.apply(image)
    return float(np.abs(found - pixels).max()) if found.shape == pixels.shape else float("inf")


def _sides(size: Any, *, square: bool = False) -> tuple[int | None, int | None, int | None]:
    """Height, width and shortest edge. A bare number is the shortest edge, or both sides of a square."""
    if isinstance(size, int):
        return (size, size, None) if square else (None, None, size)
    size = size or {}
    return size.get("height"), size.get("width"), size.get("shortest_edge")
