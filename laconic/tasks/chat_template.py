"""Chats as text: a checkpoint's chat template, and which parts of a text are answers to learn."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from laconic.errors import InputError, MissingPackage, SourceError

ASSISTANT = "assistant"
"""The role whose turns are learned."""
TOOLS = "tools"
"""The variable of a template that holds the functions that may be called; None without any, as in transformers."""


class MarkedText(str):
    """A text with the parts of it that are answers: the others are read, and not learned.

    answers: (start, stop) of each, in characters. has_special_tokens: whether the text contains the special tokens that
    begin and end it, so that the tokenizer adds none.
    """

    __slots__ = ("answers", "has_special_tokens")

    answers: tuple[tuple[int, int], ...]
    has_special_tokens: bool

    def __new__(cls, text: str, answers: Sequence[tuple[int, int]], has_special_tokens: bool = False) -> Self:
        made = super().__new__(cls, text)
        made.answers, made.has_special_tokens = tuple(answers), has_special_tokens
        return made

    def __getnewargs__(self) -> tuple[str, tuple[tuple[int, int], ...], bool]:  # type: ignore[override]
        return str(self), self.answers, self.has_special_tokens


def mark_completion(prompt: Any, completion: Any) -> MarkedText:
    """Return a prompt with its completion, which is the answer. Raises InputError unless both are texts."""
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            raise InputError(f"expected a string under {name!r}, got {type(value).__name__}")
    if not completion:
        raise InputError("the 'completion' is empty, so there is nothing to learn")
    return MarkedText(prompt + completion, [(len(prompt), len(prompt) + len(completion))])


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template of transformers, in Jinja. text: the template. tokens: the special tokens that it may use, by
    name as `eos_token`.

    It is rendered in Jinja's immutable sandbox, as transformers does. The current date is not given to it, so that the
    same chat is always the same text: templates that ask for it have a date of their own.
    """

    text: str
    tokens: Mapping[str, str]

    @cached_property
    def _compiled(self) -> tuple[Any, frozenset[str]]:
        """The template, and the variables that it reads."""
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.meta import find_undeclared_variables
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise MissingPackage(
                "package 'jinja2', which renders chats, is not installed. Try: pip install 'laconic[compress]'"
            ) from error

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = to_plain_json
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self.text), frozenset(
                find_undeclared_variables(environment.parse(self.text))
            )
        except TemplateError as error:
            raise SourceError(f"the chat template does not read: {error}. Give another one") from error

    @property
    def reads_tools(self) -> bool:
        """Whether the template says what functions there are, in its variable `tools`."""
        return TOOLS in self._compiled[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"text": self.text, "tokens": self.tokens}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a chat as text. prompt: add what begins the next answer. tools: functions that may be called, as
        OpenAI describes them. Raises InputError where the template refuses the chat."""
        template, _ = self._compiled
        variables = {**self.tokens, TOOLS: tools}
        try:
            return str(template.render(messages=messages, add_generation_prompt=prompt, **variables))
        except Exception as error:  # whatever the expressions of a template make of the messages
            raise InputError(f"the model's chat template refuses the chat: {' '.join(str(error).split())}") from error

    def mark(self, messages: Any) -> MarkedText:
        """Return the text of a chat whose answers are the turns of the assistant, each with what ends its turn.

        Raises InputError for what is no chat with an answer, and where the template renders an answer in another way
        once others follow it.
        """
        check_messages(messages)
        text = self.render(messages)
        answers = []
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before, after = self.render(messages[:index], prompt=True), self.render(messages[: index + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise InputError(
                    f"the model's chat template renders message {index + 1} in another way where others follow it, so "
                    f"it cannot be learned there. Give the chat up to this message as a row of its own"
                )
            answers.append((len(before), len(after)))
        return MarkedText(text, answers, has_special_tokens=True)


def check_messages(messages: Any) -> None:
    """Raise InputError unless messages are a chat with an answer of the assistant."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InputError("expected a list of objects {'role': ..., 'content': ...} under 'messages'")
    for number, message in enumerate(messages, 1):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InputError(f"message {number} has no {key!r}, a string")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise InputError(f"no message has the role {ASSISTANT!r}, so there is nothing to learn")


def to_plain_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return the filter `tojson` as chat templates expect it: without the escapes of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
