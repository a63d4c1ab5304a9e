"""Masked language modelling: a text with one token masked to that token."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
from tokenizers import Encoding, Tokenizer

from laconic.arrays import Arrays
from laconic.errors import DataError, InputError, SourceError
from laconic.hashing import hash_of
from laconic.tasks.assets import PREPROCESS, read_asset, to_json
from laconic.tasks.classification import Classification
from laconic.tasks.preprocessing import Preprocessing, TextOptions
from laconic.tasks.text import SingleText
from laconic.tensor import TensorSpec


class FillMask(Classification, SingleText):
    """A classifier whose classes are the tokens: the answer is the distribution of the masked one.

    A text of a file needs no mask: one of its words is masked, chosen by a hash of the text, and is its label.
    A label is a token, as text or, a whole number, by its id.
    """

    name = "fill-mask"
    field_description = "A text with the mask token in it once, or a list of texts."
    metric = "masked-token accuracy"
    answer = "token"
    objective = "cross-entropy"
    auto_class = "AutoModelForMaskedLM"
    architectures = ("ForMaskedLM",)

    def __init__(
        self, tokenizer: Tokenizer, inputs: tuple[TensorSpec, ...], *, mask_id: int, **options: Unpack[TextOptions]
    ) -> None:
        """mask_id: the token that stands for the one to predict."""
        super().__init__(tokenizer, inputs, **options)
        self.mask_id = mask_id
        self.mask = str(tokenizer.id_to_token(mask_id))

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        if (mask_id := preprocessing.mask_id) is None:
            raise SourceError("the tokenizer has no mask token, which a masked language model needs")
        inputs = cls.signature(preprocessing)
        return cls(preprocessing.tokenizer, inputs, mask_id=mask_id, **preprocessing.text_options)

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        preprocess = read_asset(folder, PREPROCESS)
        return cls(cls.read_tokenizer(folder), inputs, **preprocess)

    def assets(self) -> dict[str, bytes]:
        preprocess = {"max_tokens": self.max_tokens, "pad_id": self.pad_id, "mask_id": self.mask_id}
        return super().assets() | {PREPROCESS: to_json(preprocess)}

    def label(self, index: int) -> str:
        """Return a token as text; a part of a character becomes the replacement character."""
        return str(self.tokenizer.decode([int(index)], skip_special_tokens=False))

    def index(self, label: Any) -> int:
        """Return the id of a token given by its text or its id. Raises DataError for anything but one token."""
        size = self.tokenizer.get_vocab_size()
        if isinstance(label, (int, np.integer)) and not isinstance(label, bool):
            if 0 <= label < size:
                return int(label)
            raise DataError(f"label {label!r} is no token's id; expected 0 to {size - 1}")
        if not isinstance(label, str):
            raise DataError(f"a label must be a token, as text or as its id, not {label!r}")
        known = self.tokenizer.token_to_id(label)
        ids = [known] if known is not None else self.tokenizer.encode(label, add_special_tokens=False).ids
        if len(ids) != 1:
            raise DataError(
                f"label {label!r} is {len(ids)} tokens of this model, expected one. Give a single token, with "
                f"the space before it where it has one"
            )
        return int(ids[0])

    def parse(self, value: Any) -> Any:
        masks = self.tokenizer.encode(super().parse(value)).ids.count(self.mask_id)
        if masks != 1:
            raise InputError(
                f"a text must have {self.mask} once in its first {self.max_tokens} tokens, and this one has it "
                f"{masks or 'no'} times"
            )
        return value

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        (text,), label = super().read_row(values, folder)
        if not isinstance(text, str) or self.mask in text:
            return (text,), label
        text, token = self.mask_word(text)
        return (text,), token

    def mask_word(self, text: str) -> tuple[str, int | None]:
        """Return a text with one word masked, and the id of that word; a single token where there is one.

        Raises InputError for a text without a word.
        """
        encoding = self.tokenizer.encode(text)
        tokens = list_words(encoding)
        if not tokens:
            raise InputError("there is no word to mask in the text")
        chosen = tokens[int(hash_of(text), 16) % len(tokens)]
        start, end = encoding.offsets[chosen]
        start += len(text[start:end]) - len(text[start:end].lstrip())
        return text[:start] + self.mask + text[end:], int(encoding.ids[chosen])

    def example_request(self) -> dict[str, Any]:
        return {self.field: f"The cat sat on the {self.mask}."}

    def examples(self, count: int, seed: int = 0) -> list[Any]:
        return [mask_first(text, self.mask) for text in super().examples(count, seed)]

    def fragments(self, samples: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
        pieces = super().fragments([text.replace(self.mask, "") for text in samples], count, seed)
        return [f"{self.mask} {piece}".rstrip() for piece in pieces]

    def typical(self, batch: int, length: int, seed: int = 0) -> Arrays:
        inputs = super().typical(batch, length, seed)
        ids = inputs["input_ids"]
        ids[ids == self.mask_id] = self.pad_id
        ids[:, ids.shape[1] // 2] = self.mask_id
        return inputs


def list_words(encoding: Encoding) -> list[int]:
    """List the positions of words that are one token; of all tokens of words where there are none."""
    words = {
        index: word
        for index, word in enumerate(encoding.word_ids)
        if word is not None and not encoding.special_tokens_mask[index]
    }
    counts = Counter(words.values())
    return [index for index, word in words.items() if counts[word] == 1] or list(words)


def mask_first(text: str, mask: str) -> str:
    """Return the text with its first word replaced: longer texts are truncated at their end."""
    return " ".join([mask, *text.split()[1:]])
