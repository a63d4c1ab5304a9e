"""Calls of functions in a text, as it is written. Whole answers and streams are read alike, piece by piece."""

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from serve.generation.detokenizer import StopMatcher
from serve.generation.written_choice import CallPart, TextPiece
from serve.openai.tool_format import ToolFormat

BEFORE = " \n\r\t[,;"
"""What may be between calls, and before the first."""
LONGEST_HEAD = 400
"""Characters in which the name and the key of the arguments come, where they come in the usual order."""
IDENTIFIER_BYTES = 5
"""Random bytes of a call's identifier. Templates of Mistral take nine letters and digits, and no other ones."""
IDENTIFIER_LENGTH = 9


class ObjectScanner:
    """Finds the end of a JSON object in a text that comes in pieces. depth: of the objects and lists that are open."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self._in_string = False
        self._escaped = False

    def scan(self, text: str) -> int | None:
        """Return how many characters of the text belong to the object; None where it goes on."""
        for place, letter in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return place + 1
        return None


State = Literal["text", "call", "arguments", "rest", "after", "plain"]
"""What comes next: text; a call's object; its arguments; what is left of its object; what follows that; text alone."""


@dataclass
class ToolReader:
    """Finds the calls in one choice. What only looks like a call stays text.

    names: of the functions that may be called. is_single: whether the choice ends with its first call.
    """

    tools: ToolFormat
    names: Collection[str]
    is_single: bool = False
    calls: int = 0
    is_done: bool = False
    _state: State = "text"
    _held: str = ""
    _seen: int = 0
    _taken: str = ""
    _text: str = ""
    _parts: list[CallPart] = field(default_factory=list)
    _scanner: ObjectScanner = field(default_factory=ObjectScanner)

    def read(self, piece: TextPiece) -> TextPiece:
        """Return a piece with its calls apart from its text."""
        self._held += piece.text
        self._text, self._parts = "", []
        steps = {
            "text": self._read_text,
            "call": self._read_call,
            "arguments": self._read_arguments,
            "rest": self._read_rest,
            "after": self._read_after,
            "plain": self._read_plain,
        }
        while not self.is_done and steps[self._state]():
            pass
        reason = piece.finish_reason
        if self.is_done:
            reason = "tool_calls"
        elif reason is not None:
            self._finish()
            if reason == "stop" and self.calls and self._state != "arguments":
                reason = "tool_calls"
        return replace(piece, text=self._text, calls=tuple(self._parts), finish_reason=reason)

    def _read_text(self) -> bool:
        """Show text up to where a call may begin, less the white space before it."""
        if not self.tools.opening:
            start = self._held.lstrip()
            if start:
                self._enter("call" if start[0] == "{" else "plain")
            return bool(start)
        before, opening, behind = self._held.partition(self.tools.opening)
        if opening:
            self._text += before.rstrip()
            self._taken, self._held = before[len(before.rstrip()) :] + opening, behind
            self._enter("call")
            return True
        text, _ = StopMatcher([self.tools.opening]).add(self._held)
        text = text.rstrip()
        self._text, self._held = self._text + text, self._held[len(text) :]
        return False

    def _read_call(self) -> bool:
        """Read a call's name, and whether its arguments follow; or the whole object, where its keys come otherwise."""
        if self._seen < LONGEST_HEAD and (match := self._match_head()) and match[1] in self.names:
            self._begin_call(match[1])
            self._held = self._held[match.end() :]
            self._enter("arguments")
            return True
        stripped = self._held.lstrip(BEFORE)
        if not stripped:
            return False
        if stripped[0] != "{":
            self._text += self._taken
            self._enter("text" if self.tools.opening else "plain")
            return True
        start = len(self._held) - len(stripped)
        self._seen = max(self._seen, start)
        end = self._scanner.scan(self._held[self._seen :])
        if end is None:
            self._seen = len(self._held)
            return False
        end += self._seen
        if self._take_object(self._held[start:end]):
            self._held = self._held[end:]
            self._enter("after")
        else:
            self._text += self._taken + self._held[:end]
            self._held = self._held[end:]
            self._enter("text" if self.tools.opening else "plain")
        return True

    def _match_head(self) -> re.Match[str] | None:
        pattern = rf'[{re.escape(BEFORE)}]*\{{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"{self.tools.arguments}"\s*:\s*(?=\{{)'
        return re.match(pattern, self._held[:LONGEST_HEAD])

    def _begin_call(self, name: str, arguments: str = "") -> None:
        identifier = secrets.token_hex(IDENTIFIER_BYTES)[:IDENTIFIER_LENGTH]
        self._parts.append(CallPart(self.calls, arguments, identifier, name))
        self.calls += 1

    def _take_object(self, text: str) -> bool:
        """Take a whole object as a call; return whether it is one."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return False
        arguments = call.get(self.tools.arguments)
        if isinstance(arguments, str):
            arguments = parse_object(arguments)
        if not isinstance(arguments, dict) or call.get("name") not in self.names:
            return False
        self._begin_call(call["name"], json.dumps(arguments, ensure_ascii=False))
        return True

    def _read_arguments(self) -> bool:
        end = self._scanner.scan(self._held)
        text, self._held = (self._held, "") if end is None else (self._held[:end], self._held[end:])
        if text:
            self._parts.append(CallPart(self.calls - 1, text))
        if end is None:
            return False
        self._enter("rest")
        return True

    def _read_rest(self) -> bool:
        end = self._scanner.scan(self._held)
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._enter("after")
        return end is not None

    def _read_after(self) -> bool:
        """Read on behind a call: its closing, the next call, or text."""
        if self.is_single:
            self.is_done = True
            return False
        held, closing = self._held.lstrip(), self.tools.closing.strip()
        if not held or (closing.startswith(held) and held != closing):
            return False
        if closing and held.startswith(closing):
            self._held = held[len(closing) :]
            self._enter("text")
        elif self.tools.is_repeated or held[0] not in ",;":
            self._enter("text" if self.tools.opening else "plain")
        else:
            self._taken = ""
            self._enter("call")
        return True

    def _read_plain(self) -> bool:
        self._text, self._held = self._text + self._held, ""
        return False

    def _enter(self, state: State) -> None:
        self._state, self._seen = state, 0
        self._scanner = ObjectScanner(depth=1 if state == "rest" else 0)

    def _finish(self) -> None:
        """Show what was held back, as far as it belongs to no call."""
        if self._state == "call":
            self._text += self._taken + self._held
        elif self._state == "text" and (self._held.strip() or not self.calls):
            self._text += self._held


def parse_object(text: str) -> dict[str, object] | None:
    """Return the object in a JSON text; None where it holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
