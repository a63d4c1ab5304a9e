"""Images of training that NVIDIA DALI decodes, resizes, crops and normalizes, on a GPU where training is on one."""

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from laconic.arrays import Array
from laconic.data.dataset import Dataset
from laconic.errors import InputError, RecipeError
from laconic.registry import missing_package
from laconic.tasks.image_preprocess import BAD_EXIF, MAX_PIXELS, ImagePreprocess
from laconic.tasks.row_parsing import is_file
from laconic.tasks.task import Task

FILTERS = {1: "INTERP_LANCZOS3", 2: "INTERP_TRIANGULAR", 3: "INTERP_CUBIC"}
"""DALI's filters by Pillow's numbers: Lanczos, bilinear and bicubic, each wider where an image becomes smaller."""
MODES = ("L", "RGB")
"""Pillow's modes of the images that DALI decodes alike. Of others it discards what is transparent, or mixes the colours
in another way."""
TURNED = 0x0112
"""The EXIF tag of how an image is turned; 1 where it is not."""
PNG_METADATA = (b"eXIf", b"Raw profile type", b"com.adobe.xmp")
"""What PNG files with EXIF tags contain, perhaps behind the image: Pillow would decode it to look for them."""
ENCODED, SIZES, STARTS, SHAPES = "encoded", "sizes", "starts", "shapes"
"""The inputs of the pipeline: for each image its file, its height and width when resized, where its crop begins, and
the height and width of that."""


class Geometry(NamedTuple):
    """Heights and widths of an image: as it came, when resized, where its crop begins, and of that."""

    size: tuple[int, int]
    resized: tuple[int, int]
    start: tuple[int, int]
    shape: tuple[int, int]


class DaliImages:
    """Makes the samples of image files, a batch at a time, as `task.parse` does, with the sizes and crops that it has.
    Only the pixels that resizing interpolates differ a little.

    What DALI does not decode as Pillow does is left to `task.parse`: files other than JPEG and PNG, images with
    transparency, a palette or four colours, and images that are turned.
    """

    def __init__(self, task: Task, dataset: Dataset, *, device: torch.device, threads: int) -> None:
        """threads: that decode on this rank.

        Raises RecipeError for a task, a dataset or a preprocessing that DALI does not serve, MissingPackage without it.
        """
        preprocess = task.image_preprocess
        if preprocess is None:
            raise RecipeError(
                f"loader: image_backend: dali is for samples that are images, and those of {task.name} are not. Leave "
                f"it out"
            )
        if not is_file(dataset.samples.unparsed()[0]):
            raise RecipeError(
                f"loader: image_backend: dali decodes files of images, and {dataset.name} holds arrays. Leave "
                f"image_backend out"
            )
        if preprocess.resample not in FILTERS or preprocess.channels not in (1, 3):
            raise RecipeError(
                f"loader: image_backend: dali resizes images of 1 or 3 channels by a bilinear, bicubic or Lanczos "
                f"filter, and this checkpoint's have {preprocess.channels} channels and the filter "
                f"{Image.Resampling(preprocess.resample).name.lower()}. Leave image_backend out"
            )
        try:
            self._dali, self._fn, self._types = (
                importlib.import_module(f"nvidia.dali{part}") for part in ("", ".fn", ".types")
            )
        except ModuleNotFoundError as error:
            raise missing_package("nvidia.dali") from error
        self._task, self._preprocess, self._threads = task, preprocess, threads
        self._device = None if device.type == "cpu" else device.index or 0
        self._pipeline: Any = None
        self._most = 0
        self._decoded = self._left = 0

    def decode(self, sources: Sequence[Any]) -> list[Any]:
        """Return the samples of image files, each a path or the file's content. Raises InputError."""
        contents = [source.read_bytes() if isinstance(source, Path) else source for source in sources]
        geometries = [measure(content, self._preprocess) for content in contents]
        mine = [(content, geometry) for content, geometry in zip(contents, geometries, strict=True) if geometry]
        self._decoded, self._left = self._decoded + len(mine), self._left + len(sources) - len(mine)
        pixels = iter(self._run(*zip(*mine, strict=True)) if mine else ())
        return [
            self._task.make_sample(next(pixels), geometry.size) if geometry else self._task.parse(source)
            for source, geometry in zip(sources, geometries, strict=True)
        ]

    def describe(self) -> str:
        """Describe what was decoded, as in "1797 images by DALI on the CPU, 3 by Pillow"."""
        place = "the CPU" if self._device is None else "the GPU"
        return f"{self._decoded} images by DALI on {place}" + (f", {self._left} by Pillow" if self._left else "")

    def _run(self, contents: Sequence[bytes], geometries: Sequence[Geometry]) -> list[Array]:
        """Run the pipeline; returns the pixels of each image, [channels, height, width] float32."""
        if len(contents) > self._most:
            self._pipeline, self._most = None, len(contents)
        pipeline = self._pipeline = self._pipeline or self._build()
        pipeline.feed_input(ENCODED, [np.frombuffer(content, np.uint8) for content in contents])
        for name, values, dtype in (
            (SIZES, [geometry.resized for geometry in geometries], np.float32),
            (STARTS, [geometry.start for geometry in geometries], np.int32),
            (SHAPES, [geometry.shape for geometry in geometries], np.int32),
        ):
            pipeline.feed_input(name, [np.array(value, dtype) for value in values])
        try:
            (outputs,) = pipeline.run()
        except RuntimeError as error:
            self._pipeline = None  # one that has failed runs no more
            reason = str(error).partition("encountered:")[2].strip().partition("\n")[0]
            raise InputError(f"DALI cannot decode an image: {reason or 'its error has no reason'}") from None
        # Copies, since the next run writes into the same memory.
        return [np.array(image) for image in (outputs if self._device is None else outputs.as_cpu())]

    def _build(self) -> Any:
        """Build the pipeline of batches of up to `_most` images."""
        fn, types, preprocess = self._fn, self._types, self._preprocess
        channels = "GRAY" if preprocess.channels == 1 else "BGR" if preprocess.bgr else "RGB"
        colour = preprocess.fill[::-1] if preprocess.bgr else preprocess.fill
        mean, std = ([value / preprocess.scale for value in values] for values in (preprocess.mean, preprocess.std))
        pipeline = self._dali.Pipeline(
            batch_size=self._most,
            num_threads=self._threads,
            device_id=self._device,
            exec_pipelined=False,
            exec_async=False,
        )
        with pipeline:
            encoded, sizes, starts, shapes = (
                fn.external_source(name=name, device="cpu") for name in (ENCODED, SIZES, STARTS, SHAPES)
            )
            image = fn.decoders.image(
                encoded,
                device="cpu" if self._device is None else "mixed",
                output_type=getattr(types, channels),
                adjust_orientation=False,
                jpeg_fancy_upsampling=True,  # as Pillow does on the CPU; otherwise nvJPEG repeats pixels
            )
            image = fn.resize(image, size=sizes, interp_type=getattr(types, FILTERS[preprocess.resample]))
            crop = {"axes": [0, 1], "out_of_bounds_policy": "pad", "fill_values": [float(value) for value in colour]}
            image = fn.slice(image, start=starts, shape=shapes, **crop)
            layout = {"dtype": types.FLOAT, "output_layout": "CHW"}
            pipeline.set_outputs(fn.crop_mirror_normalize(image, mean=mean, std=std, **layout))
        pipeline.build()
        return pipeline


def measure(content: Any, preprocess: ImagePreprocess) -> Geometry | None:
    """Measure an image by the header of its file; None for what DALI does not decode as Pillow does, as `DaliImages`
    says, and for what is no image or too large."""
    if not isinstance(content, bytes):
        return None
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
            if image.format == "PNG":
                is_turned = any(part in content for part in PNG_METADATA)
            else:
                is_turned = image.getexif().get(TURNED, 1) != 1
            if is_turned or image.mode not in MODES or "transparency" in image.info:
                return None
            width, height = image.size
    except (Image.DecompressionBombError, OSError, SyntaxError, ValueError, *BAD_EXIF):
        return None
    wide, high = preprocess.resized((width, height))
    if width * height > MAX_PIXELS or not (wide and high):
        return None
    shape = preprocess.crop or (high, wide)
    start = preprocess.margin(high - shape[0]), preprocess.margin(wide - shape[1])
    return Geometry((height, width), (high, wide), start, shape)
