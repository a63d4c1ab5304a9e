"""Text-to-text generation: a text to the text that an encoder–decoder writes for it."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from tokenizers import Tokenizer

from laconic.arrays import Array, Arrays
from laconic.errors import CorruptArtifact, DataError, InputError
from laconic.metrics import Scorer, make_mean_scorer
from laconic.tasks.generation import Generation
from laconic.tasks.preprocessing import Preprocessing
from laconic.tasks.task import LABEL, HealingLoss, Tolerance, read_asset, to_json
from laconic.tasks.text import TEXT_SCHEMA, TextTask
from laconic.tasks.token_positions import find_filled, fit_positions
from laconic.tensor import BATCH, TensorSpec

GENERATION = "generation.json"
TARGET = "target"
"""The column of the text to write, in place of a label."""
SOURCE_INPUTS = ("input_ids", "attention_mask")
DECODER_INPUT_IDS, DECODER_ATTENTION_MASK, PAST = "decoder_input_ids", "decoder_attention_mask", "past"
"""The inputs of the decoder: a target, the mask of its padding, and the keys and values of earlier tokens."""
PROBABILITIES, TOKENS, SEQUENCES = "probabilities", "tokens", "sequences"
"""The outputs of a target, and that of generation."""


class TargetedText(str):
    """A text with the tokens that a model is to write for it.

    target: their ids, the end token included.
    """

    target: tuple[int, ...]

    def __new__(cls, text: str, target: Sequence[int]) -> "TargetedText":
        made = super().__new__(cls, text)
        made.target = tuple(target)
        return made


class Text2TextGeneration(TextTask):
    """A sample is a text; in files with its target, and otherwise with what the original writes. A server answers with
    what the model writes, greedily.

    Fidelity is the overlap of the two distributions of the next token, the mean over the target's tokens, each behind
    the target's own earlier tokens. The metric is the share of the target's tokens that are likeliest there.
    """

    name = "text2text-generation"
    columns: ClassVar[tuple[str, ...]] = (LABEL, TARGET)
    field_description = "A text, or a list of texts."
    tolerance = Tolerance(mean=0.98)
    metric = "token accuracy"
    objective = "target-tokens"
    labels_alike = False
    has_logits = False
    auto_class = "AutoModelForSeq2SeqLM"
    architectures = ("ForConditionalGeneration", "MTModel")

    def __init__(
        self,
        tokenizer: Tokenizer,
        inputs: tuple[TensorSpec, ...],
        *,
        max_tokens: int,
        pad_id: int,
        generation: Generation,
    ) -> None:
        super().__init__(tokenizer, inputs, max_tokens=max_tokens, pad_id=pad_id)
        self.generation = generation

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether the model reads texts: encoder–decoders of images and sound have the same names."""
        return bool(config.get("is_encoder_decoder")) and not {"num_mel_bins", "vision_config"} & set(config)

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        given = preprocessing
        generation = given.generation or Generation(decoder_start_token_id=given.start_id)
        pairs, heads, width = given.cache_shape
        longest = generation.max_new_tokens
        target = {"shape": (BATCH, "target"), "bounds": {"target": (1, longest)}, "dtype": "int64"}
        past = {"shape": (BATCH, pairs, heads, PAST, width), "bounds": {PAST: (0, longest)}, "dtype": "float32"}
        inputs = (
            *cls.signature(given),
            TensorSpec(name=DECODER_INPUT_IDS, **target),
            TensorSpec(name=DECODER_ATTENTION_MASK, **target),
            TensorSpec(name=PAST, **past),
        )
        return cls(
            given.tokenizer, inputs, max_tokens=given.max_tokens, pad_id=given.pad_id, generation=generation
        )

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        preprocess = read_asset(folder, "preprocess.json")
        task = cls(
            cls.read_tokenizer(folder),
            inputs,
            max_tokens=preprocess["max_tokens"],
            pad_id=preprocess["pad_id"],
            generation=Generation.model_validate(read_asset(folder, GENERATION)),
        )
        if [spec.name for spec in inputs] != [*SOURCE_INPUTS, DECODER_INPUT_IDS, DECODER_ATTENTION_MASK, PAST]:
            raise CorruptArtifact(f"{folder} has other inputs than an encoder–decoder. Compress the model again")
        return task

    def assets(self) -> dict[str, bytes]:
        return super().assets() | {GENERATION: to_json(self.generation.model_dump(mode="json"))}

    def limit_ids(self, count: int) -> None:
        super().limit_ids(count)
        if self.generation.highest_id >= count:
            raise InputError(
                f"the settings of generation name the token {self.generation.highest_id}, and the model has {count}. "
                f"Correct generation_config.json"
            )

    def served_inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.name in SOURCE_INPUTS)

    def served_outputs(self, outputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name=SEQUENCES, dtype="int64", shape=(BATCH, self.generation.max_new_tokens)),)

    def sample_schema(self) -> dict[str, Any]:
        return TEXT_SCHEMA

    def parse(self, value: Any) -> Any:
        if isinstance(value, str):
            return value
        raise InputError(f"a sample must be a text, not {type(value).__name__}")

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        (text,), label = super().read_row(values, folder)
        label = values.get(TARGET, label)
        if label is None:
            return (text,), None
        if not isinstance(text, str):
            return (text,), label
        return (TargetedText(text, self.encode_target(label)),), label

    def parse_label(self, value: Any, sample: Any) -> Any:
        """The ids of the target's tokens."""
        return list(self.encode_target(value))

    def encode_target(self, text: Any) -> tuple[int, ...]:
        """The tokens that a model writes for a target: those of the tokenizer, with the first token that generation
        forces, and at most as many as an answer may have. Raises DataError for anything but a text."""
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{TARGET!r} must be the text to write, not {text!r}")
        first, end = self.generation.forced_bos_token_id, self.generation.eos_token_id
        self.tokenizer.no_truncation()
        try:
            ids = list(self.tokenizer.encode(text).ids)
            if first is not None and ids[:1] != [first]:  # a translator's tokenizer begins with the source's language
                ids = [first, *self.tokenizer.encode(text, add_special_tokens=False).ids, *end[:1]]
        finally:
            self.tokenizer.enable_truncation(self.max_tokens)
        if end and ids[-1] not in end:
            ids.append(end[0])
        return tuple(ids[: self.generation.max_new_tokens])

    def has_target(self, sample: Any) -> bool:
        return isinstance(sample, TargetedText)

    def with_answers(self, samples: Sequence[Any], written: Array) -> list[Any]:
        return [
            TargetedText(text, self.cut(ids) or (self.generation.pad_token_id,))
            for text, ids in zip(samples, written.tolist(), strict=True)
        ]

    def cut(self, ids: Sequence[int]) -> list[int]:
        """The tokens of an answer up to its first end token, that included."""
        ends = [place for place, each in enumerate(ids) if each in self.generation.eos_token_id]
        return list(ids[: ends[0] + 1] if ends else ids)

    def encode_request(self, sample: Any) -> Arrays:
        encoded = self.encode([sample])
        return {name: encoded[name] for name in SOURCE_INPUTS}

    def encode(self, samples: Sequence[Any]) -> Arrays:
        """Source and target; a sample without a target has the start token alone."""
        sources = copy.copy(self)
        sources.inputs = self.served_inputs()
        batch = TextTask.encode(sources, samples)
        start = self.generation.decoder_start_token_id
        rows = [[start, *getattr(sample, "target", ())[:-1]] for sample in samples]
        width = max(map(len, rows), default=1)
        ids = np.full((len(rows), width), self.generation.pad_token_id, np.int64)
        mask = np.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)], mask[place, : len(row)] = row, 1
        return batch | {DECODER_INPUT_IDS: ids, DECODER_ATTENTION_MASK: mask, PAST: self.make_past(len(rows))}

    def make_past(self, rows: int) -> Array:
        """The keys and values of no tokens."""
        shape = self.inputs[-1].shape
        return np.zeros([rows, *(axis if isinstance(axis, int) else 0 for axis in shape[1:])], np.float32)

    def check_values(self, inputs: Arrays) -> None:
        super().check_values({name: array for name, array in inputs.items() if name in SOURCE_INPUTS})

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        """The text of each answer. outputs: of generation, or those of a target, which give the text of the likeliest
        tokens."""
        ids = outputs.get(SEQUENCES, outputs.get(TOKENS))
        assert ids is not None
        texts = self.tokenizer.decode_batch([self.cut(row) for row in ids.tolist()], skip_special_tokens=True)
        return [{"text": text.strip()} for text in texts]

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        wanted = reference[PROBABILITIES]
        found, filled = fit_positions(candidate[PROBABILITIES], wanted.shape[1]), find_filled(wanted)
        shared = np.minimum(wanted, found).sum(axis=-1, dtype=np.float64) * filled
        return np.asarray((shared.sum(axis=1) / filled.sum(axis=1).clip(min=1)).clip(max=1.0))

    def figures(self, reference: Arrays, candidate: Arrays) -> dict[str, float]:
        wanted, filled = reference[TOKENS], find_filled(reference[PROBABILITIES])
        found = fit_positions(candidate[TOKENS][..., None], wanted.shape[1])[..., 0]
        return {"agreement": float(((wanted == found) & filled).sum() / filled.sum().clip(min=1))}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        shares = [
            float(np.mean(np.array(target) == fit_positions(row[None, :, None], len(target))[0, :, 0]))
            for row, target in zip(outputs[TOKENS], labels, strict=True)
        ]
        return make_mean_scorer(np.array(shares))

    def healing_losses(self, *, layers: bool) -> dict[HealingLoss, float]:
        return {"outputs": 1.0}

    def typical(self, batch: int, length: int, seed: int = 0) -> Arrays:
        sources = copy.copy(self)
        sources.inputs = self.served_inputs()
        drawn = TextTask.typical(sources, batch, length, seed)
        return drawn | self._draw_target(batch, min(length, self.generation.max_new_tokens), 0, seed)

    def sample_inputs(self, sizes: Mapping[str, int], seed: int = 0) -> Arrays:
        rows = sizes.get(BATCH, 1)
        source = self.typical(rows, sizes.get("seq", 1), seed)
        return source | self._draw_target(rows, sizes.get(TARGET, 1), sizes.get(PAST, 0), seed)

    def _draw_target(self, rows: int, length: int, past: int, seed: int) -> Arrays:
        """A random target behind `past` random tokens."""
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, min(self.tokenizer.get_vocab_size(), self.vocabulary), (rows, length))
        shape = [rows, *(axis if isinstance(axis, int) else past for axis in self.inputs[-1].shape[1:])]
        return {
            DECODER_INPUT_IDS: ids,
            DECODER_ATTENTION_MASK: np.ones_like(ids),
            PAST: rng.standard_normal(shape).astype(np.float32),
        }
