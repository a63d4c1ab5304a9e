"""Automatic speech recognition: a recording to its text, by connectionist temporal classification."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from laconic.arrays import Array, Arrays, first
from laconic.errors import DataError
from laconic.metrics import Scorer, make_word_scorer
from laconic.tasks.agreement import Agreement, compare_words, share_of
from laconic.tasks.answer_comparison import Labels
from laconic.tasks.assets import read_asset, to_json
from laconic.tasks.audio import AudioTask
from laconic.tasks.audio_preprocess import AudioPreprocess
from laconic.tasks.ctc_vocabulary import CtcVocabulary
from laconic.tasks.null_answers import SURE, make_null_logits, shuffle_rows
from laconic.tasks.preprocessing import Preprocessing
from laconic.tasks.recording_parts import TranscribedRecording
from laconic.tasks.row_parsing import LABEL
from laconic.tasks.token_positions import find_filled, overlap_positions
from laconic.tasks.tolerance import Tolerance
from laconic.tensor import TensorSpec

CHARACTERS = "characters.json"
NO_CHARACTERS = CtcVocabulary(tokens=(), blank=0, delimiter="|")
"""For a task that only needs the shapes of its inputs."""
FRAMES = "logits_1"
"""The axis of frames in the output, as the signature of a module names it."""
TEXT = "text"
"""The column of what is said, in place of a label."""
LONGEST_PART = 30.0
"""Seconds of the parts in which longer recordings are read: attention takes time with the square of them."""


class SpeechRecognition(TranscribedRecording, AudioTask):
    """Fidelity is the overlap of the two distributions of characters over the frames of a recording, less the blank
    between characters. The metric is 1 minus the word error rate, which counts wrong, missing and added words per word
    of the text."""

    name = "automatic-speech-recognition"
    tolerance = Tolerance(mean=0.95)
    metric = "word accuracy"
    objective = "ctc"
    columns: ClassVar[tuple[str, ...]] = (LABEL, TEXT)
    labels_alike = False
    has_logits = False
    auto_class = "AutoModelForCTC"
    architectures: ClassVar[tuple[str, ...]] = ("ForCTC",)

    def __init__(
        self,
        inputs: tuple[TensorSpec, ...],
        *,
        preprocess: AudioPreprocess,
        characters: CtcVocabulary = NO_CHARACTERS,
    ) -> None:
        super().__init__(inputs, preprocess=preprocess)
        self.characters = characters

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        task = super().from_preprocessing(preprocessing)
        task.characters = preprocessing.characters or NO_CHARACTERS
        return task

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        task = super().from_assets(folder, inputs)
        task.characters = CtcVocabulary.model_validate(read_asset(folder, CHARACTERS))
        return task

    def assets(self) -> dict[str, bytes]:
        return super().assets() | {CHARACTERS: to_json(self.characters.model_dump(mode="json"))}

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        """Read a recording, and what is said in it."""
        samples, label = super().read_row(values, folder)
        return samples, values.get(TEXT, label)

    def parse_label(self, value: Any, sample: Any) -> Any:
        """Return what is said, as the model writes it. Raises DataError where it cannot."""
        if not isinstance(value, str):
            raise DataError(f"a label must be the text of what is said, not {value!r}")
        text = " ".join(value.split())
        self.characters.encode(text)
        return text.lower() if self.characters.upper else text

    @property
    def longest_part(self) -> float:
        return LONGEST_PART

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        return [{"text": text} for text in self.write(first(outputs))]

    def derive_sizes(self, sizes: dict[str, int]) -> dict[str, int]:
        return {FRAMES: self.preprocess.count_frames(sizes["samples"])} if "samples" in sizes else {}

    def write(self, logits: Array) -> list[str]:
        """Return the text of each recording. logits: [samples, frames, tokens], zeros at frames of padding."""
        return [
            self.characters.decode(row[filled].argmax(axis=-1).tolist())
            for row, filled in zip(logits, find_filled(logits), strict=True)
        ]

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        return overlap_positions(first(reference), first(candidate), self.characters.blank)

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterator[Agreement]:
        expected, actual = self.write(first(reference)), self.write(first(candidate))
        same = sum(one == other for one, other in zip(expected, actual, strict=True))
        yield share_of(same, len(expected), "agreement", 0.0)
        yield from compare_words(expected, actual)

    def null_answers(self, reference: Arrays) -> dict[str, Arrays]:
        (name, logits), *_ = reference.items()
        silent = SURE * (np.arange(logits.shape[-1]) == self.characters.blank)
        silence = np.where(find_filled(logits)[..., None], silent, 0).astype(logits.dtype)
        shuffled = shuffle_rows({name: logits})
        nulls = make_null_logits(logits) | {"silence": silence}
        return {"shuffled": shuffled} | {each: {name: row} for each, row in nulls.items()}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        return make_word_scorer(self.write(first(outputs)), labels)
