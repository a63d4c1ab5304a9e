"""Texts, chats and completions as the tokens that a causal language model reads and learns."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack

import numpy as np
from tokenizers import Encoding, Tokenizer

from laconic.arrays import Array, Arrays
from laconic.errors import InputError
from laconic.tasks.assets import PREPROCESS, to_json
from laconic.tasks.chat_template import ChatTemplate, MarkedText, mark_completion
from laconic.tasks.preference_text import CHOSEN, PROMPT, REJECTED, read_preference
from laconic.tasks.preprocessing import TextOptions
from laconic.tasks.text import SingleText
from laconic.tensor import TensorSpec

CHAT = "chat_template.json"
MESSAGES, COMPLETION = "messages", "completion"
"""The columns of a chat, and of a prompt with its completion, in the place of a text."""


class CausalText(SingleText):
    """Mixin of the task of causal language models. In files, a sample may be a text, a chat (`messages`), a `prompt`
    with its `completion`: a `MarkedText`; or a `prompt` with a `chosen` and a `rejected` answer: a `PreferenceText`."""

    columns: ClassVar[tuple[str, ...]] = (MESSAGES, PROMPT, COMPLETION, CHOSEN, REJECTED)
    objective = "next-token"
    learns_preferences = True
    self_supervised = True
    auto_class = "AutoModelForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("ForCausalLM", "LMHeadModel")

    def __init__(
        self,
        tokenizer: Tokenizer,
        inputs: tuple[TensorSpec, ...],
        *,
        start_id: int,
        end_id: int | None = None,
        chat: ChatTemplate | None = None,
        **options: Unpack[TextOptions],
    ) -> None:
        """start_id: the token that stands for an empty text, since the model needs one to predict the next. end_id: the
        token that ends a text; None without one. chat: the template of chats; None without one."""
        super().__init__(tokenizer, inputs, **options)
        self.start_id, self.end_id, self.chat = start_id, end_id, chat

    def assets(self) -> dict[str, bytes]:
        preprocess = {"max_tokens": self.max_tokens, "pad_id": self.pad_id, "start_id": self.start_id}
        if self.end_id is not None:
            preprocess["end_id"] = self.end_id
        chat = {CHAT: to_json(self.chat.describe())} if self.chat else {}
        return super().assets() | {PREPROCESS: to_json(preprocess)} | chat

    def read_row(self, values: Mapping[str, Any], folder: Path) -> tuple[tuple[Any, ...], Any]:
        """Read a sample; without a label, since an answer is part of it."""
        if self.field not in values and MESSAGES in values:
            return (self.mark_chat(values[MESSAGES]),), None
        if self.field not in values and COMPLETION in values:
            return (mark_completion(values.get(PROMPT), values[COMPLETION]),), None
        if self.field not in values and (CHOSEN in values or REJECTED in values):
            return (read_preference(values, self.mark_chat),), None
        samples, _ = super().read_row(values, folder)
        return samples, None

    def with_chat_template(self, text: str) -> Self:
        """Return the same task with another chat template."""
        task = copy.copy(self)
        task.chat = ChatTemplate(text, self.chat.tokens if self.chat else {})
        return task

    def mark_chat(self, messages: Any, start: int = 0) -> MarkedText:
        """Return the text of a chat with its answers behind the first `start` messages. Raises InputError."""
        if self.chat is None:
            raise InputError(
                "the model has no chat template, so a chat cannot be made a text. Give one as data.chat_template, or "
                "rows with 'prompt' and 'completion'"
            )
        return self.chat.mark(messages, start)

    def encode_texts(self, samples: Sequence[Any]) -> list[Encoding]:
        whole = {index for index, each in enumerate(samples) if getattr(each, "has_special_tokens", False)}
        if not whole:
            return super().encode_texts(samples)
        plain = iter(super().encode_texts([each for index, each in enumerate(samples) if index not in whole]))
        marked = iter(self.tokenizer.encode_batch([str(samples[i]) for i in sorted(whole)], add_special_tokens=False))
        return [next(marked if index in whole else plain) for index in range(len(samples))]

    def tokenize(self, samples: Sequence[str]) -> list[tuple[Array, Array]]:
        """Return each text's tokens, ids [tokens] int64 and whether each is learned [tokens] bool; nothing is
        truncated.

        A token is learned if any of its characters belong to an answer; all are where no answers are marked. A text
        that does not end with the end token gets it, unless it is a chat, whose template ends it.
        """
        limit = self.current_max_length
        self.tokenizer.no_truncation()
        try:
            encodings = self.encode_texts(samples)
        finally:
            self.tokenizer.enable_truncation(limit)
        return [self._mark(sample, encoding) for sample, encoding in zip(samples, encodings, strict=True)]

    def _mark(self, sample: str, encoding: Encoding) -> tuple[Array, Array]:
        ids = np.array(encoding.ids, np.int64)
        if isinstance(sample, MarkedText):
            starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            within = [(starts < stop) & (stops > start) for start, stop in sample.answers]
            learned = np.any([np.zeros(len(ids), bool), *within], axis=0)
            learned[-1:] |= ids[-1:] == self.end_id  # where the tokenizer itself adds the end token
        else:
            learned = np.ones(len(ids), bool)
        if self.end_id is None or getattr(sample, "has_special_tokens", False) or ids[-1:].tolist() == [self.end_id]:
            return ids, learned
        return np.append(ids, self.end_id), np.append(learned, True)

    @property
    def current_max_length(self) -> int:
        """The most tokens of a text at present, as `truncated` sets it."""
        truncation: Any = self.tokenizer.truncation
        return int(truncation["max_length"])

    def encode(self, samples: Any) -> Arrays:
        batch = super().encode(samples)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        empty = ~mask.any(axis=1)
        if ids.shape[1] == 0:
            ids, mask = (np.zeros((len(ids), 1), array.dtype) for array in (ids, mask))
        ids[empty, 0], mask[empty, 0] = self.start_id, 1
        return {"input_ids": ids, "attention_mask": mask}
