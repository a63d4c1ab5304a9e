"""Recordings that are longer than a model takes, divided into parts where they are quiet."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from laconic.arrays import Array
from laconic.tasks.audio import RecordingTask, check_finite
from laconic.tasks.audio_preprocess import mix_down, read_audio

BLOCK_SECONDS = 0.1
"""The loudness is measured of blocks of this length, and a recording is cut in the middle of one."""
SPAN = (0.8, 1.2)
"""Where a part may end, as shares of its length if all were equal."""


@dataclass(frozen=True)
class RecordingPart:
    """A part of a recording. start, end: seconds from its beginning. sample: the part, as tasks take it."""

    start: float
    end: float
    sample: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """The bytes of its waveform."""
        return int(self.sample["array"].nbytes)


class TranscribedRecording(RecordingTask):
    """Mixin of tasks that write down what is said."""

    @property
    @abstractmethod
    def longest_part(self) -> float:
        """The longest recording that the model takes, in seconds."""

    def divide_recording(self, file: bytes) -> Sequence[RecordingPart]:
        """Divide a recording of any length into parts that the model takes. Raises InputError for what is no audio
        file, or holds too many values to be read."""
        waveform, rate = read_audio(file, longest=math.inf)
        mono = mix_down(waveform, rate, rate)
        check_finite(mono)
        bounds = [0, *find_cuts(mono, rate, self.longest_part), len(mono)]
        return [
            RecordingPart(start / rate, end / rate, {"array": mono[start:end], "sampling_rate": rate})
            for start, end in pairwise(bounds)
        ]


def find_cuts(waveform: Array, rate: int, longest: float) -> list[int]:
    """Find where to cut a recording, [samples] float32, so that no part is longer than `longest` seconds, and all have
    about the same length: in the quietest block around the end of a part. Returns the numbers of samples."""
    most, block = int(longest * rate), max(1, round(BLOCK_SECONDS * rate))
    cuts: list[int] = []
    start = 0
    while len(waveform) - start > most:
        rest = len(waveform) - start
        even = rest / math.ceil(rest / most)
        first, last = start + int(SPAN[0] * even), start + min(int(SPAN[1] * even), most)
        count = max(1, (last - first) // block)
        blocks = waveform[first : first + count * block][: count * block]
        loudness = np.square(blocks[: len(blocks) // count * count].reshape(count, -1), dtype=np.float64).mean(axis=1)
        start = min(first + int((loudness.argmin() + 0.5) * block), last)
        cuts.append(start)
    return cuts
