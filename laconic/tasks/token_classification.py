"""Token classification: the entities of a text, as names of people and places, with where they stand."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from laconic.arrays import Array, Arrays, first, softmax
from laconic.errors import DataError, InputError
from laconic.metrics import Scorer, make_f1_scorer
from laconic.tasks.agreement import Agreement, compare_class, share_of
from laconic.tasks.answer_comparison import Labels
from laconic.tasks.classes import LabelledText
from laconic.tasks.null_answers import make_null_logits, shuffle_rows
from laconic.tasks.row_parsing import LABEL
from laconic.tasks.text import SingleText
from laconic.tasks.token_positions import IGNORED, find_filled, fit_positions, overlap_positions
from laconic.tasks.tolerance import Tolerance

OUTSIDE = "O"
"""The class of tokens that belong to no entity."""
ENTITIES_LEAST = 0.8
"""The least recall and precision of the original's entities, tag by tag."""
TOKENS, TAGS = "tokens", "tags"
"""The columns of a row that is given by its words and their tags."""


class Entity(NamedTuple):
    """An entity by its tokens. first, last: their positions, both inclusive."""

    tag: str
    first: int
    last: int


class TokenClassification(LabelledText, SingleText):
    """Fidelity is the overlap of the two distributions over the tokens of a text, less the class of tokens outside of
    entities. The metric is the F1 of entities, which count where tag, beginning and end are right."""

    name = "token-classification"
    tolerance = Tolerance(mean=0.95)
    metric = "entity F1"
    objective = "token-cross-entropy"
    columns: ClassVar[tuple[str, ...]] = (TOKENS, TAGS, LABEL)
    labels_alike = False
    auto_class = "AutoModelForTokenClassification"
    architectures = ("ForTokenClassification",)

    @classmethod
    def new_classes(cls, labels: Sequence[Any], known: Sequence[str]) -> tuple[str, ...]:
        tags = {span["label"] for label in labels for span in read_spans(label)}
        if known and tags <= {split_tag(label)[1] for label in known}:
            return ()
        if not tags:
            raise DataError("no sample has an entity, so there is nothing to find")
        return (OUTSIDE, *(f"{prefix}-{tag}" for tag in sorted(tags) for prefix in "BI"))

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        """Read a text with its entities; or words with a tag each, which are joined by spaces."""
        if TOKENS not in values or self.field in values:
            return super().read_row(values, folder)
        words, tags = values[TOKENS], values.get(TAGS)
        if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
            raise InputError(f"expected a list of words under {TOKENS!r}")
        return (" ".join(words),), None if tags is None else join_tags(words, self.name_tags(tags))

    def name_tags(self, tags: Any) -> Any:
        """Name tags, where they are given by the numbers of the model's classes. Raises InputError."""
        numbers = isinstance(tags, (list, tuple)) and all(type(tag) is int for tag in tags)
        if not tags or not numbers:
            return tags
        beyond = [tag for tag in tags if not 0 <= tag < len(self.labels)]
        if beyond:
            raise InputError(
                f"tag {beyond[0]} under {TAGS!r} is the number of none of the model's {len(self.labels)} classes. Give "
                f"names, as B-PER or O"
            )
        return [self.labels[tag] for tag in tags]

    def parse_label(self, value: Any, sample: Any) -> Any:
        """Return the number of a class for each token, IGNORED for special tokens. value: entities, as `read_spans`
        takes."""
        spans = read_spans(value)
        encoding = self.tokenizer.encode(sample)
        classes = {label: index for index, label in enumerate(self.labels)}
        tagged = [IGNORED if special else classes.get(OUTSIDE, 0) for special in encoding.special_tokens_mask]
        for span in spans:
            if span["end"] > len(sample):
                raise DataError(f"entity {span} ends beyond the text, which has {len(sample)} characters")
            inside = [
                index
                for index, (start, end) in enumerate(encoding.offsets)
                if end > span["start"] and start < span["end"] and tagged[index] != IGNORED
            ]
            for index in inside:
                tagged[index] = find_tag(span["label"], classes, begins=index == inside[0])
        return tagged

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        return [
            {"entities": list(self.describe_entities(row, sample))}
            for row, sample in zip(softmax(first(outputs)), samples, strict=True)
        ]

    def describe_entities(self, probabilities: Array, text: str) -> Iterator[dict[str, Any]]:
        """Return the entities of a text, as the token classification pipeline of transformers aggregates them
        (`simple`).

        probabilities: [positions, classes].
        """
        encoding = self.tokenizer.encode(text)
        classes = probabilities.argmax(axis=-1)[: len(encoding.ids)]
        kept = [index for index, special in enumerate(encoding.special_tokens_mask) if not special]
        unknown = getattr(self.tokenizer.model, "unk_token", None)
        for tag, start, stop in group_tokens(kept, classes, self.labels):
            inside = [index for index in kept if start <= index <= stop]
            words = [
                text[slice(*encoding.offsets[index])] if encoding.tokens[index] == unknown else encoding.tokens[index]
                for index in inside
            ]
            decoder = self.tokenizer.decoder
            yield {
                "entity_group": tag,
                "score": float(np.mean([probabilities[index, classes[index]] for index in inside])),
                "word": decoder.decode(words) if decoder is not None else " ".join(words),
                "start": encoding.offsets[start][0],
                "end": encoding.offsets[stop][1],
            }

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        outside = self.labels.index(OUTSIDE) if OUTSIDE in self.labels else None
        return overlap_positions(first(reference), first(candidate), outside)

    def agreements(self, reference: Arrays, candidate: Arrays, labels: Labels = None) -> Iterator[Agreement]:
        """Compare the tags of tokens, and of the entities of each tag those that have tag and ends alike."""
        expected = first(reference)
        actual, filled = fit_positions(first(candidate), expected.shape[1]), find_filled(expected)
        same = (expected.argmax(-1) == actual.argmax(-1))[filled]
        yield share_of(int(same.sum()), same.size, "agreement", 0.0)
        sides = [self.list_entities(logits.argmax(-1), filled) for logits in (expected, actual)]
        for tag in sorted({entity.tag for _, entity in sides[0]}):
            one, two = ({pair for pair in side if pair[1].tag == tag} for side in sides)
            union = one | two
            wanted_mask, found_mask = (np.array([pair in side for pair in union]) for side in (one, two))
            yield from compare_class(wanted_mask, found_mask, f"entities {tag!r}", ENTITIES_LEAST)

    def list_entities(self, classes: Array, filled: Array) -> set[tuple[int, "Entity"]]:
        """List the entities of all samples, each with the number of its sample. classes, filled: [samples,
        positions]."""
        return {
            (row, entity)
            for row, (numbers, there) in enumerate(zip(classes, filled, strict=True))
            for entity in group_tokens(np.flatnonzero(there).tolist(), numbers, self.labels)
        }

    def null_answers(self, reference: Arrays) -> dict[str, Arrays]:
        (name, logits), *_ = reference.items()
        shuffled = shuffle_rows({name: logits})
        return {"shuffled": shuffled} | {each: {name: row} for each, row in make_null_logits(logits).items()}

    def scorer(self, outputs: Arrays, labels: Sequence[Any]) -> Scorer:
        counts = []
        for classes, label in zip(first(outputs).argmax(axis=-1), labels, strict=True):
            kept = [index for index, each in enumerate(label) if each != IGNORED]
            expected = set(group_tokens(kept, label, self.labels))
            actual = set(group_tokens(kept, classes, self.labels))
            counts.append((len(expected & actual), len(actual), len(expected)))
        return make_f1_scorer(*np.array(counts).T)


def split_tag(label: str) -> tuple[str, str]:
    """Return the prefix and the tag of a class, as `B` and `PER` of `B-PER`; a class without a prefix continues an
    entity."""
    return (label[0], label[2:]) if label[:2] in ("B-", "I-") else ("I", label)


def find_tag(tag: str, classes: Mapping[str, int], *, begins: bool) -> int:
    """Find the class of a token of an entity. Raises DataError for a tag that the model does not know."""
    for name in (f"B-{tag}" if begins else f"I-{tag}", f"I-{tag}", f"B-{tag}", tag):
        if name in classes:
            return classes[name]
    known = sorted({split_tag(label)[1] for label in classes} - {OUTSIDE})
    raise DataError(f"label {tag!r} is none of the model's entities: {', '.join(known[:20])}")


def group_tokens(kept: Sequence[int], classes: Sequence[int] | Array, labels: Sequence[str]) -> Iterator[Entity]:
    """Return the entities among some tokens: adjacent ones of the same tag, up to one that begins another.

    kept: the positions of the text's own tokens. classes: of all positions.
    """
    names = [
        split_tag(labels[classes[index]] if classes[index] < len(labels) else str(classes[index])) for index in kept
    ]
    groups: list[list[int]] = []
    for position, (prefix, tag) in enumerate(names):
        if groups and prefix != "B" and names[position - 1][1] == tag:
            groups[-1].append(position)
        else:
            groups.append([position])
    for group in groups:
        tag = names[group[0]][1]
        if tag != OUTSIDE:
            yield Entity(tag, kept[group[0]], kept[group[-1]])


def join_tags(words: Sequence[str], tags: Any) -> list[dict[str, Any]]:
    """Return the entities of words that are joined by spaces, from a tag for each, as B-PER, I-PER or O. Raises
    InputError."""
    if not isinstance(tags, (list, tuple)) or len(tags) != len(words):
        raise InputError(f"expected a tag for each of the {len(words)} words under {TAGS!r}")
    if not all(isinstance(tag, str) for tag in tags):
        raise InputError(f"expected names under {TAGS!r}, as B-PER or O, not {tags[0]!r}")
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    positions = list(range(len(words)))
    return [
        {
            "label": entity.tag,
            "start": int(ends[entity.first] - len(words[entity.first])),
            "end": int(ends[entity.last]),
        }
        for entity in group_tokens(positions, positions, list(tags))
    ]


def read_spans(value: Any) -> list[dict[str, Any]]:
    """Read the entities of a label: objects with `start`, `end` (in characters, the end exclusive) and `label`, in
    order.

    Raises DataError for anything else, and for entities that overlap.
    """
    if not isinstance(value, (list, tuple)):
        raise DataError(f"a label must be a list of entities with 'start', 'end' and 'label', not {value!r}")
    for span in value:
        whole = isinstance(span, Mapping) and all(
            isinstance(span.get(name), int) and not isinstance(span.get(name), bool) for name in ("start", "end")
        )
        if not whole or not isinstance(span.get("label"), str) or not 0 <= span["start"] < span["end"]:
            raise DataError(f"{span!r} is no entity; expected {{'start': 0, 'end': 5, 'label': 'PER'}}")
    spans = sorted((dict(span) for span in value), key=lambda span: int(span["start"]))
    for one, two in pairwise(spans):
        if two["start"] < one["end"]:
            raise DataError(f"the entities {one} and {two} overlap")
    return spans
