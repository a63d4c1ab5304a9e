"""Recordings to arrays, for every task that reads audio."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.errors import InputError, SourceError
from laconic.tasks.assets import PREPROCESS, read_asset, to_json
from laconic.tasks.audio_preprocess import (
    MAX_SECONDS,
    MINIMUM_FRAMES,
    AudioPreprocess,
    check_length,
    check_rate,
    read_audio,
)
from laconic.tasks.checkpoint_loading import DEFAULT_TASK
from laconic.tasks.file_task import FileTask
from laconic.tasks.preprocessing import Preprocessing
from laconic.tasks.processing import Upload
from laconic.tensor import BATCH, TensorSpec, describe_array, read_numbers

FRAMES = 50
"""Frames of a second, by which lengths are given to time and plan with: wav2vec 2.0 and its relatives have so many."""

WAVEFORM, MASK = "input_values", "attention_mask"


class RecordingTask(FileTask):
    """A task whose samples are recordings: audio files, waveforms with their rate, or arrays that are the input."""

    field = "audio"
    field_description = "An audio file in base64, or a list of them."
    upload = Upload(content_type="audio/*", example="speech.wav")
    accepts = frozenset({"audio"})
    content = "a recording"

    @classmethod
    def from_signature(cls, inputs: tuple[TensorSpec, ...]) -> Self:
        raise SourceError(
            f"task {cls.name!r} needs a feature extractor, which says the sampling rate. Choose a task that reads "
            f"arrays, as {DEFAULT_TASK}"
        )

    def sample_schema(self) -> dict[str, Any]:
        file = {"type": "string", "contentEncoding": "base64", "contentMediaType": "audio/*"}
        waveform = {
            "type": "object",
            "properties": {
                "array": {"type": "array", "items": {"type": "number"}},
                "sampling_rate": {"type": "integer"},
            },
            "required": ["array", "sampling_rate"],
        }
        spec = self.inputs[0]
        return {"anyOf": [file, waveform, describe_array(spec.dtype, spec.shape[1:], spec.bounds)]}

    def read_recording(self, value: Any) -> tuple[Array, int] | None:
        """Read the waveform, [samples] or [samples, channels] float32, and its rate in Hz, of the bytes of an audio
        file, the same in base64, a Path, or `{"array": [...], "sampling_rate": 16000}`; None for what must be an array
        that is already the input. Raises InputError."""
        if isinstance(value, str):
            value = self.read_base64(value)
        if isinstance(value, (bytes, Path)):
            return read_audio(value)
        return read_waveform(value) if isinstance(value, Mapping) else None


class AudioTask(RecordingTask):
    """A task whose samples are waveforms, [samples] float32, made from audio files or given as arrays.

    The inputs are the waveforms and, for a model that is not disturbed by padding, their mask.
    """

    def __init__(
        self, inputs: tuple[TensorSpec, ...], *, preprocess: AudioPreprocess, labels: tuple[str, ...] = ()
    ) -> None:
        self.inputs = inputs
        self.preprocess = preprocess
        self.labels = labels
        # Without a mask the model takes padding for silence, so that answers depend on what else is in the batch.
        self.padding = {spec.name: 0 for spec in inputs} if len(inputs) > 1 else {}

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        audio = preprocessing.audio or AudioPreprocess()
        bounds = {"samples": (audio.count_samples(MINIMUM_FRAMES), round(MAX_SECONDS * audio.sampling_rate))}
        waveform = TensorSpec(name=WAVEFORM, dtype="float32", shape=(BATCH, "samples"), bounds=bounds)
        mask = TensorSpec(name=MASK, dtype="int64", shape=(BATCH, "samples"), bounds=bounds)
        return cls((waveform, mask) if preprocessing.masks_audio else (waveform,), preprocess=audio)

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        return cls(inputs, preprocess=AudioPreprocess.model_validate(read_asset(folder, PREPROCESS)))

    def assets(self) -> dict[str, bytes]:
        return {PREPROCESS: to_json(self.preprocess.model_dump(mode="json"))}

    def parse(self, value: Any) -> Any:
        """Take the bytes of an audio file, the same in base64, a Path, a waveform with its rate as `{"array": [...],
        "sampling_rate": 16000}`, or an array that is already the input."""
        recording = self.read_recording(value)
        if recording:
            sample = self.preprocess.apply(*recording)
        else:
            sample = read_numbers(value, np.dtype(np.float32), "a waveform")
        if sample.ndim != 1:
            raise InputError(f"a waveform must have one axis, not the shape {list(sample.shape)}")
        check_finite(sample)
        check_length(len(sample) / self.preprocess.sampling_rate)
        shortest, _ = self.inputs[0].bounds["samples"]
        rate = self.preprocess.sampling_rate
        check_shortest(len(sample) / rate, shortest / rate)
        return sample

    def encode(self, samples: Sequence[Any]) -> Arrays:
        """Encode recordings, shorter ones padded with zeros: silence to a model without a mask, which learns from such
        batches nevertheless, as it was trained."""
        longest = max(map(len, samples))
        values = np.zeros((len(samples), longest), np.float32)
        mask = np.zeros((len(samples), longest), np.int64)
        for row, sample in enumerate(samples):
            values[row, : len(sample)] = sample
            mask[row, : len(sample)] = 1
        arrays: list[Array] = [values, mask]
        return {spec.name: array for spec, array in zip(self.inputs, arrays, strict=False)}

    def length(self, sample: Any) -> int:
        return len(sample)

    def typical(self, batch: int, length: int, seed: int = 0) -> Arrays:
        """Make noise that is `length` frames of 20 ms long, where the bounds allow."""
        low, high = self.inputs[0].bounds["samples"]
        samples = min(max(length * self.preprocess.sampling_rate // FRAMES, low), high)
        return self.sample_inputs({BATCH: batch, "samples": samples}, seed)

    def examples(self, count: int, seed: int = 0) -> list[Any]:
        """Make tones of varied pitch with noise, of one length where the model cannot pad, else of 1 to 3 s."""
        rng = np.random.default_rng(seed)
        rate = self.preprocess.sampling_rate
        lengths = rng.integers(rate, 3 * rate, count) if self.padding else [2 * rate] * count
        return [self.preprocess.apply(make_tone(rng, int(length), rate), rate) for length in lengths]


def check_finite(samples: Array) -> None:
    """Raise InputError for a recording with NaN or infinity."""
    if not np.isfinite(samples).all():
        raise InputError("the recording holds NaN or infinity")


def check_shortest(seconds: float, least: float) -> None:
    """Raise InputError for a recording that is too short."""
    if seconds < least:
        raise InputError(f"the recording is {seconds:.3f} s long, expected at least {least:.3f} s")


def make_tone(rng: np.random.Generator, length: int, rate: int) -> Array:
    """Make a tone that fades in and out a few times a second, with noise, [length] float32 from -1 to 1."""
    time = np.arange(length) / rate
    pitch, pulse = rng.uniform(80, 400), rng.uniform(2, 8)
    tone = sum(np.sin(2 * np.pi * pitch * overtone * time) / overtone for overtone in (1, 2, 3, 5))
    waveform = 0.2 * tone * (1 - np.cos(2 * np.pi * pulse * time)) + 0.02 * rng.standard_normal(length)
    return np.asarray(waveform.clip(-1, 1), np.float32)


def read_waveform(value: Mapping[str, Any]) -> tuple[Array, int]:
    """Read the waveform and the sampling rate in `{"array": [...], "sampling_rate": 16000}`. Raises InputError."""
    rate = value.get("sampling_rate")
    if "array" not in value or not isinstance(rate, int) or isinstance(rate, bool):
        raise InputError(f"a waveform must be given as {{'array': [...], 'sampling_rate': 16000}}, not {sorted(value)}")
    check_rate(rate)
    waveform = read_numbers(value["array"], np.dtype(np.float32), "a waveform")
    if waveform.ndim != 1:
        raise InputError(f"a waveform must have one axis, not the shape {list(waveform.shape)}")
    check_length(len(waveform) / rate)
    return waveform, rate
