"""Images of any size as blocks of patches, each of which takes the place of one token, and the positions of these."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from pydantic import Field

from laconic.arrays import Array, Arrays
from laconic.errors import InputError
from laconic.tasks.decoder_tensors import FRAMES, PIXELS, PLACES
from laconic.tasks.image_frames import Grid, ImageFrames
from laconic.tasks.image_preprocess import open_image
from laconic.tensor import BATCH, TensorSpec

MOST_RATIO = 200
"""The most that the longer side of an image is of the shorter one, as in transformers."""


class ImageBlocks(ImageFrames):
    """How an image is resized and cut into blocks, which are the frames of a tower that attends to all blocks of an
    image (Wang et al., Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any Resolution, 2024).

    side: of a block, in pixels. fewest, most: the pixels of an image whose sides have been made multiples of a block's.
    """

    side: int = Field(ge=1)
    fewest: int = Field(ge=1)
    most: int = Field(ge=1)

    @property
    def sides(self) -> tuple[int, int]:
        return self.side, self.side

    def describe_inputs(self) -> tuple[TensorSpec, ...]:
        return (*super().describe_inputs(), TensorSpec(name=PLACES, dtype="int64", shape=(BATCH, FRAMES, 4)))

    def stack(self, rows: Sequence[Array], ids: Sequence[Array], grids: Sequence[Sequence[Grid]]) -> Arrays:
        stacked = super().stack(rows, ids, grids)
        places = np.full((*stacked[PIXELS].shape[:2], 4), -1, np.int64)
        for row, tokens, shapes in zip(places, ids, grids, strict=True):
            located = locate_blocks(tokens, shapes)
            row[: len(located)] = located
        return stacked | {PLACES: places}

    def apply(self, image: Image.Image) -> Array:
        rows, columns = self.fit(image.size)
        resized = self.frame.model_copy(update={"resize": (rows * self.side, columns * self.side)})
        pixels = resized.apply(image).reshape(self.channels, rows, self.side, columns, self.side)
        return np.ascontiguousarray(pixels.transpose(1, 3, 0, 2, 4)).reshape(-1, self.channels, *self.sides)

    def measure(self, source: bytes | Path) -> Grid:
        return self.fit(open_image(source).size)

    def fit(self, size: tuple[int, int]) -> Grid:
        """Return the rows and columns of blocks of an image of this width and height, rounded as transformers does.
        Raises InputError for one that is too narrow."""
        width, height = size
        if max(size) > MOST_RATIO * min(size):
            raise InputError(
                f"the image of {width} x {height} pixels is too narrow: the model takes images whose longer side is at "
                f"most {MOST_RATIO} times the shorter one. Crop it"
            )
        rows, columns = round(height / self.side), round(width / self.side)
        if rows * columns * self.side**2 > self.most:
            shrink = math.sqrt(height * width / self.most)
            rows, columns = (max(1, math.floor(each / shrink / self.side)) for each in (height, width))
        elif rows * columns * self.side**2 < self.fewest:
            grow = math.sqrt(self.fewest / (height * width))
            rows, columns = (math.ceil(each * grow / self.side) for each in (height, width))
        return rows, columns

    def describe(self, grid: Grid, image: str) -> str:
        return image * (grid[0] * grid[1])

    def count(self, grid: Grid) -> int:
        return grid[0] * grid[1]

    @property
    def smallest(self) -> Grid:
        return self.fit(self.sides)


def locate_blocks(ids: Array, grids: Sequence[Grid]) -> Array:
    """Locate the blocks of a text's images: [blocks, 4] int64, for each the index of its token in the text, and its
    position in time, height and width. ids: of the text's tokens; those of blocks are below 0.

    A token of text has one position in all three. The blocks of an image have the position in time that a token of
    text would have in the first one's place, to which their rows and columns are added in height and width; the text
    goes on behind the largest of all.
    """
    indices = np.flatnonzero(ids < 0)
    located = []
    spared = 0
    for rows, columns in grids:
        block = np.arange(rows * columns)
        inside, indices = indices[: len(block)], indices[len(block) :]
        time = np.full_like(block, inside[0] - spared)
        located.append(np.stack([inside, time, time + block // columns, time + block % columns], axis=1))
        spared += len(block) - max(rows, columns)
    return np.concatenate(located) if located else np.empty((0, 4), np.int64)
