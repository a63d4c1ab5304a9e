"""Text to tokens, for every task that reads text."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from tokenizers import Encoding, Tokenizer

from laconic.arrays import Array, Arrays, first
from laconic.errors import CorruptArtifact, InputError, UsageError
from laconic.tasks.assets import PREPROCESS, TOKENIZER, VOCABULARY, read_asset, to_json
from laconic.tasks.preprocessing import Preprocessing
from laconic.tasks.row_parsing import LABEL, PAIR, is_pair, read_pair
from laconic.tasks.task import Task
from laconic.tensor import BATCH, TensorSpec

MADE_UP_TEXT = (
    "the model answers question about weights layers memory and time while every request waits for its turn small "
    "numbers make it fast"
)
WORDS = tuple(MADE_UP_TEXT.split())
"""The words of made-up texts."""
FRAGMENT_WORDS = (1, 1, 2, 3, 5)
"""Lengths of fragments in words; drawn uniformly, so that 1 has twice the probability of 2."""
DRAWS = 10
"""Draws for each fragment, at most: of texts without tokens there are none."""


CHUNK = 256
"""Texts that are tokenized at once."""
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""By the bytes of a number."""


def count_ids(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id of a token."""
    size = int(tokenizer.get_vocab_size())
    if size and tokenizer.id_to_token(size - 1) is not None and tokenizer.id_to_token(size) is None:
        return size
    # Ids with gaps. The whole vocabulary as a dict takes 50 MB for 250,000 tokens.
    return max(tokenizer.get_vocab().values(), default=-1) + 1


TEXT_SCHEMA = {"type": "string"}
PAIR_SCHEMA = {"type": "array", "items": TEXT_SCHEMA, "minItems": 2, "maxItems": 2}


@dataclass(frozen=True)
class Tokens:
    """A text that is tokenized already. ids: as the model reads them, special tokens included."""

    ids: tuple[int, ...]

    @property
    def attention_mask(self) -> list[int]:
        """All ones: without padding."""
        return [1] * len(self.ids)

    @property
    def type_ids(self) -> list[int]:
        """All zeros: one text."""
        return [0] * len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


class TextTask(Task):
    """A task whose samples are texts, or pairs of texts where the tokenizer joins them."""

    field = "text"
    field_description = "A text, or a list of texts (a pair of texts is a list of two within that list)."
    columns: ClassVar[tuple[str, ...]] = (*PAIR, LABEL)
    accepts = frozenset({"texts"})

    def __init__(
        self,
        tokenizer: Tokenizer,
        inputs: tuple[TensorSpec, ...],
        *,
        max_tokens: int,
        pad_id: int,
        labels: tuple[str, ...] = (),
    ) -> None:
        """max_tokens: the length to which texts are truncated, special tokens included. pad_id: the padding token."""
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.inputs = inputs
        self.max_tokens = max_tokens
        self.set_truncation(max_tokens)
        self.pad_id = pad_id
        self.labels = labels
        self.multiple = 1
        """Texts of a batch are padded to a multiple of so many tokens."""
        self.vocabulary = count_ids(tokenizer)
        self.adds_special_tokens = bool(tokenizer.encode("").ids)
        """Whether an empty text has tokens; for the tokenizers of GPT-2 and Qwen2 it has none."""
        self.padding = {spec.name: pad_id if spec.name == "input_ids" else 0 for spec in inputs}

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        preprocess = read_asset(folder, PREPROCESS)
        tokenizer = cls.read_tokenizer(folder)
        return cls(tokenizer, inputs, max_tokens=preprocess["max_tokens"], pad_id=preprocess["pad_id"])

    @staticmethod
    def read_tokenizer(folder: Path) -> Tokenizer:
        """Read the tokenizer of an artifact. Raises CorruptArtifact."""
        try:
            return Tokenizer.from_file(str(folder / TOKENIZER))
        except Exception as error:  # tokenizers raises bare Exception
            raise CorruptArtifact(f"{folder / TOKENIZER} does not read: {error}") from error

    def assets(self) -> dict[str, bytes]:
        limited = self.vocabulary < count_ids(self.tokenizer)
        return {
            PREPROCESS: to_json({"max_tokens": self.max_tokens, "pad_id": self.pad_id}),
            TOKENIZER: self.tokenizer.to_str().encode(),
        } | ({VOCABULARY: to_json({"ids": self.vocabulary})} if limited else {})

    @staticmethod
    def signature(preprocessing: Preprocessing) -> tuple[TensorSpec, ...]:
        """Return the inputs of a model that reads tokens, int64 [batch, seq]."""
        if preprocessing.fixed_length:
            return (TensorSpec(name="input_ids", dtype="int64", shape=(BATCH, preprocessing.max_tokens)),)
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if preprocessing.token_types else [])]
        bounds = {"seq": (1, preprocessing.max_tokens)}
        return tuple(TensorSpec(name=name, dtype="int64", shape=(BATCH, "seq"), bounds=bounds) for name in names)

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        return cls(preprocessing.tokenizer, cls.signature(preprocessing), **preprocessing.text_options)

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        """Read one sample: the text, or the two columns of a pair as one."""
        if is_pair(values):
            return (read_pair(values),), values.get(LABEL)
        return super().read_row(values, folder)

    def read_field(self, value: Any, folder: Path) -> Any:
        if not isinstance(value, (str, list, tuple)):
            raise InputError(f"expected a string under {self.field!r}, got {type(value).__name__}")
        return value

    def sample_schema(self) -> dict[str, Any]:
        """Describe a text, or a pair of texts."""
        return {"anyOf": [TEXT_SCHEMA, PAIR_SCHEMA]}

    def example_request(self) -> dict[str, Any]:
        return {self.field: "Hello there."}

    @property
    def max_length(self) -> int | None:
        return self.max_tokens

    @contextmanager
    def truncated(self, length: int | None) -> Iterator[None]:
        """Truncate texts to `length` tokens in the body; None changes nothing.

        Raises UsageError for more tokens than the model takes, or too few to hold a text.
        """
        if length is None:
            yield
            return
        least = self.tokenizer.num_special_tokens_to_add(is_pair=False) + 1
        if not least <= length <= self.max_tokens:
            raise UsageError(
                f"the model takes {least} to {self.max_tokens} tokens, and max_length is {length}. Give one between"
            )
        self.set_truncation(length)
        try:
            yield
        finally:
            self.set_truncation(self.max_tokens)

    @contextmanager
    def padded(self, multiple: int) -> Iterator[None]:
        self.multiple = multiple
        try:
            yield
        finally:
            self.multiple = 1

    def round_up(self, length: int) -> int:
        """Return the tokens to which texts of at most `length` are padded; no more than the model takes."""
        return max(length, min(-(-length // self.multiple) * self.multiple, self.max_tokens))

    def set_truncation(self, length: int) -> None:
        """Truncate texts to `length` tokens from now on; of a pair the longer text."""
        self.tokenizer.enable_truncation(length)

    def parse(self, value: Any) -> Any:
        if isinstance(value, str):
            if not value.strip() and not self.adds_special_tokens:
                raise InputError("the text is empty, and the model's tokenizer adds no token of its own. Give a text")
            return value
        if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(part, str) for part in value):
            return tuple(value)
        if isinstance(value, Tokens):
            return value
        raise InputError(f"a sample must be a text, or a pair of texts, not {type(value).__name__}")

    def from_tokens(self, ids: Sequence[int]) -> Tokens:
        if not 1 <= len(ids) <= self.max_tokens:
            raise InputError(
                f"there are {len(ids)} tokens, and the model takes 1 to {self.max_tokens}, special tokens included"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocabulary:
            raise InputError(f"the tokens run from {low} to {high}, and the model takes 0 to {self.vocabulary - 1}")
        return Tokens(tuple(ids))

    def encode(self, samples: Sequence[Any]) -> Arrays:
        texts = [sample for sample in samples if not isinstance(sample, Tokens)]
        encoded = iter(self.encode_texts(texts))
        encodings = [sample if isinstance(sample, Tokens) else next(encoded) for sample in samples]
        self.check_id(max((max(encoding.ids, default=0) for encoding in encodings), default=0))
        fixed = self.inputs[0].shape[1]
        longest = max(len(encoding.ids) for encoding in encodings)
        width = fixed if isinstance(fixed, int) else self.round_up(longest)
        parts = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}

        def tensor(spec: TensorSpec) -> Array:
            array = np.full((len(encodings), width), self.padding[spec.name], spec.dtype)
            for row, encoding in enumerate(encodings):
                values = getattr(encoding, parts[spec.name])
                array[row, : len(values)] = values
            return array

        return {spec.name: tensor(spec) for spec in self.inputs if spec.name in parts}

    def count_tokens(self, inputs: Arrays) -> int:
        mask = inputs.get("attention_mask")
        return int(mask.sum()) if mask is not None else first(inputs).size

    def encode_texts(self, samples: Sequence[Any]) -> list[Encoding]:
        """Return the tokens of each sample, special tokens included."""
        return self.tokenizer.encode_batch(list(samples))

    def limit_ids(self, count: int) -> None:
        self.vocabulary = min(self.vocabulary, count)

    def check_samples(self, samples: Sequence[Any]) -> None:
        if self.vocabulary < count_ids(self.tokenizer):
            for start in range(0, len(samples), CHUNK):
                self.encode(list(samples[start : start + CHUNK]))

    def check_id(self, highest: int) -> None:
        """Raise InputError for a token that the model has no embedding for."""
        if highest >= self.vocabulary:
            raise InputError(
                f"a text has the token {self.tokenizer.id_to_token(highest)!r} with the id {highest}, and the model "
                f"has embeddings for the ids 0 to {self.vocabulary - 1}: the tokenizer is of another model. Give the "
                f"one that the model was trained with, or leave such texts out"
            )

    def check_values(self, inputs: Arrays) -> None:
        for name, array in inputs.items():
            size = self.vocabulary if name == "input_ids" else 2
            # As unsigned numbers, negative ones are the largest: one pass over the array instead of two.
            if array.size and array.view(UNSIGNED[array.dtype.itemsize]).max() >= size:
                raise InputError(
                    f"input {name!r} runs from {array.min()} to {array.max()}, and the model takes 0 to {size - 1}"
                )

    def count_cut(self, samples: Sequence[Any]) -> int:
        texts = [sample for sample in samples if isinstance(sample, str)]
        return sum(bool(encoding.overflowing) for encoding in self.tokenizer.encode_batch(texts))

    def length(self, sample: Any) -> int:
        return len(sample) if isinstance(sample, (str, Tokens)) else sum(map(len, sample))

    def examples(self, count: int, seed: int = 0) -> list[Any]:
        rng = np.random.default_rng(seed)
        return [" ".join(rng.choice(WORDS, rng.integers(3, 60))) for _ in range(count)]

    def fragments(self, samples: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
        rng = np.random.default_rng(seed)
        pieces = [""] if self.adds_special_tokens else []  # the special tokens alone
        for _ in range(DRAWS * count):
            if len(pieces) >= count:
                break
            sample = samples[int(rng.integers(len(samples)))]
            words = (sample if isinstance(sample, str) else sample[0]).split()
            length = int(rng.choice(FRAGMENT_WORDS))
            start = int(rng.integers(max(1, len(words) - length)))
            piece = " ".join(words[start : start + length])
            if self.adds_special_tokens or self.tokenizer.encode(piece).ids:
                pieces.append(piece)
        return pieces

    @property
    def closing_id(self) -> int | None:
        """The special token that the tokenizer ends a text with; None where it adds none."""
        encoding = self.tokenizer.encode(WORDS[0])
        special = bool(encoding.ids) and encoding.special_tokens_mask[-1]
        return int(encoding.ids[-1]) if special else None

    def sample_inputs(self, sizes: Mapping[str, int], seed: int = 0) -> Arrays:
        return self.typical(sizes.get(BATCH, 1), sizes.get("seq", 1), seed)

    def typical(self, batch: int, length: int, seed: int = 0) -> Arrays:
        rng = np.random.default_rng(seed)
        fixed = self.inputs[0].shape[1]
        length = fixed if isinstance(fixed, int) else min(length, self.max_tokens)
        ids = rng.integers(0, min(self.tokenizer.get_vocab_size(), self.vocabulary), (batch, length))
        if (end := self.closing_id) is not None:  # BART's classifier reads the one token that ends a text
            ids[ids == end] = end - 1 if end else end + 1
            ids[:, -1] = end
        ones = np.ones((batch, length))
        values = {"input_ids": ids, "attention_mask": ones, "token_type_ids": 0 * ones}
        return {spec.name: values[spec.name].astype(spec.dtype) for spec in self.inputs if spec.name in values}


class SingleText(TextTask):
    """A text task whose samples are no pairs."""

    def sample_schema(self) -> dict[str, Any]:
        return TEXT_SCHEMA

    def parse(self, value: Any) -> Any:
        if isinstance(value, str):
            return value
        raise InputError(f"a sample must be a text, not {type(value).__name__}")
