"""Speech to text: a recording to the text that an encoder-decoder writes for it, as a transcript or a translation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from tokenizers import Tokenizer

from laconic.arrays import Array, Arrays
from laconic.errors import CorruptArtifact, DataError, InputError
from laconic.metrics import Scorer, make_word_scorer
from laconic.tasks.assets import PREPROCESS, TOKENIZER, VOCABULARY, read_asset, to_json
from laconic.tasks.audio import check_finite, check_shortest, make_tone
from laconic.tasks.audio_preprocess import LogMelPreprocess, check_length
from laconic.tasks.decoder_tensors import PAST, TARGET, TARGET_INPUTS, TOKENS
from laconic.tasks.generation_settings import GenerationSettings
from laconic.tasks.preprocessing import Preprocessing
from laconic.tasks.recording_parts import RecordingPart, TranscribedRecording
from laconic.tasks.recording_windows import STEP_FRAMES, WindowedRecording
from laconic.tasks.row_parsing import LABEL, Targeted
from laconic.tasks.text import TextTask, count_ids
from laconic.tasks.timed_settings import TimedSettings
from laconic.tasks.written_text import WrittenText, describe_target
from laconic.tensor import BATCH, TensorSpec, read_numbers

FEATURES = "input_features"
TEXT = "text"
"""The column of what is to be written, in place of a label."""
LANGUAGE = "language"
"""The column of the language of a row, as `en`."""

TIMESTAMP = re.compile(r"<\|\d+\.\d+\|>")
"""A token of Whisper that tells a time in the recording; no special one."""


class SpeechToText(WrittenText, TranscribedRecording):
    """A sample is a log-mel spectrogram, [bands, frames] float32, or one with its target; all have the same length.

    The metric is 1 minus the word error rate of the likeliest tokens, each behind the target's own earlier ones.
    """

    name = "speech-to-text"
    metric = "word accuracy"
    columns: ClassVar[tuple[str, ...]] = (LABEL, TEXT, LANGUAGE)
    target_column = TEXT
    auto_class = "AutoModelForSpeechSeq2Seq"
    architectures = ("ForConditionalGeneration",)
    source_inputs = (FEATURES,)

    def __init__(
        self,
        tokenizer: Tokenizer,
        inputs: tuple[TensorSpec, ...],
        *,
        preprocess: LogMelPreprocess,
        generation: GenerationSettings,
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer = tokenizer
        self.inputs = inputs
        self.preprocess = preprocess
        self.settings = generation
        self.vocabulary = count_ids(tokenizer)
        self.padding: dict[str, int] = {}

    @classmethod
    def fits(cls, config: Mapping[str, Any]) -> bool:
        """Return whether the model reads spectrograms: encoder-decoders of texts and images have the same names."""
        return bool(config.get("is_encoder_decoder")) and "num_mel_bins" in config

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        given = preprocessing
        generation = given.generation or GenerationSettings(decoder_start_token_id=given.start_id)
        preprocess = given.log_mel or LogMelPreprocess()
        shape = (BATCH, preprocess.feature_size, preprocess.frames)
        features = TensorSpec(name=FEATURES, dtype="float32", shape=shape)
        inputs = (features, *describe_target(generation.max_new_tokens, given.cache_shape))
        return cls(given.tokenizer, inputs, preprocess=preprocess, generation=generation)

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        preprocess = LogMelPreprocess.model_validate(read_asset(folder, PREPROCESS))
        expected = [FEATURES, *TARGET_INPUTS]
        shape = (BATCH, preprocess.feature_size, preprocess.frames)
        if [spec.name for spec in inputs] != expected or inputs[0].shape != shape:
            raise CorruptArtifact(f"{folder} has other inputs than its {PREPROCESS} says. Compress the model again")
        tokenizer, generation = TextTask.read_tokenizer(folder), cls.read_generation(folder)
        return cls(tokenizer, inputs, preprocess=preprocess, generation=generation)

    def assets(self) -> dict[str, bytes]:
        limited = self.vocabulary < count_ids(self.tokenizer)
        return {
            PREPROCESS: to_json(self.preprocess.model_dump(mode="json")),
            TOKENIZER: self.tokenizer.to_str().encode(),
            **self.pack_generation(),
        } | ({VOCABULARY: to_json({"ids": self.vocabulary})} if limited else {})

    def limit_ids(self, count: int) -> None:
        self.vocabulary = min(self.vocabulary, count)
        self.check_generation(count)

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        """Read a recording, and what is to be written for it."""
        (source,), label = super().read_row(values, folder)
        text = values.get(TEXT, label)
        if text is None:
            return (source,), None
        target = self.encode_text(text, prefix=self.find_prefix(values.get(LANGUAGE)))
        return (Targeted(source, target, source.name if isinstance(source, Path) else ""),), text

    def find_prefix(self, language: Any) -> tuple[int, ...]:
        """Find the tokens before a text: of its language where the model chooses it, and the forced ones. Raises
        DataError for a language that it does not know."""
        settings = self.settings
        if not settings.languages:
            return settings.forced_decoder_ids
        token = self.tokenizer.token_to_id(f"<|{language}|>")
        if token not in settings.languages:
            state = "is not given" if language is None else f"is {language!r}, which the model does not know"
            raise DataError(
                f"the model begins with the language of a recording, and that of this text {state}. Give each row its "
                f"{LANGUAGE!r} as a code, such as 'en'; or name one for all in generation_config.json"
            )
        return (int(token), *settings.forced_decoder_ids)

    def parse_label(self, value: Any, sample: Any) -> Any:
        """Return the ids of the target's tokens."""
        return list(sample.target)

    def parse(self, value: Any) -> Any:
        """Take the bytes of an audio file, the same in base64, a Path, a waveform with its rate as `{"array": [...],
        "sampling_rate": 16000}`, an array that is already the input, or any of them with a target."""
        if isinstance(value, Targeted):
            return replace(value, sample=self.parse(value.sample))
        recording = self.read_recording(value)
        if recording is None:
            sample = read_numbers(value, np.dtype(np.float32), "a spectrogram")
            if sample.shape != (expected := self.inputs[0].shape[1:]):
                raise InputError(f"a spectrogram must have the shape {list(expected)}, not {list(sample.shape)}")
            check_finite(sample)
            return sample
        waveform, rate = recording
        check_finite(waveform)
        seconds = len(waveform) / rate
        check_length(seconds, self.preprocess.chunk_length)
        check_shortest(seconds, self.preprocess.n_fft / self.preprocess.sampling_rate)
        return self.preprocess.apply(waveform, rate)

    @property
    def longest_part(self) -> float:
        return self.preprocess.chunk_length

    @property
    def timed_settings(self) -> TimedSettings | None:
        """How a text with timestamps is written; None where the model has none."""
        return TimedSettings.add_to(self.settings)

    def read_windows(self, parts: Sequence[RecordingPart]) -> WindowedRecording:
        """Read a recording that was divided as a whole, to be written down with timestamps. Raises InputError for one
        that is too short."""
        rate, preprocess = parts[0].sample["sampling_rate"], self.preprocess
        check_shortest(parts[-1].end, preprocess.n_fft / preprocess.sampling_rate)
        spectrogram = preprocess.apply_whole(np.concatenate([part.sample["array"] for part in parts]), rate)
        return WindowedRecording(
            spectrogram, preprocess.frames, STEP_FRAMES * preprocess.hop_length / preprocess.sampling_rate
        )

    def has_target(self, sample: Any) -> bool:
        return isinstance(sample, Targeted)

    def with_answers(self, samples: Sequence[Any], written: Array) -> list[Any]:
        return [
            Targeted(sample, tuple(self.cut(ids)), sample.name if isinstance(sample, Path) else "")
            for sample, ids in zip(samples, written.tolist(), strict=True)
        ]

    def encode(self, samples: Sequence[Any]) -> Arrays:
        """Encode spectrograms and targets; a sample without a target has the start token alone."""
        pairs = [(each.sample, each.target) if isinstance(each, Targeted) else (each, ()) for each in samples]
        features = np.stack([features for features, _ in pairs])
        return {FEATURES: features} | self.encode_targets([target for _, target in pairs])

    def write(self, ids: Sequence[int]) -> str:
        return self.drop_times(super().write(ids)).strip()

    def drop_times(self, text: str) -> str:
        """Return a text without the times in it."""
        return TIMESTAMP.sub("", text)

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        begin = self.settings.begin
        rows = zip(outputs[TOKENS].tolist(), labels, strict=True)
        texts = [self.write(tokens[begin : len(target)]) for tokens, target in rows]
        return make_word_scorer(texts, [self.write(target[begin:]) for target in labels])

    def typical(self, batch: int, length: int, seed: int = 0) -> Arrays:
        """Make noise, with a target of `length` tokens where the bounds allow."""
        return self.sample_inputs({BATCH: batch, TARGET: length}, seed)

    def sample_inputs(self, sizes: Mapping[str, int], seed: int = 0) -> Arrays:
        rows = sizes.get(BATCH, 1)
        features = self.inputs[0].sample(np.random.default_rng(seed), {BATCH: rows})
        return {FEATURES: features} | self.draw_target(rows, sizes.get(TARGET, 1), sizes.get(PAST, 0), seed)

    def examples(self, count: int, seed: int = 0) -> list[Any]:
        """Make tones of varied pitch with noise, of up to 3 s, or as long as a recording may be."""
        rng = np.random.default_rng(seed)
        rate = self.preprocess.sampling_rate
        longest = min(3, self.preprocess.chunk_length) * rate
        tones = (make_tone(rng, int(length), rate) for length in rng.integers(longest // 3, longest, count))
        return [self.preprocess.apply(tone, rate) for tone in tones]
