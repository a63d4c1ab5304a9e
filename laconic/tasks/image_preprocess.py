"""Image files to float arrays: decode, resize, crop, normalize."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict

from laconic.errors import InputError
from laconic.tensor import Array

MAX_PIXELS = 64_000_000
"""A larger image is refused before it is decoded: a few kilobytes of PNG can hold gigabytes of pixels."""


class ImagePreprocess(BaseModel):
    """Image preprocessing: resize, crop the centre, scale, normalize; channels first.

    resize: (height, width), or None to keep the size. shortest_edge: resize so that the shorter side has this size;
    replaces `resize`. crop: (height, width) after resizing, or None.
    scale multiplies the 0..255 values; mean and std are per channel, after scaling. resample is Pillow's filter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    channels: int = 3
    resize: tuple[int, int] | None = None
    shortest_edge: int | None = None
    crop: tuple[int, int] | None = None
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    resample: int = 2

    def apply(self, image: Image.Image) -> Array:
        """The input for an image, [channels, height, width] float32."""
        image = image.convert("L" if self.channels == 1 else "RGB")
        resample = Image.Resampling(self.resample)
        if self.shortest_edge:
            ratio = self.shortest_edge / min(image.size)
            width, height = (max(1, round(side * ratio)) for side in image.size)
            image = image.resize((width, height), resample)
        elif self.resize:
            image = image.resize((self.resize[1], self.resize[0]), resample)
        if self.crop:
            height, width = self.crop
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
        pixels: Array = np.asarray(image, np.float32).reshape(image.height, image.width, self.channels) * self.scale
        pixels = (pixels - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1), np.float32)


def open_image(source: bytes | Path) -> Image.Image:
    """Decode an image file. Raises InputError for anything else, and for one of more than MAX_PIXELS."""
    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        if image.width * image.height > MAX_PIXELS:
            raise InputError(f"the image has {image.width} x {image.height} pixels, more than {MAX_PIXELS}")
        image.load()
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        name = source.name if isinstance(source, Path) else "the upload"
        raise InputError(f"{name} is not an image that can be read: {error}") from None
    return image
