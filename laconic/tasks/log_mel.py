"""Recordings to log-mel spectrograms, as Whisper reads them."""

from functools import cached_property

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from laconic.arrays import Array
from laconic.tasks.audio_preprocess import mix_down

FLOOR = 1e-10
"""The least energy of a band."""
RANGE = 8.0
"""Powers of ten between the largest energy of a recording and the least one that is told from silence."""
HIGHEST = 8000.0
"""The upper end of the highest band in Hz."""


class LogMelPreprocess(BaseModel):
    """Preprocessing of a recording: one channel at the model's sampling rate, padded with silence to a fixed length,
    and the logarithm of its energy in bands of the mel scale (Radford et al., arXiv 2212.04356).

    sampling_rate: in Hz. feature_size: the number of bands. n_fft: samples of a window. hop_length: samples from the
    beginning of a window to that of the next. chunk_length: seconds of the fixed length.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sampling_rate: int = Field(default=16_000, ge=1000, le=768_000)
    feature_size: int = Field(default=80, ge=1, le=1024)
    n_fft: int = Field(default=400, ge=16, le=65_536)
    hop_length: int = Field(default=160, ge=1, le=65_536)
    chunk_length: int = Field(default=30, ge=1, le=60)

    @property
    def frames(self) -> int:
        """The windows of every recording."""
        return self.chunk_length * self.sampling_rate // self.hop_length

    @cached_property
    def filters(self) -> Array:
        """The share of each frequency in each band, [feature_size, frequencies] float64."""
        return make_mel_filters(self.feature_size, 1 + self.n_fft // 2, self.sampling_rate)

    def apply(self, waveform: Array, rate: int) -> Array:
        """The input for a recording, [feature_size, frames] float32.

        waveform: [samples] or [samples, channels], from -1 to 1, at most `chunk_length` long. rate: in Hz.
        """
        padded = np.zeros(self.chunk_length * self.sampling_rate)
        mono = mix_down(waveform, rate, self.sampling_rate)[: len(padded)]  # resampling may round up
        padded[: len(mono)] = mono
        padded = np.pad(padded, self.n_fft // 2, mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[:: self.hop_length][: self.frames]
        sounding = min(self.frames, (len(mono) + self.n_fft) // self.hop_length + 1)  # all windows behind are silent
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.n_fft) / self.n_fft)
        energy = np.abs(np.fft.rfft(windows[:sounding] * window)) ** 2
        bands = np.full((self.feature_size, self.frames), np.log10(FLOOR))
        bands[:, :sounding] = np.log10(np.maximum(self.filters @ energy.T, FLOOR))
        return np.asarray((np.maximum(bands, bands.max() - RANGE) + 4) / 4, np.float32)


def make_mel_filters(bands: int, frequencies: int, rate: int) -> Array:
    """Triangles of equal area, evenly spaced on the mel scale of Slaney's Auditory Toolbox from 0 Hz to HIGHEST,
    [bands, frequencies] float64. rate: samples a second, twice the highest of the frequencies."""
    edges = to_hertz(np.linspace(0, to_mel(HIGHEST), bands + 2))
    slopes = edges[:, None] - np.linspace(0, rate // 2, frequencies)
    widths = np.diff(edges)[:, None]
    triangles = np.maximum(0, np.minimum(-slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]))
    return np.asarray(triangles * (2 / (edges[2:] - edges[:-2]))[:, None])


def to_mel(hertz: float) -> float:
    """Slaney's mel scale: linear up to 1000 Hz, logarithmic above."""
    return float(3 * hertz / 200 if hertz < 1000 else 15 + np.log(hertz / 1000) * 27 / np.log(6.4))


def to_hertz(mel: Array) -> Array:
    """The frequencies of values on Slaney's mel scale."""
    return np.where(mel < 15, 200 * mel / 3, 1000 * np.exp(np.log(6.4) / 27 * (mel - 15)))
