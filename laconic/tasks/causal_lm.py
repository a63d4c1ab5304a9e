"""Causal language modelling: a text to the token that follows it."""

import math
from pathlib import Path
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer

from laconic.arrays import Arrays
from laconic.errors import DataError, InputError
from laconic.tasks.classification import Classification
from laconic.tasks.preprocessing import Preprocessing
from laconic.tasks.task import PREPROCESS, HealingLoss, read_asset, to_json
from laconic.tasks.text import TextTask
from laconic.tensor import TensorSpec


class CausalLm(Classification, TextTask):
    """A classifier whose classes are the tokens: the answer to a text is the distribution of the next token.

    A label is the token that follows, as text or, a whole number, by its id.
    """

    name = "causal-lm"
    metric = "next-token accuracy"
    answer = "token"
    objective = "next-token"
    self_supervised = True
    auto_class = "AutoModelForCausalLM"
    architectures = ("ForCausalLM", "LMHeadModel")

    def __init__(
        self, tokenizer: Tokenizer, inputs: tuple[TensorSpec, ...], *, max_tokens: int, pad_id: int, start_id: int
    ) -> None:
        """start_id: the token that stands for an empty text, since the model needs one to predict the next."""
        super().__init__(tokenizer, inputs, max_tokens=max_tokens, pad_id=pad_id)
        self.start_id = start_id

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing) -> Self:
        given = preprocessing
        return cls(
            given.tokenizer,
            cls.signature(given),
            max_tokens=given.max_tokens,
            pad_id=given.pad_id,
            start_id=given.start_id,
        )

    @classmethod
    def from_assets(cls, folder: Path, inputs: tuple[TensorSpec, ...]) -> Self:
        preprocess = read_asset(folder, PREPROCESS)
        return cls(cls.read_tokenizer(folder), inputs, **preprocess)

    def assets(self) -> dict[str, bytes]:
        preprocess = {"max_tokens": self.max_tokens, "pad_id": self.pad_id, "start_id": self.start_id}
        return super().assets() | {PREPROCESS: to_json(preprocess)}

    def parse(self, value: Any) -> Any:
        if isinstance(value, str):
            return value
        raise InputError(f"a sample must be a text, not {type(value).__name__}")

    def encode(self, samples: Any) -> Arrays:
        batch = super().encode(samples)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        empty = ~mask.any(axis=1)
        if ids.shape[1] == 0:
            ids, mask = (np.zeros((len(ids), 1), array.dtype) for array in (ids, mask))
        ids[empty, 0], mask[empty, 0] = self.start_id, 1
        return {"input_ids": ids, "attention_mask": mask}

    def figures_from_loss(self, loss: float) -> dict[str, float]:
        """The perplexity; a loss of more than 700 is taken as 700, since its exponential is no float."""
        return {"perplexity": math.exp(min(loss, 700.0))}

    def healing_losses(self, *, layers: bool) -> dict[HealingLoss, float]:
        """The probabilities; after them the last hidden states, where layers are shared."""
        shared: dict[HealingLoss, float] = {"last-hidden-state": 1.0} if layers else {}
        return {"probabilities": 1.0, **shared}

    def label(self, index: int) -> str:
        """A token as text; a part of a character becomes the replacement character."""
        return str(self.tokenizer.decode([int(index)], skip_special_tokens=False))

    def index(self, label: Any) -> int:
        """The id of a token given by its text or its id. Raises DataError for anything but one token."""
        size = self.tokenizer.get_vocab_size()
        if isinstance(label, (int, np.integer)) and not isinstance(label, bool):
            if 0 <= label < size:
                return int(label)
            raise DataError(f"label {label!r} is no token's id; expected 0 to {size - 1}")
        if not isinstance(label, str):
            raise DataError(f"a label must be the next token, as text or as its id, not {label!r}")
        known = self.tokenizer.token_to_id(label)
        ids = [known] if known is not None else self.tokenizer.encode(label, add_special_tokens=False).ids
        if len(ids) != 1:
            raise DataError(
                f"label {label!r} is {len(ids)} tokens of this model, expected one. Give the next token alone, with "
                f"the space before it where it has one"
            )
        return int(ids[0])
