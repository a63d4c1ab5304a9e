"""Image files to float arrays: decode, resize, crop, normalize."""

import io
import struct
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict

from laconic.arrays import Array
from laconic.errors import InputError

MAX_PIXELS = 36_000_000
"""A larger image is refused before it is decoded: a few kilobytes of PNG can hold gigabytes of pixels. Decoding takes 4
bytes of memory for a pixel with alpha, and 3 more without it."""

MAX_INPUT_PIXELS = 8_000_000
"""A larger input is refused before the image is resized: 16 x 100,000 pixels become 1.4 million pixels wide where the
shorter side is to have 224. Normalizing takes 24 bytes of memory for a pixel."""

LEAST_SIDE = 32
"""The shortest side of an input whose sides are free: the stride of the backbones that take such inputs."""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""The formats that are decoded. Pillow knows more: for EPS it runs Ghostscript, which executes what the file says."""


BAD_EXIF = (struct.error, KeyError, TypeError)
"""What Pillow raises where it reads the orientation of a damaged file."""


class ImagePreprocess(BaseModel):
    """Image preprocessing: resize, crop the centre, scale, normalize; channels first.

    resize: (height, width), or None to keep the size. keep_ratio: whether the image keeps its ratio of sides, and
    covers that size, or is contained in it; None where it is stretched to it. shortest_edge: resize so that the shorter
    side has this size; replaces `resize`. longest_edge: the most that the longer side may have then; None without a
    limit. multiple: both sides are then cut down to a multiple of this. crop: (height, width) after resizing, or None.
    centre: where it lies if it leaves an odd number of pixels, half a pixel up (and left) or at the nearest even one.
    fill: the colour of what is cropped beyond the image, by channel or for all.
    scale multiplies the 0..255 values; mean and std are per channel, after scaling. resample is Pillow's filter. bgr:
    whether the channels are in the order blue, green, red; mean and std are, too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    channels: int = 3
    resize: tuple[int, int] | None = None
    keep_ratio: Literal["cover", "contain"] | None = None
    shortest_edge: int | None = None
    longest_edge: int | None = None
    multiple: int = 1
    crop: tuple[int, int] | None = None
    centre: Literal["up", "even"] = "up"
    fill: tuple[int, ...] = (0,)
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    resample: int = 2
    bgr: bool = False

    def apply(self, image: Image.Image) -> Array:
        """Return the input for an image, [channels, height, width] float32."""
        width, height = self.resized(image.size)
        if not (width and height):
            raise InputError(
                f"the image of {image.width} x {image.height} pixels is too narrow: nothing of it would be left at the "
                f"size that the model takes. Crop it"
            )
        for wide, high in ((width, height), (self.crop or (0, 0))[::-1]):
            if wide * high > MAX_INPUT_PIXELS:
                raise InputError(
                    f"the image of {image.width} x {image.height} pixels would become an input of {wide} x {high}, "
                    f"more than {MAX_INPUT_PIXELS:,} pixels. Crop it, or make it smaller"
                )
        image = to_eight_bits(image)
        image = image.convert("L") if self.channels == 1 else to_rgb(image)
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling(self.resample))
        image = self.crop_centre(image)
        pixels: Array = np.array(image, np.float32).reshape(image.height, image.width, self.channels)
        if self.bgr:
            pixels = pixels[..., ::-1].copy()
        pixels *= self.scale
        pixels -= np.array(self.mean, np.float32)
        pixels /= np.array(self.std, np.float32)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1), np.float32)

    def crop_centre(self, image: Image.Image) -> Image.Image:
        """Return the centre of a resized image; the whole where nothing is cropped."""
        if self.crop is None:
            return image
        height, width = self.crop
        left, top = self.margin(image.width - width), self.margin(image.height - height)
        if not any(self.fill) or (left >= 0 and top >= 0):
            return image.crop((left, top, left + width, top + height))  # black beyond the image
        colour = self.fill if len(self.fill) == len(image.getbands()) else self.fill[:1] * len(image.getbands())
        filled = Image.new(image.mode, (width, height), colour)
        filled.paste(image, (-left, -top))
        return filled

    def margin(self, spare: int) -> int:
        """Return the pixels that a crop leaves before it of so many that it leaves in all; negative where it goes
        beyond."""
        if self.centre == "up":
            return spare // 2
        return round(spare / 2) if spare >= 0 else -(-spare // 2)

    def apply_to_map(self, image: Image.Image) -> Image.Image:
        """Return the numbers in a map of classes where the input has the pixels of its image: the nearest, not a
        mean."""
        return self.crop_centre(image.resize(self.resized(image.size), Image.Resampling.NEAREST))

    def resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return width and height of an image after resizing, before cropping. size: width and height as it came."""
        if self.shortest_edge:
            width, height = self.fit(size, self.shortest_edge)
            return width - width % self.multiple, height - height % self.multiple
        if not self.resize:
            return size
        width, height = self.resize[::-1]
        if self.keep_ratio:
            ratios = size[0] / width, size[1] / height
            ratio = min(ratios) if self.keep_ratio == "cover" else max(ratios)
            width, height = round(size[0] / ratio), round(size[1] / ratio)
        return width, height

    @property
    def side_limits(self) -> tuple[int, int] | None:
        """The shortest and the longest side of an input; None where the longer side has no limit. A side may be shorter
        than `shortest_edge` where the longer one is at its limit; of shorter ones than LEAST_SIDE, as of a strip of 10
        x 1,000 pixels, convolutions leave nothing."""
        if not (self.shortest_edge and self.longest_edge):
            return None
        return min(LEAST_SIDE, self.shortest_edge), self.longest_edge

    def fit(self, size: tuple[int, int], edge: int) -> tuple[int, int]:
        """Return width and height with the shorter side `edge`, or less where the longer one would exceed its limit."""
        short, long = min(size), max(size)
        exact: float = edge
        if self.longest_edge and long / short * edge > self.longest_edge:
            exact = self.longest_edge * short / long
            edge = round(exact)
            if short == edge and (self.multiple == 1 or size[0] >= size[1]):  # YOLOS's processor resizes upright ones
                return size
        # The longer side is cut to an integer, as transformers does; rounding moves all pixels of some sizes.
        width, height = (edge if side == short else int(exact * side / short) for side in size)
        return width, height


def to_eight_bits(image: Image.Image) -> Image.Image:
    """Return the image with values from 0 to 255: of 16 bits the upper 8, where Pillow makes white of all but the
    darkest.

    Raises InputError for values of 32 bits beyond 255, whose range the file does not say.
    """
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        low, high = (float(extreme) for extreme in image.getextrema())  # type: ignore[arg-type]
        if not (low >= 0 and high <= 255):
            raise InputError(
                f"the image has one channel of 32 bits with values from {low:g} to {high:g}, expected 0 to 255. "
                f"Save it with 8 or 16 bits"
            )
    return image


STRIP = 256
"""Rows that are blended at once: blending needs four bytes a pixel three times."""


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the image in RGB, what is transparent blended with white, as image processors of transformers do.

    `pipeline` discards the alpha channel before them, and shows what was painted over.
    """
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    blended = Image.new("RGB", image.size)
    for top in range(0, image.height, STRIP):
        strip = image.crop((0, top, image.width, min(top + STRIP, image.height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, "white")
        blended.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return blended


def open_image(source: bytes | Path) -> Image.Image:
    """Decode an image file, upright as its EXIF orientation says; transformers turns it likewise.

    Raises InputError for anything else, and for one of more than MAX_PIXELS.
    """
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
            image = Image.open(file, formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise InputError(f"the image has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError, *BAD_EXIF) as error:
        name = source.name if isinstance(source, Path) else "the upload"
        unknown = isinstance(error, UnidentifiedImageError)  # whose text has the address of an object in memory
        reason = f"it begins as none of {', '.join(FORMATS)}" if unknown else error
        raise InputError(f"{name} is not an image that can be read: {reason}") from None
    return image
