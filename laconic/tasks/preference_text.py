"""A prompt with two answers, of which one is preferred."""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Protocol, Self

from laconic.errors import InputError
from laconic.tasks.chat_template import MarkedText, mark_completion

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
"""The columns of a preference, as TRL names them."""


class PreferenceText(MarkedText):
    """A prompt with the preferred answer, which is what is read of it where no preference is learned.

    rejected: the same prompt with the other answer.
    """

    __slots__ = ("rejected",)

    rejected: MarkedText

    def __new__(cls, chosen: MarkedText, rejected: MarkedText) -> Self:
        made = MarkedText.__new__(cls, str(chosen), chosen.answers, chosen.has_special_tokens)
        made.rejected = rejected
        return made

    @property
    def chosen(self) -> MarkedText:
        """The prompt with the preferred answer alone."""
        return MarkedText(str(self), self.answers, self.has_special_tokens)

    def __getnewargs__(self) -> tuple[MarkedText, MarkedText]:  # type: ignore[override]
        return self.chosen, self.rejected


class MarkChat(Protocol):
    """Makes the text of a chat, whose answers are behind its first `start` messages. Raises InputError."""

    def __call__(self, messages: Any, start: int = 0) -> MarkedText: ...


def read_preference(values: Mapping[str, Any], mark_chat: MarkChat) -> PreferenceText:
    """Read a row: texts under `prompt`, `chosen` and `rejected`; or lists of messages, where the prompt may also be the
    messages with which both answers begin. Raises InputError."""
    prompt: Any = values.get(PROMPT)
    chosen: Any = values.get(CHOSEN)
    rejected: Any = values.get(REJECTED)
    for name, answer in ((CHOSEN, chosen), (REJECTED, rejected)):
        if answer is None:
            raise InputError(f"a preference is a 'chosen' and a 'rejected' answer, and there is no {name!r}")
    if chosen == rejected:
        raise InputError("'chosen' and 'rejected' are the same, so that neither is preferred")
    if isinstance(chosen, str) and isinstance(rejected, str):
        texts = (mark_completion(prompt, answer, name) for name, answer in ((CHOSEN, chosen), (REJECTED, rejected)))
        return PreferenceText(*texts)
    if not all(isinstance(part, list) for part in (chosen, rejected, prompt or [])) or isinstance(prompt, str):
        kinds = ", ".join(type(part).__name__ for part in (prompt, chosen, rejected))
        raise InputError(
            f"'prompt', 'chosen' and 'rejected' are three texts or three lists of messages, and here they are {kinds}. "
            f"Leave the prompt out where both lists begin with it"
        )
    if prompt is None:
        start = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))))
    else:
        start, chosen, rejected = len(prompt), prompt + chosen, prompt + rejected
    return PreferenceText(mark_chat(chosen, start), mark_chat(rejected, start))
