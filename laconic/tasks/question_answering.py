"""Extractive question answering: a question and a context to the part of the context that answers it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tokenizers import Encoding

from laconic.arrays import Array, Arrays, first
from laconic.errors import DataError, InputError, did_you_mean
from laconic.metrics import Scorer, make_mean_scorer
from laconic.tasks.agreement import Agreement, compare_class
from laconic.tasks.answer_comparison import Labels
from laconic.tasks.null_answers import SURE, shuffle_rows
from laconic.tasks.text import TEXT_SCHEMA, TextTask, Tokens
from laconic.tasks.token_positions import find_filled, fit_positions, softmax_positions
from laconic.tasks.tolerance import Tolerance

QUESTION, CONTEXT, ANSWERS = "question", "context", "answers"
"""The keys of a sample, and the column of its answers."""
LONGEST = 15
"""The most tokens of an answer, as in transformers' pipeline."""
ROOM = "a"
"""The shortest context: a question must leave room for one token."""
ASKED = 5
"""Words of a question among the examples."""
SPANS_LEAST = 0.8
"""The least mean F1 of answers beside the original's."""
NO_ANSWER = (0, 0)
"""The span at which a model points that finds no answer."""
ENDS = ("start", "end")
"""The outputs at each position."""


class QuestionAnswering(TextTask):
    """A sample is a question with a context. The answer is the likeliest span of the context. A context that is longer
    than the model takes is answered window by window; the likeliest answer of all windows counts.

    Fidelity is the overlap of the two distributions of the first token of the answer, and of its last one: the mean of
    both. The metric is the mean F1 of the answer's tokens.
    """

    name = "question-answering"
    field = "inputs"
    field_description = 'An object {"question": ..., "context": ...}, or a list of such.'
    columns: ClassVar[tuple[str, ...]] = (QUESTION, CONTEXT, ANSWERS)
    accepts = frozenset()
    tolerance = Tolerance(mean=0.98)
    metric = "token F1"
    objective = "answer-span"
    has_logits = False
    has_class_head = True
    auto_class = "AutoModelForQuestionAnswering"
    architectures = ("ForQuestionAnswering",)

    @classmethod
    def new_classes(cls, labels: Sequence[Any], known: Sequence[str]) -> tuple[str, ...]:
        return () if len(known) == len(ENDS) else ENDS

    def set_truncation(self, length: int) -> None:
        self.tokenizer.enable_truncation(length, strategy="only_second")

    def sample_schema(self) -> dict[str, Any]:
        texts = {QUESTION: TEXT_SCHEMA, CONTEXT: TEXT_SCHEMA}
        return {"type": "object", "properties": texts, "required": [*texts], "additionalProperties": False}

    def parse(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == 2:
            value = dict(zip((QUESTION, CONTEXT), value, strict=True))
        if not isinstance(value, Mapping) or not all(isinstance(value.get(key), str) for key in (QUESTION, CONTEXT)):
            raise InputError(f"a sample must be an object with the texts {QUESTION!r} and {CONTEXT!r}")
        if unknown := sorted(map(str, set(value) - {QUESTION, CONTEXT})):
            raise InputError(f"a sample has {QUESTION!r} and {CONTEXT!r}, not {', '.join(unknown)}")
        self.encode_texts([(value[QUESTION], ROOM)])
        return (value[QUESTION], value[CONTEXT])

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        """Read a row of SQuAD: question, context and answers, `{"text": [...], "answer_start": [...]}`."""
        if self.field in values:
            return (values[self.field],), values.get(ANSWERS)
        for key in (QUESTION, CONTEXT):
            if key not in values:
                raise InputError(f"there is no {key!r}. {did_you_mean(key, values)}")
        return ({key: values[key] for key in (QUESTION, CONTEXT)},), values.get(ANSWERS)

    def encode_texts(self, samples: Sequence[Any]) -> list[Encoding]:
        try:
            return super().encode_texts(samples)
        except Exception as error:  # tokenizers raises bare Exception
            raise InputError(
                f"the question leaves no room for the context: the model takes {self.max_tokens} tokens ({error})"
            ) from error

    def parse_label(self, value: Any, sample: Any) -> Any:
        """Return the positions of the first and the last token of the answer, both 0 where the answer was cut off, and
        of the first and the last token of the context."""
        start, end = read_answer(value, sample[1])
        encoding = self.tokenizer.encode(*sample)
        context = find_context(encoding)
        inside = [index for index in context if encoding.offsets[index][1] > start and encoding.offsets[index][0] < end]
        whole = bool(inside) and encoding.offsets[inside[-1]][1] >= end
        answer = (inside[0], inside[-1]) if whole else (0, 0)
        return [*answer, min(context, default=0), max(context, default=0)]

    def split(self, sample: Any) -> list[Any]:
        return list(make_passages(self.tokenizer.encode(*sample), sample[1]))

    def merge(self, answers: Sequence[Any]) -> Any:
        return max(answers, key=itemgetter("score"))

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        answers = []
        for logits, sample in zip(first(outputs), samples, strict=True):
            passage = sample if isinstance(sample, Passage) else self.split(sample)[0]
            low, high, score = find_span(logits, passage.first, passage.last)
            start, end = passage.find_characters(low, high)
            answers.append({"answer": passage.context[start:end], "score": score, "start": start, "end": end})
        return answers

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        expected = first(reference)
        actual, filled = fit_positions(first(candidate), expected.shape[1]), find_filled(expected)
        shared = [
            np.minimum(softmax_positions(expected[..., end], filled), softmax_positions(actual[..., end], filled)).sum(
                -1
            )
            for end in range(len(ENDS))
        ]
        return np.asarray(np.mean(shared, axis=0))

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterator[Agreement]:
        """Compare the tokens of answers (F1), and whether there is an answer at all."""
        expected = first(reference)
        actual, filled = fit_positions(first(candidate), expected.shape[1]), find_filled(expected)
        sides = [
            [find_span(row, 0, int(there.sum()) - 1)[:2] for row, there in zip(logits, filled, strict=True)]
            for logits in (expected, actual)
        ]
        shared = [measure_span_f1(one, other) for one, other in zip(*sides, strict=True)]
        yield Agreement("token_f1", float(np.mean(shared)), SPANS_LEAST)
        one, two = (np.array([span != NO_ANSWER for span in side]) for side in sides)
        yield from compare_class(one, two, "samples with an answer")

    def null_answers(self, reference: Arrays) -> dict[str, Arrays]:
        (name, logits), *_ = reference.items()
        filled = find_filled(logits)[..., None]
        answers = {"constant": logits.mean(axis=0), "no answer": np.zeros_like(logits[0])}
        answers["no answer"][0] = SURE
        # A zero stands for padding.
        repeated = {each: {name: np.where(filled, row + 1e-6, 0).astype(logits.dtype)} for each, row in answers.items()}
        return {"shuffled": shuffle_rows({name: logits}), **repeated}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        scores = []
        for logits, (start, end, low, high) in zip(first(outputs), labels, strict=True):
            scores.append(measure_span_f1(find_span(logits, low, high)[:2], (start, end)) if start else 0.0)
        return make_mean_scorer(np.array(scores))

    def example_request(self) -> dict[str, Any]:
        return {self.field: {QUESTION: "Where do cats sleep?", CONTEXT: "A cat sleeps on a warm mat."}}

    def examples(self, count: int, seed: int = 0) -> list[Any]:
        texts = super().examples(2 * count, seed)
        return [(" ".join(one.split()[:ASKED]), two) for one, two in zip(texts[0::2], texts[1::2], strict=True)]

    def fragments(self, samples: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
        contexts = super().fragments([context for _, context in samples], count, seed)
        return [(samples[index % len(samples)][0], context) for index, context in enumerate(contexts)]


def measure_span_f1(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Measure the F1 of the tokens of two spans, by their first and last positions."""
    shared = max(0, min(one[1], other[1]) - max(one[0], other[0]) + 1)
    return 2 * shared / (one[1] - one[0] + 1 + other[1] - other[0] + 1)


def read_answer(value: Any, context: str) -> tuple[int, int]:
    """Return where the first of the answers begins and ends in the context, in characters. Raises DataError."""
    try:
        text, start = value["text"], value["answer_start"]
        text, start = (text, start) if isinstance(text, str) else (text[0], int(start[0]))
    except (TypeError, KeyError, IndexError, ValueError):
        raise DataError(
            f"{ANSWERS!r} must be {{'text': [...], 'answer_start': [...]}} with one answer at least, not {value!r}"
        ) from None
    if not text or context[start : start + len(text)] != text:
        raise DataError(f"the context has no {text!r} at character {start}")
    return start, start + len(text)


def find_span(logits: Array, low: int, high: int) -> tuple[int, int, float]:
    """Find the likeliest span from `low` to `high`, of at most LONGEST tokens: its first and last position, and its
    score, the product of both probabilities. logits: [positions, 2].

    The first position, where a model points that finds no answer, takes part in the probabilities.
    """
    allowed = np.zeros(len(logits), bool)
    allowed[[0, *range(low, high + 1)]] = True
    start, end = (softmax_positions(logits[None, :, each], allowed[None])[0, low : high + 1] for each in range(2))
    products = np.tril(np.triu(np.outer(start, end)), LONGEST - 1)
    begin, stop = np.unravel_index(int(products.argmax()), products.shape)
    return low + int(begin), low + int(stop), float(products[begin, stop])


OVERLAP = 128
"""The most tokens that two neighbouring windows of a context share, as in transformers' pipelines."""

Token = tuple[int, int, tuple[int, int]]
"""The id of a token of the context, its type, and the characters of its word."""


@dataclass(frozen=True)
class Passage(Tokens):
    """The tokens of a question and of a window of its context.

    types: of each token. context: the whole one. first: the position of the window's first token. words: the characters
    from which and to which the word of each of the window's tokens goes in the context.
    """

    types: tuple[int, ...]
    context: str
    first: int
    words: tuple[tuple[int, int], ...]

    @property
    def type_ids(self) -> list[int]:
        return list(self.types)

    @property
    def last(self) -> int:
        """The position of the window's last token."""
        return self.first + max(len(self.words), 1) - 1

    def find_characters(self, low: int, high: int) -> tuple[int, int]:
        """Find the characters of the context from the word of one position to that of another."""
        if not self.words:
            return 0, 0
        return self.words[low - self.first][0], self.words[high - self.first][1]


def make_passages(encoding: Encoding, context: str) -> list[Passage]:
    """Make the windows of a context, overlapping by OVERLAP tokens, or by half where a window has fewer than twice as
    many.

    encoding: of the question and the context, which is truncated and is the second of both.
    """
    inside = find_context(encoding)
    if not inside:
        return [Passage(tuple(encoding.ids), tuple(encoding.type_ids), context, 0, ())]
    first, stop = inside[0], inside[-1] + 1
    tokens = read_tokens([encoding, *encoding.overflowing])
    room = len(inside)
    step = room - min(OVERLAP, room // 2)

    def make(window: Sequence[Token]) -> Passage:
        ids, types, words = zip(*window, strict=True)
        return Passage(
            (*encoding.ids[:first], *ids, *encoding.ids[stop:]),
            (*encoding.type_ids[:first], *types, *encoding.type_ids[stop:]),
            context,
            first,
            words,
        )

    return [make(tokens[start : start + room]) for start in range(0, max(len(tokens) - room, 0) + step, step)]


def read_tokens(encodings: Sequence[Encoding]) -> list[Token]:
    """Read the tokens of the context in all parts of a truncated encoding."""
    tokens = []
    words: dict[int, tuple[int, int]] = {}
    for encoding in encodings:
        ids, types, word_ids, offsets = encoding.ids, encoding.type_ids, encoding.word_ids, encoding.offsets
        for index in find_context(encoding):
            word, (begin, end) = word_ids[index], offsets[index]
            if word is not None:
                low, high = words.get(word, (begin, end))
                words[word] = min(low, begin), max(high, end)
            tokens.append((ids[index], types[index], word, (begin, end)))
    return [(one, kind, span if word is None else words[word]) for one, kind, word, span in tokens]


def find_context(encoding: Encoding) -> list[int]:
    """Find the positions of the context's tokens."""
    return [index for index, part in enumerate(encoding.sequence_ids) if part == 1]
