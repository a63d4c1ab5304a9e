"""The encoder of an encoder-decoder, or the tower of a vision-language model: what a decoder reads of a source or of
images, for one request, and for a batch of them."""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import InputError, RuntimeFailure
from laconic.runtimes.decoder_file import cross_name, encoder_of, read_file_inputs
from laconic.runtimes.generator import GenerationRequest, check_prompt
from laconic.runtimes.runtime import Session
from laconic.tasks.decoder_tensors import PIXELS

MASK = "attention_mask"
"""The input that is 0 at padding."""
ELEMENTS = {1: np.float32, 6: np.int32, 7: np.int64}
"""The types of inputs, by their number in onnx.proto."""
LENGTHS, COUNTS = (3, 5), (1, 2)
"""The lengths of two sources by which is found what grows with a source; and numbers of frames."""
MOST_FRAMES = 1 << 16
"""The most frames of a request: far more than the context of a model has room for."""


class SourceEncoder:
    """Encodes one source at a time, with a column of padding behind it, which can be repeated to make what the decoder
    reads of it as long as that of another; or the frames of images, whose last patch is repeated and read by nobody.

    tokens: that a source takes in the cache where all have one length; 0 where each has its own. numbers: that a token
    of a source takes, or a patch.
    """

    def __init__(self, session: Session, model: Path, read: Collection[str], longest: int) -> None:
        """session: the encoder. model: the decoder's file. read: the names of the decoder's inputs. longest: the most
        tokens of a source. Raises RuntimeFailure where sources of several lengths cannot be told from their padding."""
        self._session = session
        self._thread = ThreadPoolExecutor(1, "encode")
        self._read = read
        self._longest = longest
        self._inputs = {each.name: each for each in read_file_inputs(encoder_of(model))}
        has_lengths = any(isinstance(axis, str) for each in self._inputs.values() for axis in each.shape[1:])
        self._is_tower = PIXELS in self._inputs
        if has_lengths and not self._is_tower and MASK not in self._inputs:
            raise RuntimeFailure(f"the encoder of {model.name} takes sources of any length, and no {MASK}")
        lengths = COUNTS if self._is_tower else LENGTHS[: 2 if has_lengths else 1]
        self.probes = [self.encode(self._draw(length)) for length in lengths]
        short, long = self.probes[0], self.probes[-1]
        self._axes = {name: find_growing(array, long[name]) for name, array in short.items()}
        sizes = [sum(array.size for array in each.values()) for each in self.probes]
        self.tokens = 0 if has_lengths else max(max(array.shape) for array in short.values())
        unit = self.count_patches(self._draw(1)) if self._is_tower else 1
        more = (lengths[-1] - lengths[0]) * unit
        self.numbers = (sizes[1] - sizes[0]) // more if has_lengths else sizes[0] // self.tokens

    def count_patches(self, source: Mapping[str, Array]) -> int:
        """Count the patches of images, whose features the decoder reads. source: their frames."""
        frames = source.get(PIXELS)
        return 0 if frames is None else frames.shape[1] * int(self.probes[0][cross_name(0)].shape[1])

    def check(self, source: Mapping[str, Array]) -> None:
        """Raise InputError for a source that the encoder does not take."""
        if source.keys() != self._inputs.keys():
            raise InputError(f"the source has {sorted(source)}, and the model takes {sorted(self._inputs)}")
        for name, array in source.items():
            shape = self._inputs[name].shape
            most = MOST_FRAMES if self._is_tower else self._longest
            sizes = [axis if isinstance(axis, int) else most for axis in shape[1:]]
            fits = array.ndim == len(shape) and all(
                size == most or (isinstance(axis, str) and 0 < size < most)
                for axis, size, most in zip(shape[1:], array.shape[1:], sizes, strict=True)
            )
            if not fits or array.dtype != ELEMENTS[self._inputs[name].element]:
                raise InputError(f"{name} of the source is {array.dtype} {list(array.shape)}, expected {list(shape)}")

    def encode(self, source: Mapping[str, Array]) -> Arrays:
        """Encode a source. source: the inputs of one sample."""
        padded = {}
        for name, array in source.items():
            free = [isinstance(axis, str) and place > 0 for place, axis in enumerate(self._inputs[name].shape)]
            has_room = [grows and size < self._longest for grows, size in zip(free, array.shape, strict=True)]
            behind = [int(each and not self._is_tower) for each in has_room]
            padded[name] = np.pad(array, [(0, size) for size in behind])
        return self._run(padded)

    def begin(self, source: Mapping[str, Array] | None) -> "Future[Arrays]":
        """Encode a source in a thread of its own, behind those that were begun earlier, so that others write
        meanwhile: an image can take seconds. source: as of `encode`; None for what is read without one."""
        return self._thread.submit(lambda: self.probes[0] if source is None else self.encode(source))

    def join(self, rows: Sequence[Mapping[str, Array]]) -> Arrays:
        """Make a batch of encoded sources, padded to the longest."""
        return {name: join_arrays([row[name] for row in rows], axis) for name, axis in self._axes.items()}

    def close(self) -> None:
        """Release the memory, behind the source that is being encoded."""
        self._thread.shutdown(cancel_futures=True)
        self._session.close()

    def _run(self, source: Arrays) -> Arrays:
        # By order: OpenVINO may give an output another of its names.
        encoded = {cross_name(index): array for index, array in enumerate(self._session.run(source).values())}
        return {name: array for name, array in (source | encoded).items() if name in self._read}

    def _draw(self, length: int) -> Arrays:
        shapes = {
            name: [1, *(axis if isinstance(axis, int) else length for axis in each.shape[1:])]
            for name, each in self._inputs.items()
        }
        return {name: np.ones(shape, ELEMENTS[self._inputs[name].element]) for name, shape in shapes.items()}


def find_growing(short: Array, long: Array) -> int | None:
    """Find the axis that grows with the source; None for a number that is the length itself."""
    if short.ndim < 2:
        return None
    axes = [axis for axis, sizes in enumerate(zip(short.shape, long.shape, strict=True)) if sizes[0] != sizes[1]]
    return axes[0] if axes else 0


def join_arrays(arrays: Sequence[Array], axis: int | None) -> Array:
    """Make a batch of arrays, their last columns along an axis repeated up to the longest; of lengths, the greatest."""
    if axis is None:
        return np.asarray(np.max(arrays, axis=0))
    longest = max(array.shape[axis] for array in arrays)
    if axis and any(array.shape[axis] < longest for array in arrays):
        arrays = [
            np.pad(
                array,
                [(0, longest - size if place == axis else 0) for place, size in enumerate(array.shape)],
                mode="edge",
            )
            for array in arrays
        ]
    return np.concatenate(arrays)


def check_source(
    request: GenerationRequest, encoder: SourceEncoder | None, vocabulary: int, *, is_required: bool
) -> None:
    """Raise InputError for a prompt, or a source or images with it, that a model does not take. is_required: whether it
    writes nothing without a source."""
    source, patches = request.source, 0
    if source is not None and encoder is None:
        raise InputError("the model takes no source and no images")
    if source is None and is_required:
        raise InputError("an encoder-decoder needs a source")
    if encoder is not None and source is not None:
        encoder.check(source.arrays)
        patches = encoder.count_patches(source.arrays)
    check_prompt(request, vocabulary, patches)
