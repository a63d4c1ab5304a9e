"""The image processor of a checkpoint, and the proof that images are prepared as by transformers' own."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image

from laconic import registry
from laconic.arrays import Array
from laconic.errors import SourceError
from laconic.models.image_rules import read_standard
from laconic.models.model_folder import read_source_json
from laconic.tasks.image_frames import ImageFrames
from laconic.tasks.image_preprocess import ImagePreprocess

SETTINGS = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
"""Where the settings of images are where those of texts are too."""


def read_preprocess(folder: Path, *, channels: int) -> ImagePreprocess:
    """Read the preprocessing of a checkpoint, checked against transformers'.

    Raises SourceError for a folder without it, since with a guessed mean and deviation the predictions are wrong; and
    for one that transformers reads in another way.
    """
    processor = open_processor(folder)
    name = name_processor(processor)
    read = registry.resolve("image processor", name) if name in registry.IMAGE_PROCESSORS else read_standard
    made: ImagePreprocess = read(processor.to_dict(), channels=channels)
    check_preprocess(folder, processor, made)
    return made


def name_processor(processor: Any) -> str:
    """Return the name that settings have for the class of an image processor."""
    return type(processor).__name__.removesuffix("Pil")


def open_processor(folder: Path) -> Any:
    """Open the image processor that transformers reads from a folder, on pillow. Raises SourceError."""
    is_joined = (folder / PROCESSOR).is_file() and not (folder / SETTINGS).is_file()
    read_source_json(folder / (PROCESSOR if is_joined else SETTINGS))
    try:
        return transformers.AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, backend="pil"
        )
    except Exception as error:  # the type is of a later version, or of no transformers
        raise SourceError(
            f"transformers does not read {folder / SETTINGS}, so nothing shows that images would be "
            f"prepared as the model needs them: {type(error).__name__}, {' '.join(str(error).split())}"
        ) from error


PROBES = ((20, 31), (224, 224), (300, 200), (480, 640), (512, 256), (50, 170))
"""Heights and widths of the images by which preprocessing is compared."""

PIXEL_ERROR = 1e-5
"""The largest difference of a normalized pixel. Rounding alone differs by 1e-6."""


def check_preprocess(
    folder: Path,
    processor: Any,
    made: ImagePreprocess | ImageFrames,
    select: Callable[[Array], Array] = lambda pixels: pixels[0],
) -> None:
    """Raise SourceError unless images are prepared as by an image processor of transformers.

    Compared on probe images of several sizes; and of several modes, where the processor converts them itself. select:
    makes of the processor's `pixel_values` what `made` makes of the image; by default the first of a batch.
    """
    difference = find_difference(
        lambda image: select(np.asarray(processor(images=image, return_tensors="np")["pixel_values"])),
        made,
        converts=bool(getattr(processor, "do_convert_rgb", False)),
    )
    if difference:
        raise SourceError(
            f"{folder / SETTINGS} is for {type(processor).__name__.removesuffix('Pil')}, whose rules Laconic does not "
            f"know: {difference}. Give the model with --builder, and arrays in .npz, prepared by your own code"
        )


def find_difference(
    prepare: Callable[[Image.Image], Array], made: ImagePreprocess | ImageFrames, *, converts: bool
) -> str:
    """Say where another preprocessing gives other pixels than ours; empty where it gives the same.

    prepare: from an image to [channels, height, width]. converts: whether it takes images of all modes.
    """
    for image in make_probe_images(made.channels, converts=converts):
        difference = measure_pixel_error(prepare, made, image)
        if difference > PIXEL_ERROR:
            return f"for an image of {image.width} x {image.height} pixels, {describe_difference(difference)}"
    return ""


def describe_difference(difference: float) -> str:
    """Describe a difference of pixels in words."""
    finite = math.isfinite(difference)
    return f"normalized values differ by up to {difference:.3g}" if finite else "the input has another shape"


def make_probe_images(channels: int, *, converts: bool) -> Iterator[Image.Image]:
    """Make images with edges and with noise, for a model of so many channels. converts: also of other modes."""
    rng = np.random.default_rng(0)
    for height, width in PROBES:
        tiles = Image.fromarray(rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8))
        yield tiles.resize((width, height), Image.Resampling.NEAREST).convert("L" if channels == 1 else "RGB")
    for mode in ("L", "P", "RGBA", "LA", "1") if converts else ():
        yield Image.fromarray(rng.integers(0, 256, (40, 60, 4), np.uint8)).convert(mode)


def measure_pixel_error(
    prepare: Callable[[Image.Image], Array], made: ImagePreprocess | ImageFrames, image: Image.Image
) -> float:
    """Measure the largest difference of a pixel between another preprocessing and ours; infinite for inputs of
    different shapes, and for an image that the other one refuses."""
    try:
        expected = prepare(image)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError):  # not the channels it expects
        return float("inf")
    pixels = made.apply(image)
    return float(np.abs(expected - pixels).max()) if expected.shape == pixels.shape else float("inf")
