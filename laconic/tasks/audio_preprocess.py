"""Audio files to waveforms (decode, mix to one channel, resample, normalize) and to log-mel spectrograms."""

import io
from functools import cached_property
from pathlib import Path

import numpy as np
import soundfile
import soxr
from pydantic import BaseModel, ConfigDict, Field

from laconic.arrays import Array
from laconic.errors import InputError

MAX_SECONDS = 60.0
"""A longer recording is refused before it is decoded. Speech models are trained with parts of at most 20 to 30 s, and
the memory of attention grows with the square of the length."""

MAX_VALUES = 24_000_000
"""A recording of more values, over all channels, is refused before it is decoded: a few kilobytes of FLAC can hold
gigabytes of silence. Four channels at 96 kHz have as many in MAX_SECONDS; decoding takes 4 bytes for each."""

MINIMUM_FRAMES = 4
"""Frames that the shortest recording has. One alone leaves nothing to attend to, and SEW halves their number."""

RATES = (1_000, 768_000)
"""The smallest and the largest sampling rate that is resampled, in Hz."""


class AudioPreprocess(BaseModel):
    """Preprocessing of a recording: one channel, at the model's sampling rate; and the frames that a model makes of it.

    sampling_rate: in Hz. normalize: whether a recording gets mean 0 and variance 1. convolutions: kernel and stride of
    each convolution in the model that shortens the recording, in their order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sampling_rate: int = 16_000
    normalize: bool = False
    convolutions: tuple[tuple[int, int], ...] = ()

    def count_frames(self, samples: int) -> int:
        """Count the frames of a recording of so many samples."""
        for kernel, stride in self.convolutions:
            samples = (samples - kernel) // stride + 1
        return samples

    def count_samples(self, frames: int) -> int:
        """Count the samples of the shortest recording that has so many frames."""
        for kernel, stride in reversed(self.convolutions):
            frames = (frames - 1) * stride + kernel
        return frames

    def apply(self, waveform: Array, rate: int) -> Array:
        """Return the input for a recording, [samples] float32.

        waveform: [samples] or [samples, channels], from -1 to 1. rate: in Hz.
        """
        mono = mix_down(waveform, rate, self.sampling_rate)
        if self.normalize:
            # The constant is that of transformers: silence stays silence.
            mono = (mono - mono.mean()) / np.sqrt(mono.var() + 1e-7)
        return np.ascontiguousarray(mono, np.float32)


def mix_down(waveform: Array, rate: int, target: int) -> Array:
    """Mix a recording down to one channel at the wanted sampling rate, [samples] float32. waveform: [samples] or
    [samples, channels]. rate, target: in Hz."""
    mono = np.asarray(waveform, np.float32)
    mono = mono.mean(axis=1) if mono.ndim == 2 else mono
    return mono if rate == target else np.asarray(soxr.resample(mono, rate, target))


def read_audio(source: bytes | Path, longest: float = MAX_SECONDS) -> tuple[Array, int]:
    """Decode a WAV, FLAC, OGG or MP3 file: the waveform [samples, channels] float32, from -1 to 1, and its rate in Hz.

    Raises InputError for anything else, and for a recording of more than `longest` seconds or MAX_VALUES.
    """
    name = source.name if isinstance(source, Path) else "the upload"
    try:
        with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
            check_rate(file.samplerate)
            most = round(min(longest * file.samplerate, MAX_VALUES + 1))
            check_length(file.frames / file.samplerate, longest)
            if min(file.frames, most) * file.channels > MAX_VALUES:
                raise InputError(
                    f"{name} holds {file.frames * file.channels:,} values in {file.channels} channels, more than "
                    f"{MAX_VALUES:,}. Save it with fewer channels"
                )
            waveform = file.read(most, dtype="float32", always_2d=True)
            return waveform, int(file.samplerate)
    except (soundfile.SoundFileError, OSError, TypeError, ValueError) as error:
        reason = getattr(error, "error_string", str(error))
        raise InputError(f"{name} is not an audio file that can be read: {' '.join(reason.split())}") from None


def check_rate(rate: int) -> None:
    """Raise InputError for a sampling rate that no recording has."""
    if not RATES[0] <= rate <= RATES[1]:
        raise InputError(f"the sampling rate is {rate} Hz, expected {RATES[0]:,} to {RATES[1]:,}")


def check_length(seconds: float, most: float = MAX_SECONDS) -> None:
    """Raise InputError for a recording that is too long."""
    if seconds > most:
        raise InputError(f"the recording is {seconds:.1f} s long, and at most {most:g} s are taken. Cut it into parts")


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
        """Return the input for a recording, [feature_size, frames] float32.

        waveform: [samples] or [samples, channels], from -1 to 1, at most `chunk_length` long. rate: in Hz.
        """
        padded = np.zeros(self.chunk_length * self.sampling_rate)
        mono = mix_down(waveform, rate, self.sampling_rate)[: len(padded)]  # resampling may round up
        padded[: len(mono)] = mono
        padded = np.pad(padded, self.n_fft // 2, mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[:: self.hop_length][: self.frames]
        sounding = min(self.frames, (len(mono) + self.n_fft) // self.hop_length + 1)  # all windows behind are silent
        bands = np.full((self.feature_size, self.frames), np.log10(FLOOR))
        bands[:, :sounding] = self._measure(windows[:sounding])
        return np.asarray((np.maximum(bands, bands.max() - RANGE) + 4) / 4, np.float32)

    def apply_whole(self, waveform: Array, rate: int) -> Array:
        """Return the spectrogram of a recording of any length, which is not padded, [feature_size, frames] float32.
        What is told from silence depends on its loudest part. waveform, rate: as `apply` takes them."""
        mono = mix_down(waveform, rate, self.sampling_rate)
        padded = np.pad(mono, self.n_fft // 2, mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[:: self.hop_length]
        windows = windows[: len(mono) // self.hop_length]
        bands = np.empty((self.feature_size, len(windows)), np.float32)
        for start in range(0, len(windows), self.frames):  # all at once would take a kilobyte for each frame, and more
            part = slice(start, start + self.frames)
            bands[:, part] = self._measure(windows[part])
        np.maximum(bands, bands.max(initial=-np.inf) - RANGE, out=bands)
        bands += 4
        bands /= 4
        return bands

    def _measure(self, windows: Array) -> Array:
        """Return the logarithm of the energy in each band, [feature_size, windows] float64. windows: [windows,
        n_fft]."""
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.n_fft) / self.n_fft)
        energy = np.abs(np.fft.rfft(windows * window)) ** 2
        return np.asarray(np.log10(np.maximum(self.filters @ energy.T, FLOOR)))


def make_mel_filters(bands: int, frequencies: int, rate: int) -> Array:
    """Make triangles of equal area, evenly spaced on the mel scale of Slaney's Auditory Toolbox from 0 Hz to HIGHEST,
    [bands, frequencies] float64. rate: samples a second, twice the highest of the frequencies."""
    edges = to_hertz(np.linspace(0, to_mel(HIGHEST), bands + 2))
    slopes = edges[:, None] - np.linspace(0, rate // 2, frequencies)
    widths = np.diff(edges)[:, None]
    triangles = np.maximum(0, np.minimum(-slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]))
    return np.asarray(triangles * (2 / (edges[2:] - edges[:-2]))[:, None])


def to_mel(hertz: float) -> float:
    """Convert frequencies to Slaney's mel scale: linear up to 1000 Hz, logarithmic above."""
    return float(3 * hertz / 200 if hertz < 1000 else 15 + np.log(hertz / 1000) * 27 / np.log(6.4))


def to_hertz(mel: Array) -> Array:
    """Return the frequencies of values on Slaney's mel scale."""
    return np.where(mel < 15, 200 * mel / 3, 1000 * np.exp(np.log(6.4) / 27 * (mel - 15)))
