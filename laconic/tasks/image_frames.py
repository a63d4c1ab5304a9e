"""Images as frames of one size, which a tower reads one by one, and the places of their patches in a text."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict

from laconic.arrays import Array, Arrays
from laconic.errors import InputError
from laconic.tasks.decoder_tensors import FRAMES, PIXELS
from laconic.tasks.image_preprocess import ImagePreprocess, open_image, to_eight_bits, to_rgb
from laconic.tensor import BATCH, TensorSpec

LONGEST = 4096
"""The most that the longer side of an image has before it is cut, in pixels."""
MOST_FRAMES = 4096
"""The most frames of a text's images. A tower with 16 heads takes 3.6 GB for so many blocks of 4 patches that all see
each other; without a limit, a large image would take all memory."""
Grid = tuple[int, int]
"""The rows and columns of the tiles of an image; both 0 where it is one frame."""
ONE_FRAME: Grid = (0, 0)


class ImageFrames(BaseModel):
    """How an image becomes frames, and what stands in a text for it.

    frame: how a frame is prepared. patches: of a frame, each of which takes the place of a token. longest_edge: the
    image is resized first, so that its longer side has so many pixels; None where it is not. is_split: whether an image
    is resized to a multiple of the frame's sides and cut into tiles, behind which it comes as a whole (Laurençon et
    al., Building and better understanding vision-language models, 2024).

    In the text, around stands in front of every frame and behind the last one; after it `tile`, with the number of its
    row and column, or `whole`; line_end stands behind each row of tiles, and behind the last one twice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    frame: ImagePreprocess
    patches: int = 1
    longest_edge: int | None = None
    is_split: bool = False
    around: str = ""
    tile: str = ""
    whole: str = ""
    line_end: str = ""

    @property
    def channels(self) -> int:
        """The channels of a frame."""
        return self.frame.channels

    @property
    def sides(self) -> tuple[int, int] | None:
        """The height and the width of a frame; None where images have several sizes."""
        frame = self.frame
        return frame.crop or (None if frame.keep_ratio else frame.resize)

    def describe_inputs(self) -> tuple[TensorSpec, ...]:
        """Return the inputs of a model that images become."""
        return (TensorSpec(name=PIXELS, dtype="float32", shape=self.shape),)

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The shape of `pixel_values`."""
        return (BATCH, FRAMES, self.channels, *(self.sides or (1, 1)))

    def read(self, images: Sequence[bytes | Path]) -> Array:
        """Read the frames of a text's images, [frames, channels, height, width] float32; one of zeros where it has
        none. Raises InputError."""
        if not images:
            return np.zeros((1, *map(int, self.shape[2:])), np.float32)
        return np.concatenate([self.apply(open_image(image)) for image in images])

    def stack(self, rows: Sequence[Array], ids: Sequence[Array], grids: Sequence[Sequence[Grid]]) -> Arrays:
        """Stack the frames of texts, with zeros behind them, to the model's inputs. ids, grids: the tokens of each
        text, and the tiles of its images."""
        pixels = np.zeros((len(rows), max(map(len, rows), default=1), *rows[0].shape[1:]), np.float32)
        for place, row in enumerate(rows):
            pixels[place, : len(row)] = row
        return {PIXELS: pixels}

    def apply(self, image: Image.Image) -> Array:
        """Return the frames of an image, [frames, channels, height, width] float32."""
        if not (self.longest_edge or self.is_split):
            return self.frame.apply(image)[None]
        size, resample = self.scale(image.size), Image.Resampling(self.frame.resample)
        image = to_rgb(to_eight_bits(image)).resize(size, resample)
        if self.is_split:
            image = image.resize(self.round_up(size), resample)
        rows, columns = self.divide(image.size)
        high, wide = self.sides or (1, 1)
        tiles = [
            image.crop((column * wide, row * high, (column + 1) * wide, (row + 1) * high))
            for row in range(rows)
            for column in range(columns)
        ]
        return np.stack([self.frame.apply(each) for each in (*tiles, image)])

    def measure(self, source: bytes | Path) -> Grid:
        """Measure into how many tiles the image of a file is cut. Raises InputError."""
        return self.divide(self.round_up(self.scale(open_image(source).size))) if self.is_split else ONE_FRAME

    @property
    def smallest(self) -> Grid:
        """The tiles of the smallest image."""
        return ONE_FRAME

    def divide(self, size: tuple[int, int]) -> Grid:
        """Return the tiles of an image of this width and height, which are multiples of a frame's."""
        high, wide = self.sides or (1, 1)
        is_whole = not self.is_split or (size[0] <= wide and size[1] <= high)
        return ONE_FRAME if is_whole else (size[1] // high, size[0] // wide)

    def scale(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return width and height of an image with its longer side resized, rounded as transformers does."""
        width, height = size
        if self.longest_edge:
            width, height = fit_longest(width, height, self.longest_edge)
            # The shorter side becomes even.
            width, height = (width, height + height % 2) if width >= height else (width + width % 2, height)
        if max(width, height) > LONGEST:
            width, height = fit_longest(width, height, LONGEST)
        return max(width, 1), max(height, 1)

    def round_up(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return width and height made multiples of a frame's, the longer side first, by which the other one grows."""
        width, height = size
        high, wide = self.sides or (1, 1)
        ratio = width / height
        if width >= height:
            width = math.ceil(width / wide) * wide
            return width, math.ceil(int(width / ratio) / high) * high
        height = math.ceil(height / high) * high
        return math.ceil(int(height * ratio) / wide) * wide, height

    def count(self, grid: Grid) -> int:
        """Count the frames of an image that is cut into these tiles."""
        return grid[0] * grid[1] + 1

    def describe(self, grid: Grid, image: str) -> str:
        """Return the text of an image that is cut into these tiles. image: the token that stands for a frame."""
        rows = [
            "".join(self.around + self.tile.format(row=row, column=column) + image for column in range(1, grid[1] + 1))
            for row in range(1, grid[0] + 1)
        ]
        tiles = "".join(row + self.line_end for row in rows) + (self.line_end if rows else "")
        return tiles + self.around + self.whole + image + self.around


def fit_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return width and height with the longer side `longest`, and the ratio of both."""
    ratio = width / height
    return (longest, int(longest / ratio)) if width >= height else (int(longest * ratio), longest)


def check_frames(count: int) -> None:
    """Raise InputError for more frames than a tower reads of one text."""
    if count > MOST_FRAMES:
        raise InputError(
            f"the images have {count:,} frames, or blocks of patches, and the tower reads at most {MOST_FRAMES:,}. "
            f"Send fewer or smaller images"
        )
