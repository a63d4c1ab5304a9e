"""Images to arrays, for every task that reads images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import InputError, SourceError
from laconic.tasks.assets import PREPROCESS, read_asset, to_json
from laconic.tasks.checkpoint_loading import DEFAULT_TASK
from laconic.tasks.file_task import FileTask
from laconic.tasks.image_preprocess import ImagePreprocess, open_image
from laconic.tasks.preprocessing import Preprocessing
from laconic.tasks.processing import Upload
from laconic.tensor import BATCH, TensorSpec, describe_array, read_numbers


class ImageTask(FileTask):
    """A task whose samples are [channels, height, width] float32 arrays, made from image bytes or given as arrays."""

    field = "image"
    field_description = "An image file in base64, or a list of them."
    upload = Upload(content_type="image/*", example="picture.jpg")
    accepts = frozenset({"images", "arrays"})
    content = "an image"
    planning_length = 1

    def __init__(
        self, inputs: tuple[TensorSpec, ...], *, preprocess: ImagePreprocess, labels: tuple[str, ...] = ()
    ) -> None:
        self.inputs = inputs
        self.preprocess = preprocess
        self.labels = labels
        self.padding = {}

    @classmethod
    def from_signature(cls, inputs: tuple[TensorSpec, ...]) -> Self:
        """Make the task for pixels from 0 to 1, of the size that the model takes: a plain module says nothing of
        preprocessing.

        Raises SourceError unless there is one input, float32 [batch, channels, height, width].
        """
        shape = inputs[0].shape
        if len(inputs) != 1 or inputs[0].dtype != "float32" or len(shape) != 4 or not isinstance(shape[1], int):
            described = ", ".join(f"{spec.name} {spec.dtype} {spec.describe()}" for spec in inputs)
            raise SourceError(
                f"{cls.name} takes one float32 input [batch, channels, height, width], and the model takes "
                f"{described}. Choose the task {DEFAULT_TASK}"
            )
        height, width = shape[2:]
        resize = (height, width) if isinstance(height, int) and isinstance(width, int) else None
        return cls(inputs, preprocess=ImagePreprocess(channels=shape[1], resize=resize))

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        image = preprocessing.image
        channels = image.channels if image else "channels"
        sides = (image and (image.crop or image.resize)) or ("height", "width")
        limits = image.side_limits if image else None
        bounds = {axis: limits for axis in sides if isinstance(axis, str)} if limits else {}
        spec = TensorSpec(name="pixel_values", dtype="float32", shape=(BATCH, channels, *sides), bounds=bounds)
        return cls((spec,), preprocess=image or ImagePreprocess())

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        preprocess = ImagePreprocess.model_validate(read_asset(folder, PREPROCESS))
        return cls(inputs, preprocess=preprocess)

    def assets(self) -> dict[str, bytes]:
        return {PREPROCESS: to_json(self.preprocess.model_dump(mode="json"))}

    @property
    def image_preprocess(self) -> ImagePreprocess:
        return self.preprocess

    def make_sample(self, pixels: Array, size: tuple[int, int]) -> Any:
        return pixels

    def sample_schema(self) -> dict[str, Any]:
        spec = self.inputs[0]
        file = {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/*"}
        return {"anyOf": [file, describe_array(spec.dtype, spec.shape[1:], spec.bounds)]}

    def parse(self, value: Any) -> Any:
        """Take the bytes of an image file, the same in base64, a Path, or an array that is already the input."""
        if isinstance(value, str):
            value = self.read_base64(value)
        if isinstance(value, (bytes, Path)):
            image = open_image(value)
            return self.make_sample(self.preprocess.apply(image), (image.height, image.width))
        array = read_numbers(value, np.dtype(np.float32), "an image")
        if array.ndim == 2:
            array = array[None]
        self.inputs[0].check(array[None], {})
        return array

    def encode(self, samples: Sequence[Any]) -> Arrays:
        shapes = {sample.shape for sample in samples}
        if len(shapes) > 1:
            raise InputError(f"images of one batch must be of one size, not {sorted(shapes)}")
        return {self.inputs[0].name: np.stack(samples)}

    def examples(self, count: int, seed: int = 0) -> list[Any]:
        return list(self.typical(count, 64, seed)[self.inputs[0].name])
