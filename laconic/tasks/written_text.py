"""What tasks share whose models write a text token by token, with a decoder that reads a source."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tokenizers import Tokenizer

from laconic.arrays import Array, Arrays
from laconic.errors import DataError, InputError
from laconic.metrics import Scorer, make_mean_scorer
from laconic.tasks.agreement import Agreement, share_of
from laconic.tasks.answer_comparison import Labels
from laconic.tasks.assets import read_asset, to_json
from laconic.tasks.decoder_tensors import (
    DECODER_ATTENTION_MASK,
    DECODER_INPUT_IDS,
    NEW_TOKENS,
    PAST,
    PROBABILITIES,
    SEQUENCES,
    TARGET,
    TARGET_INPUTS,
    TOKENS,
    CacheShape,
)
from laconic.tasks.generation_settings import GenerationSettings
from laconic.tasks.null_answers import find_centre, shuffle_rows
from laconic.tasks.task import Task
from laconic.tasks.token_positions import find_filled, fit_positions
from laconic.tasks.tolerance import Tolerance
from laconic.tasks.training_needs import HealingLoss, measure_perplexity
from laconic.tensor import BATCH, TensorSpec

GENERATION = "generation.json"
TOKENS_LEAST = 0.8
"""The least share of tokens whose likeliest one is the original's."""
TIMED_TOKENS = 32
"""Tokens that are written for each sample where writing is timed."""


class WrittenText(Task):
    """Mixin of tasks whose answer is a text that a decoder writes.

    In files a sample comes with the text to write, its target; one without gets what the original writes for it. A
    server answers with what the model writes, greedily.

    Fidelity is the overlap of the two distributions of the next token, the mean over the target's tokens, each behind
    the target's own earlier ones (teacher forcing). The metric is the share of the target's tokens that are the
    likeliest there.
    """

    tolerance = Tolerance(mean=0.98)
    metric = "token accuracy"
    objective = "target-tokens"
    labels_alike = False
    has_logits = False
    tokenizer: Tokenizer
    vocabulary: int
    settings: GenerationSettings
    target_column: ClassVar[str] = TARGET
    """The column of the text to write, as messages name it."""
    source_inputs: ClassVar[tuple[str, ...]]
    """The names of the inputs that the encoder reads."""

    @property
    def generation(self) -> GenerationSettings | None:
        """How answers are written."""
        return self.settings

    @property
    def reference_settings(self) -> GenerationSettings:
        """How the original writes the answers that others are compared with."""
        return self.settings

    @staticmethod
    def read_generation(folder: Path) -> GenerationSettings:
        """Read the settings of generation of an artifact."""
        return GenerationSettings.model_validate(read_asset(folder, GENERATION))

    def pack_generation(self) -> dict[str, bytes]:
        """Return the file of an artifact that holds the settings of generation."""
        return {GENERATION: to_json(self.settings.model_dump(mode="json"))}

    def check_generation(self, count: int) -> None:
        """Raise InputError for settings with tokens that the model, which has `count`, lacks."""
        if self.settings.highest_id >= count:
            raise InputError(
                f"the settings of generation name the token {self.settings.highest_id}, and the model has {count}. "
                f"Correct generation_config.json"
            )

    def served_inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.name in self.source_inputs)

    def served_outputs(self, outputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name=SEQUENCES, dtype="int64", shape=(BATCH, self.settings.max_new_tokens)),)

    def encode_request(self, sample: Any) -> Arrays:
        encoded = self.encode([sample])
        return {name: encoded[name] for name in self.source_inputs}

    def encode_text(self, text: Any, prefix: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the tokens that a model should write: those of the tokenizer, with the first token that generation
        forces, and the end token; at most as many as an answer may have. prefix: the tokens before the text, in the
        place of the tokenizer's special ones. Raises DataError for anything but a text, and for a token that the model
        has no embedding for."""
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{self.target_column!r} must be the text to write, not {text!r}")
        first, ends = self.settings.forced_bos_token_id, self.settings.eos_token_id
        truncation: Any = self.tokenizer.truncation
        self.tokenizer.no_truncation()
        try:
            ids = [*(prefix or ()), *self.tokenizer.encode(text, add_special_tokens=prefix is None).ids]
            if first is not None and ids[:1] != [first]:  # a translator's tokenizer begins with the source's language
                ids = [first, *self.tokenizer.encode(text, add_special_tokens=False).ids]
        finally:
            if truncation:
                self.tokenizer.enable_truncation(truncation["max_length"])
        if ends and ids[-1:] not in ([end] for end in ends):
            ids.append(ends[0])
        if max(ids) >= self.vocabulary:
            raise DataError(
                f"the text to write has a token with the id {max(ids)}, and the model has embeddings for the ids 0 to "
                f"{self.vocabulary - 1}: the tokenizer is of another model. Give the one that it was trained with"
            )
        return tuple(ids[: self.settings.max_new_tokens])

    def encode_targets(self, targets: Sequence[Sequence[int]]) -> Arrays:
        """Return the decoder's inputs for the tokens of each target, the first of which follows the start token. An
        empty target is the start token alone. The mask hides forced tokens too, as nobody asks the model for them."""
        rows = [[self.settings.decoder_start_token_id, *target[:-1]] for target in targets]
        ids = np.full((len(rows), max(map(len, rows), default=1)), self.settings.pad_token_id, np.int64)
        mask = np.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)], mask[place, : len(row)] = row, 1
            if len(row) > 1:
                mask[place, self.settings.forced_places] = 0
        past = np.zeros(self.shape_past(len(rows), 0), np.float32)
        return {DECODER_INPUT_IDS: ids, DECODER_ATTENTION_MASK: mask, PAST: past}

    def draw_target(self, rows: int, length: int, past: int, seed: int) -> Arrays:
        """Draw random targets behind `past` random tokens, together no longer than an answer: the model may have no
        positions for more."""
        rng = np.random.default_rng(seed)
        length = min(length, self.settings.max_new_tokens)
        past = min(past, self.settings.max_new_tokens - length)
        ids = rng.integers(0, min(self.tokenizer.get_vocab_size(), self.vocabulary), (rows, length))
        keys = rng.standard_normal(self.shape_past(rows, past)).astype(np.float32)
        return {DECODER_INPUT_IDS: ids, DECODER_ATTENTION_MASK: np.ones_like(ids), PAST: keys}

    def shape_past(self, rows: int, past: int) -> tuple[int, ...]:
        """Return the shape of the keys and values of so many tokens."""
        (spec,) = (spec for spec in self.inputs if spec.name == PAST)
        return (rows, *(axis if isinstance(axis, int) else past for axis in spec.shape[1:]))

    def timed(self, batch: int, length: int) -> Arrays:
        """Make samples for which TIMED_TOKENS are written, token by token, as for requests."""
        drawn = self.typical(batch, length)
        return {name: drawn[name] for name in self.source_inputs} | {NEW_TOKENS: np.array(TIMED_TOKENS)}

    def cut(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens of an answer up to its first end token, that included."""
        ends = [place for place, each in enumerate(ids) if each in self.settings.eos_token_id]
        return list(ids[: ends[0] + 1] if ends else ids)

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        """Return the text of each answer. outputs: what was written, or those of a target, of which the likeliest
        tokens."""
        ids = outputs[SEQUENCES if SEQUENCES in outputs else TOKENS]
        return [{"text": self.write(row)} for row in ids.tolist()]

    def write(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens, without those behind the end token, and without special ones."""
        return str(self.tokenizer.decode(self.cut(ids), skip_special_tokens=True)).strip()

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        expected = reference[PROBABILITIES]
        actual, filled = fit_positions(candidate[PROBABILITIES], expected.shape[1]), find_filled(expected)
        shared = np.minimum(expected, actual).sum(axis=-1, dtype=np.float64) * filled
        return np.asarray((shared.sum(axis=1) / filled.sum(axis=1).clip(min=1)).clip(max=1.0))

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterator[Agreement]:
        expected, filled = reference[TOKENS], find_filled(reference[PROBABILITIES])
        actual = fit_positions(candidate[TOKENS][..., None], expected.shape[1])[..., 0]
        yield share_of(int((expected == actual)[filled].sum()), int(filled.sum()), "agreement", TOKENS_LEAST)

    def null_answers(self, reference: Arrays) -> dict[str, Arrays]:
        """Return the answers of the mean distribution of a token and of nothing but the end, at each place, and
        shuffled ones."""
        probabilities, tokens = reference[PROBABILITIES], reference[TOKENS]
        filled = find_filled(probabilities)
        mean = probabilities[filled].mean(axis=0) if filled.any() else probabilities[0, 0]
        usual = find_centre(tokens[filled][:, None]) if filled.any() else tokens[0, :1]
        end = (self.settings.eos_token_id or (0,))[0]
        ended = np.zeros_like(mean)
        ended[end % len(ended)] = 1
        answers = {"unigram": (mean, usual), "empty text": (ended, np.array([end]))}
        repeated = {
            name: {
                PROBABILITIES: np.where(filled[..., None], row, 0).astype(probabilities.dtype),
                TOKENS: np.broadcast_to(token.astype(tokens.dtype), tokens.shape),
            }
            for name, (row, token) in answers.items()
        }
        return {"shuffled": shuffle_rows(reference), **repeated}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        tokens = outputs[TOKENS]
        shares = []
        for row, target in enumerate(labels):
            right = tokens[row, : len(target)] == np.array(target[: tokens.shape[1]])
            shares.append(float(np.mean(np.delete(right, self.settings.forced_places))))
        return make_mean_scorer(np.array(shares))

    def figures_from_loss(self, loss: float) -> dict[str, float]:
        return measure_perplexity(loss)

    def healing_losses(self, *, layers: bool) -> dict[HealingLoss, float]:
        return {"outputs": 1.0}

    def select_source(self, inputs: Mapping[str, Array]) -> Arrays:
        """Return the inputs that the encoder reads."""
        return {name: array for name, array in inputs.items() if name not in TARGET_INPUTS}


def describe_target(longest: int, cache: CacheShape) -> tuple[TensorSpec, ...]:
    """Return the inputs of a target of at most `longest` tokens."""
    layers, heads, width = cache
    masked = (
        TensorSpec(name=name, dtype="int64", shape=(BATCH, TARGET), bounds={TARGET: (1, longest)})
        for name in (DECODER_INPUT_IDS, DECODER_ATTENTION_MASK)
    )
    shape = (BATCH, layers, heads, PAST, width)
    return (*masked, TensorSpec(name=PAST, dtype="float32", shape=shape, bounds={PAST: (0, longest)}))
