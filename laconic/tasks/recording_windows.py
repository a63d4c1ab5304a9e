"""Recordings of any length, as a model of speech reads them to write timestamps: window after window."""

from dataclasses import dataclass

import numpy as np

from laconic.arrays import Array

STEP_FRAMES = 2
"""The frames of a spectrogram in a step of timestamps: one convolution of the encoder has a stride of two."""


@dataclass(frozen=True)
class WindowedRecording:
    """The spectrogram of a recording, [bands, frames] float32. window: the frames that the model reads at once.
    step_seconds: the seconds between a timestamp and the next."""

    spectrogram: Array
    window: int
    step_seconds: float

    @property
    def nbytes(self) -> int:
        """The bytes of its spectrogram."""
        return int(self.spectrogram.nbytes)

    @property
    def steps(self) -> int:
        """The steps up to its end, the last of which may be half a one."""
        return -(-int(self.spectrogram.shape[1]) // STEP_FRAMES)

    def count_steps(self, start: int) -> int:
        """Count the whole steps in the window that begins with a step."""
        return min(self.window, int(self.spectrogram.shape[1]) - start * STEP_FRAMES) // STEP_FRAMES

    def cut(self, start: int) -> Array:
        """Return the window that begins with a step, [bands, window] float32. Behind the end are zeros, which are no
        silence, as transformers and Whisper itself have it."""
        frames = self.spectrogram[:, start * STEP_FRAMES :][:, : self.window]
        return np.pad(frames, [(0, 0), (0, self.window - frames.shape[1])])
