"""Text generation: a prompt or a chat to the text that a causal language model writes after it."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
from tokenizers import Tokenizer

from laconic.arrays import Array, Arrays
from laconic.errors import CorruptArtifact, InputError
from laconic.metrics import Scorer, make_ratio_scorer
from laconic.tasks.agreement import Agreement, share_of
from laconic.tasks.answer_comparison import Labels
from laconic.tasks.assets import PREPROCESS, read_asset
from laconic.tasks.causal_text import CHAT, CausalText
from laconic.tasks.chat_template import ChatTemplate, MarkedText
from laconic.tasks.decoder_tensors import (
    LOG_LIKELIHOODS,
    NEW_TOKENS,
    PAST,
    POSITION_IDS,
    PROBABILITIES,
    SEQUENCES,
    TOKENS,
    CacheShape,
)
from laconic.tasks.generation_settings import GenerationSettings
from laconic.tasks.preprocessing import Preprocessing, TextOptions
from laconic.tasks.text import Tokens
from laconic.tasks.text2text_generation import TargetedText
from laconic.tasks.token_positions import find_filled, fit_positions
from laconic.tasks.training_needs import HealingLoss
from laconic.tasks.written_text import TOKENS_LEAST, WrittenText
from laconic.tensor import BATCH, TensorSpec

SERVED = ("input_ids", "attention_mask")
INPUTS = (*SERVED, POSITION_IDS, PAST)
"""The inputs of a model with a cache; one without has SERVED alone."""
PROMPT_TOKENS = 64
"""Tokens of a text without a marked answer that are its prompt."""
WRITTEN_TOKENS = 16
"""Tokens that are written for each sample where writing is timed."""
COMPARED_TOKENS = 32
"""Tokens of an answer that are compared, and that the original writes where samples have no answers."""

LEAST = 1e-9
"""The least probability that a divergence is taken of."""


class TextGeneration(WrittenText, CausalText):
    """A sample is a text, of which the first tokens are the prompt; a chat; or a prompt with its completion.

    What follows the prompt, its target, is the marked answer, the last one of a chat; where none is marked, what the
    original writes greedily. The distributions of the next token along the target are compared.

    The metric is the mean log-likelihood of the tokens of marked answers, but for the last token of each, and where
    none is marked of the prompt's behind the first. Minus it is the logarithm of the perplexity.

    A model without a cache of keys and values scores texts, and writes nothing: the answer to a text is its likeliest
    next token.
    """

    name = "text-generation"
    metric = "log-likelihood of a token"
    measures_perplexity = True
    objective = "next-token"
    default_recipe = "text-generation"
    has_logits = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        inputs: tuple[TensorSpec, ...],
        *,
        generation: GenerationSettings,
        start_id: int,
        end_id: int | None = None,
        chat: ChatTemplate | None = None,
        **options: Unpack[TextOptions],
    ) -> None:
        CausalText.__init__(self, tokenizer, inputs, start_id=start_id, end_id=end_id, chat=chat, **options)
        self.settings = generation

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        inputs = describe_inputs(preprocessing.max_tokens, preprocessing.cache_shape)
        return cls(preprocessing.tokenizer, inputs, **cls.select_options(preprocessing))

    @classmethod
    def select_options(cls, preprocessing: Preprocessing) -> dict[str, Any]:
        """Return what the task takes of a checkpoint's preprocessing beside the tokenizer."""
        return {
            "generation": preprocessing.generation or GenerationSettings(decoder_start_token_id=preprocessing.start_id),
            "start_id": preprocessing.start_id,
            "end_id": preprocessing.end_id,
            "chat": preprocessing.chat,
            **preprocessing.text_options,
        }

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        if tuple(spec.name for spec in inputs) not in (INPUTS, SERVED):
            raise CorruptArtifact(f"{folder} has other inputs than a language model. Compress the model again")
        preprocess = read_asset(folder, PREPROCESS)
        chat = ChatTemplate(**read_asset(folder, CHAT)) if (folder / CHAT).is_file() else None
        generation = cls.read_generation(folder)
        return cls(cls.read_tokenizer(folder), inputs, **preprocess, generation=generation, chat=chat)

    def assets(self) -> dict[str, bytes]:
        return CausalText.assets(self) | self.pack_generation()

    def with_cache(self, shape: CacheShape | None) -> Self:
        task = copy.copy(self)
        task.inputs = describe_inputs(self.max_tokens, shape)
        task.padding = {spec.name: self.pad_id if spec.name == "input_ids" else 0 for spec in task.inputs}
        return task

    @property
    def has_cache(self) -> bool:
        """Whether the model reads keys and values of earlier tokens, and so writes."""
        return any(spec.name == PAST for spec in self.inputs)

    def describe_limit(self) -> str | None:
        if self.has_cache:
            return None
        return (
            "there is no cache of keys and values, for this model or this target: the artifact scores texts, answers "
            "with the one likeliest next token, and writes nothing"
        )

    @property
    def generation(self) -> GenerationSettings | None:
        return self.settings if self.has_cache else None

    def limit_ids(self, count: int) -> None:
        CausalText.limit_ids(self, count)
        self.check_generation(count)

    @property
    def reference_settings(self) -> GenerationSettings:
        return self.settings.model_copy(update={"max_new_tokens": min(self.settings.max_new_tokens, self.compared)})

    @property
    def compared(self) -> int:
        """The most tokens of a target: no more than half of the model's context."""
        return max(1, min(COMPARED_TOKENS, self.max_tokens // 2))

    def served_inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.name in SERVED)

    def has_target(self, sample: Any) -> bool:
        return isinstance(sample, (TargetedText, MarkedText))

    def with_answers(self, samples: Sequence[Any], written: Array) -> list[Any]:
        return [TargetedText(text, self._cut_known(ids)) for text, ids in zip(samples, written.tolist(), strict=True)]

    def _cut_known(self, ids: list[int]) -> list[int]:
        """Return an answer up to the first token that the tokenizer lacks: embeddings are often padded with some."""
        return self.cut(list(takewhile(lambda each: each < self.vocabulary, ids)))

    def divide(self, samples: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
        """Return the tokens of each sample's prompt, and those that follow it; none where nothing is marked."""
        texts = [sample for sample in samples if not isinstance(sample, Tokens)]
        tokenized = iter(self.tokenize(texts))
        return [
            (list(sample.ids), []) if isinstance(sample, Tokens) else self._divide(sample, *next(tokenized))
            for sample in samples
        ]

    def _divide(self, sample: Any, ids: Array, learned: Array) -> tuple[list[int], list[int]]:
        if not isinstance(sample, MarkedText):
            written = list(getattr(sample, "target", ()))
            ended = len(ids) and ids[-1] == self.end_id and not self._is_end_read(sample)
            prompt = ids[: len(ids) - ended].tolist()
            most = max(1, min(PROMPT_TOKENS, self.max_tokens - self.compared))
            return prompt[:most] or [self.start_id], written[: self.compared]
        start, stop = find_last_answer(learned)
        room = max(1, self.max_tokens - self.compared)
        prompt = ids[max(0, start - room) : start].tolist()
        return prompt or [self.start_id], ids[start : min(stop, start + self.compared)].tolist()

    def _is_end_read(self, sample: str) -> bool:
        """Return whether a text itself ends with the end token, which `tokenize` appends to any other."""
        return self.encode_texts([sample])[0].ids[-1:] == [self.end_id]

    def encode(self, samples: Any) -> Arrays:
        """Encode prompts with all but the last token of their targets. The mask is 1 at tokens that those of the target
        follow; without a target, at the last one of the prompt."""
        parts = self.divide(samples)
        batch = CausalText.encode(self, [Tokens((*prompt, *target[:-1])) for prompt, target in parts])
        ids, mask = batch["input_ids"], np.zeros_like(batch["attention_mask"])
        for row, (prompt, target) in enumerate(parts):
            mask[row, len(prompt) - 1 : len(prompt) - 1 + max(1, len(target))] = 1
        return {"input_ids": ids, "attention_mask": mask, **self.encode_places(ids, 0, 0)}

    def encode_request(self, sample: Any) -> Arrays:
        """Encode a whole prompt, which is not cut as those of samples in files are."""
        encoded = CausalText.encode(self, [sample])
        if not self.has_cache:
            encoded["attention_mask"][:, :-1] = 0
        return encoded

    def served_outputs(self, outputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return super().served_outputs(outputs) if self.has_cache else outputs

    def split(self, sample: Any) -> list[Any]:
        """Return the sample alone. Raises InputError for a prompt that leaves no room for an answer: none is cut."""
        (encoding,) = self.encode_texts([sample])
        if encoding.overflowing or len(encoding.ids) >= self.max_tokens:
            raise InputError(
                f"the model's context is {self.max_tokens} tokens, and the text leaves no room for an answer. Send a "
                f"shorter text"
            )
        return [sample]

    def encode_places(self, ids: Array, past: int, seed: int) -> Arrays:
        """Return the places of tokens behind `past` others, and random keys and values for those; nothing without a
        cache. ids: [batch, seq]."""
        if not self.has_cache:
            return {}
        rows, length = ids.shape
        places = np.tile(np.arange(past, past + length), (rows, 1))
        shape = self.shape_past(rows, past)
        keys = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        return {POSITION_IDS: places, PAST: keys}

    def typical(self, batch: int, length: int, seed: int = 0) -> Arrays:
        return self.sample_inputs({BATCH: batch, "seq": length}, seed)

    def sample_inputs(self, sizes: Mapping[str, int], seed: int = 0) -> Arrays:
        past = min(sizes.get(PAST, 0), self.max_tokens - 1)
        length = min(sizes.get("seq", 1), self.max_tokens - past)
        drawn = CausalText.typical(self, sizes.get(BATCH, 1), length, seed)
        return drawn | self.encode_places(drawn["input_ids"], past, seed)

    def timed(self, batch: int, length: int) -> Arrays:
        """Make prompts after which WRITTEN_TOKENS are written; whole texts without a cache."""
        if not self.has_cache:
            return self.typical(batch, length)
        drawn = self.typical(batch, max(1, min(length, self.max_tokens - WRITTEN_TOKENS)))
        return {name: drawn[name] for name in SERVED} | {NEW_TOKENS: np.array(WRITTEN_TOKENS)}

    def check_values(self, inputs: Arrays) -> None:
        CausalText.check_values(self, {name: array for name, array in inputs.items() if name in SERVED})

    def divergence(self, reference: Arrays, candidate: Arrays) -> Array:
        """Measure the Kullback-Leibler divergence of the candidate's distributions from the reference's over groups of
        tokens, the mean along each target: [samples], in nats. It is at most that over tokens."""
        expected = reference[PROBABILITIES].astype(np.float64)
        actual = fit_positions(candidate[PROBABILITIES], expected.shape[1]).astype(np.float64)
        filled = find_filled(expected)
        terms = expected * (np.log(expected.clip(min=LEAST)) - np.log(actual.clip(min=LEAST)))
        sums = terms.sum(axis=-1) * filled
        return np.asarray(sums.sum(axis=1) / filled.sum(axis=1).clip(min=1))

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterator[Agreement]:
        """Compare the likeliest tokens along the targets: the share that is the same; how far a target is the same from
        its start on; and the exponential of minus the Kullback-Leibler divergence of the two distributions."""
        expected, filled = reference[TOKENS], find_filled(reference[PROBABILITIES])
        actual = fit_positions(candidate[TOKENS][..., None], expected.shape[1])[..., 0]
        same = (expected == actual) | ~filled
        yield share_of(int((same & filled).sum()), int(filled.sum()), "agreement", TOKENS_LEAST)
        kept = np.logical_and.accumulate(same, axis=1) & filled
        yield Agreement("prefix_kept", float((kept.sum(axis=1) / filled.sum(axis=1).clip(min=1)).mean()))
        yield Agreement("exp_minus_kl", float(np.exp(-self.divergence(reference, candidate).mean())))

    def null_answers(self, reference: Arrays) -> dict[str, Arrays]:
        """Return those of `WrittenText`, without likelihoods: they are of the text's own tokens."""
        compared = {name: array for name, array in reference.items() if name != LOG_LIKELIHOODS}
        return super().null_answers(compared)

    def label_samples(self, samples: Sequence[Any], labels: Labels) -> Labels:
        """Return the places of the tokens whose successor's likelihood counts, a range for each sample; None where
        no token counts."""
        parts = self.divide(samples)
        places = [
            range(len(prompt) - 1, len(prompt) + len(target) - 2)
            if isinstance(sample, MarkedText)
            else range(len(prompt) - 1)
            for sample, (prompt, target) in zip(samples, parts, strict=True)
        ]
        return places if any(places) else None

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        rows = zip(outputs[LOG_LIKELIHOODS], labels, strict=True)
        sums = [row[places.start : places.stop].sum(dtype=np.float64) for row, places in rows]
        return make_ratio_scorer(np.array(sums), np.array([len(places) for places in labels]))

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        """Return the text that was written after each prompt; of a target the likeliest tokens."""
        if SEQUENCES in outputs:
            return super().decode(outputs, samples)
        filled = find_filled(outputs[PROBABILITIES])
        return [{"text": self.write(row[keep].tolist())} for row, keep in zip(outputs[TOKENS], filled, strict=True)]

    def healing_losses(self, *, layers: bool) -> dict[HealingLoss, float]:
        """Compare the probabilities; after them the last hidden states, where layers are shared."""
        shared: dict[HealingLoss, float] = {"last-hidden-state": 1.0} if layers else {}
        return {"probabilities": 1.0, **shared}


def find_last_answer(learned: Array) -> tuple[int, int]:
    """Find where the last answer in a text begins and ends. learned: whether a token belongs to one, [tokens] bool."""
    stop = len(learned) - int(learned[::-1].argmax())
    return stop - int(np.append(~learned[:stop][::-1], True).argmax()), stop


def describe_inputs(longest: int, cache: CacheShape | None) -> tuple[TensorSpec, ...]:
    """Return the inputs of a language model for texts of at most `longest` tokens. cache: its shape; None without."""
    bounds, names = {"seq": (1, longest)}, INPUTS[:-1] if cache else SERVED
    read = (TensorSpec(name=name, dtype="int64", shape=(BATCH, "seq"), bounds=bounds) for name in names)
    if cache is None:
        return tuple(read)
    layers, heads, width = cache
    shape = (BATCH, layers, heads, PAST, width)
    return (*read, TensorSpec(name=PAST, dtype="float32", shape=shape, bounds={PAST: (0, longest)}))
