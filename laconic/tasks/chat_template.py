"""Chats as text: a checkpoint's chat template, and which parts of a text are answers to learn."""

import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

from laconic.errors import InputError, MissingPackage, SourceError

ASSISTANT = "assistant"
"""The role whose turns are learned."""
TOOLS = "tools"
"""The variable of a template that holds the functions that may be called; None without any, as in transformers."""
GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
"""The tags by which templates mark answers: blocks with variables of their own."""
OPTIONAL_DATE = re.compile(r"strftime_now\s+is\s+(not\s+)?defined")
"""How templates ask for the date that have one of their own where none is given."""
CALLS = "tool_calls"
"""The key of a message's calls of functions."""
PROBE_VALUE = "Vrgq7"
PROBE = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "string", "description": "A value."}},
            "required": ["value"],
        },
    },
}
PROBE_CHAT: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": "Probe."},
    {
        "role": ASSISTANT,
        "content": "",
        CALLS: [
            {"id": "abcdefghi", "type": "function", "function": {"name": "probe", "arguments": {"value": PROBE_VALUE}}}
        ],
    },
)
"""A chat with a call by which is found how a template takes calls: the value is shown where they are."""


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


def mark_completion(prompt: Any, completion: Any, name: str = "completion") -> MarkedText:
    """Return a prompt with its completion, which is the answer. name: the column of the completion. Raises InputError
    unless both are texts."""
    for column, value in (("prompt", prompt), (name, completion)):
        if not isinstance(value, str):
            raise InputError(f"expected a string under {column!r}, got {type(value).__name__}")
    if not completion:
        raise InputError(f"the {name!r} is empty, so there is nothing to learn")
    return MarkedText(prompt + completion, [(len(prompt), len(prompt) + len(completion))])


class CallForm(NamedTuple):
    """How a template takes a message that calls functions. content: beside calls; where it is None, a text is a message
    of its own before them. is_text: whether arguments are a text in JSON, not an object. shown: the text of a call of
    `probe`, as the template shows it at the end of a chat."""

    content: str | None
    is_text: bool
    shown: str = ""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template of transformers, in Jinja. text: the template. tokens: the special tokens that it may use, by
    name as `eos_token`. tool_text: another template for chats with functions; empty where there is none.

    It is rendered in Jinja's immutable sandbox, as transformers does. The current date is given to those templates
    alone that have none of their own, so that the same chat of any other is always the same text.
    """

    text: str
    tokens: Mapping[str, str]
    tool_text: str = ""

    @cached_property
    def for_tools(self) -> "ChatTemplate":
        """The template of chats with functions."""
        return ChatTemplate(self.tool_text, self.tokens) if self.tool_text else self

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
        if OPTIONAL_DATE.search(self.text) is None:
            environment.globals["strftime_now"] = time.strftime
        text = GENERATION.sub(r"{%\1 \2with \3%}", self.text)
        try:
            return environment.from_string(text), frozenset(find_undeclared_variables(environment.parse(text)))
        except TemplateError as error:
            raise SourceError(f"the chat template does not read: {error}. Give another one") from error

    @property
    def reads_tools(self) -> bool:
        """Whether the template says what functions there are, in its variable `tools`."""
        return TOOLS in self._compiled[1]

    @cached_property
    def call_form(self) -> CallForm | None:
        """The first form of calls that the template shows; None where it shows calls in none."""
        for form in (CallForm(*each) for each in itertools.product(("", None), (False, True))):
            with suppress(InputError):
                text = self._render(adapt_calls(PROBE_CHAT, form), tools=[PROBE])
                if PROBE_VALUE in text:
                    return form._replace(shown=text)
        return None

    @property
    def shown_call(self) -> str:
        """A call of `probe` as the template shows it, at the end of a chat; empty where it shows none."""
        return self.call_form.shown if self.call_form else ""

    def describe(self) -> dict[str, Any]:
        """Return what the template is made of, JSON-ready."""
        more = {"tool_text": self.tool_text} if self.tool_text else {}
        return {"text": self.text, "tokens": dict(self.tokens), **more}

    def __getstate__(self) -> dict[str, Any]:
        return self.describe()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a chat as text. messages: as OpenAI describes them, the arguments of calls as objects. prompt: add
        what begins the next answer. tools: functions that may be called, as OpenAI describes them. Raises InputError
        where the template refuses the chat, and where it would leave out calls."""
        if any(CALLS in message for message in messages):
            if (form := self.call_form) is None:
                raise InputError("the model's chat template knows no calls of tools in messages")
            messages = adapt_calls(messages, form)
        return self._render(messages, prompt=prompt, tools=tools)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        template, _ = self._compiled
        variables = {**self.tokens, TOOLS: tools, "documents": None}
        try:
            return str(template.render(messages=messages, add_generation_prompt=prompt, **variables))
        except Exception as error:  # whatever the expressions of a template make of the messages
            raise InputError(f"the model's chat template refuses the chat: {' '.join(str(error).split())}") from error

    def mark(self, messages: Any, start: int = 0) -> MarkedText:
        """Return the text of a chat whose answers are the turns of the assistant, each with what ends its turn.

        start: how many messages are the prompt, whose turns are no answers. Raises InputError for what is no chat with
        an answer, and where the template renders an answer in another way once others follow it.
        """
        check_messages(messages, start)
        return self.mark_answers(messages, start)

    def mark_answers(self, messages: Sequence[Mapping[str, Any]], start: int = 0) -> MarkedText:
        """Mark the answers of a chat that was checked; as `mark`."""
        text = self.render(messages)
        answers = []
        for index, message in enumerate(messages):
            if index < start or message["role"] != ASSISTANT:
                continue
            before, after = self.render(messages[:index], prompt=True), self.render(messages[: index + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise InputError(
                    f"the model's chat template renders message {index + 1} in another way where others follow it, so "
                    f"it cannot be learned there. Give the chat up to this message as a row of its own"
                )
            answers.append((len(before), len(after)))
        return MarkedText(text, answers, has_special_tokens=True)


def adapt_calls(messages: Sequence[Mapping[str, Any]], form: CallForm) -> list[Mapping[str, Any]]:
    """Return a chat with its calls of functions in the form that a template takes."""
    adapted: list[Mapping[str, Any]] = []
    for message in messages:
        if CALLS in message:
            calls, text = message[CALLS], message.get("content")
            if text and form.content is None:
                adapted.append({key: value for key, value in message.items() if key != CALLS})
            content = None if form.content is None else text or form.content
            calls = [write_arguments(call) for call in calls] if form.is_text else calls
            message = {**message, "content": content, CALLS: calls}
        adapted.append(message)
    return adapted


def write_arguments(call: Any) -> Any:
    """Return a call with its arguments as a text in JSON."""
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}}


def check_messages(messages: Any, start: int = 0) -> None:
    """Raise InputError unless messages are a chat with an answer of the assistant behind the first `start`."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InputError("expected a list of objects {'role': ..., 'content': ...} under 'messages'")
    for number, message in enumerate(messages, 1):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InputError(f"message {number} has no {key!r}, a string")
    if not any(message["role"] == ASSISTANT for message in messages[start:]):
        raise InputError(f"no message has the role {ASSISTANT!r}, so there is nothing to learn")


def to_plain_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return the filter `tojson` as chat templates expect it: without the escapes of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
