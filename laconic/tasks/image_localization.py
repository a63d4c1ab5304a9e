"""Where things are in an image, for the tasks whose answers are at the size that the image came with."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from laconic.arrays import Array, Arrays, stack_padded
from laconic.errors import InputError
from laconic.tasks.classes import LabelledTask
from laconic.tasks.image import ImageTask
from laconic.tensor import BATCH

PIXELS, SIZE = "pixels", "size"
"""The arrays of a sample: the image as the model takes it, [channels, height, width] float32, and the height and width
that it came with, [2] int64."""
PHOTOGRAPH = (640, 480)
"""Width and height of the image that models are timed with which take images of any size: most of COCO have it."""


class ImageLocalization(LabelledTask, ImageTask):
    """A task whose samples hold an image and the size that it came with."""

    has_logits = False

    def parse(self, value: Any) -> Any:
        """Parse as other images; an array keeps its own height and width. A sample that is parsed stays as it is."""
        if isinstance(value, Mapping) and isinstance(value.get(PIXELS), np.ndarray):
            return value
        sample = super().parse(value)
        return sample if isinstance(sample, Mapping) else make_picture(sample, sample.shape[1:])

    def make_sample(self, pixels: Array, size: tuple[int, int]) -> Any:
        for axis, side in zip(self.inputs[0].shape[2:], pixels.shape[1:], strict=True):
            least, _ = self.inputs[0].bounds.get(str(axis), (1, 0))
            if side < least:
                raise InputError(
                    f"the image of {size[1]} x {size[0]} pixels would become an input of {pixels.shape[2]} x "
                    f"{pixels.shape[1]}, and the model takes sides of at least {least}. Crop it"
                )
        return make_picture(pixels, size)

    def encode(self, samples: Sequence[Any]) -> Arrays:
        """Stack images of one batch; smaller ones, which only training mixes with larger ones, are padded with
        zeros."""
        return {self.inputs[0].name: stack_padded([sample[PIXELS] for sample in samples])}

    def typical(self, batch: int, length: int, seed: int = 0) -> Arrays:
        """Draw random images. Free sides are as long as those of a photograph, whatever the length."""
        (spec,), sides = self.inputs, self.preprocess.resized(PHOTOGRAPH)[::-1]
        free = {axis: side for axis, side in zip(spec.shape[2:], sides, strict=True) if isinstance(axis, str)}
        return {spec.name: spec.sample(np.random.default_rng(seed), free | {BATCH: batch})}

    def examples(self, count: int, seed: int = 0) -> list[Any]:
        return [make_picture(pixels, pixels.shape[1:]) for pixels in super().examples(count, seed)]


def make_picture(pixels: Array, size: Sequence[int]) -> dict[str, Array]:
    """Make a sample. size: height and width of the image as it came."""
    return {PIXELS: pixels, SIZE: np.asarray(size, np.int64)}
