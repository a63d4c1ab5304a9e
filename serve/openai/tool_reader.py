"""Calls of functions in a text, as it is written. Whole answers and streams are read alike, piece by piece."""

import json
import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Literal

from laconic.errors import InputError
from serve.generation.detokenizer import StopMatcher
from serve.generation.written_choice import CallPart, TextPiece, join_pieces
from serve.openai.object_scanner import ObjectScanner, read_keywords
from serve.openai.tool_format import FORMATS, ToolFormat

BEFORE = " \n\r\t[,;"
"""What may be between calls, and before the first."""
LONGEST_HEAD = 400
"""Characters in which the name and the key of the arguments come, where they come in the usual order."""
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""The name of a function."""
IDENTIFIER_BYTES = 5
"""Random bytes of a call's identifier. Templates of Mistral take nine letters and digits, and no other ones."""
IDENTIFIER_LENGTH = 9


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
                self._enter("call" if start[0] == ("[" if self.tools.is_pythonic else "{") else "plain")
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
        match = self._match_head() if self.tools.is_pythonic or self._seen < LONGEST_HEAD else None
        if match and match[1] in self.names and not self.tools.is_pythonic:
            self._begin_call(match[1])
            self._held = self._held[match.end() :]
            self._enter("arguments")
            return True
        stripped = self._held.lstrip(BEFORE)
        if not stripped:
            return False
        if self.tools.arguments and stripped[0] == "{":
            return self._read_whole(len(self._held) - len(stripped), self._take_object)
        if self.tools.is_pythonic and match and match[1] in self.names:
            return self._read_whole(match.end(), partial(self._take_keywords, match[1]))
        may_begin = NAME.fullmatch(stripped) if self.tools.is_pythonic else not self.tools.arguments
        if may_begin and not match and len(self._held) < LONGEST_HEAD:
            return False
        self._text += self._taken
        self._leave()
        return True

    def _read_whole(self, start: int, take: Callable[[str], bool]) -> bool:
        """Read what begins with a bracket to its end. take: whether it is a call, which is then taken."""
        self._seen = max(self._seen, start)
        end = self._scanner.scan(self._held[self._seen :])
        if end is None:
            self._seen = len(self._held)
            return False
        end += self._seen
        is_call = take(self._held[start:end])
        if not is_call:
            self._text += self._taken + self._held[:end]
        self._held = self._held[end:]
        if is_call:
            self._enter("after")
        else:
            self._leave()
        return True

    def _match_head(self) -> re.Match[str] | None:
        """Match a call up to its arguments; its name is the first group."""
        before, held = f"[{re.escape(BEFORE)}]*", self._held[:LONGEST_HEAD]
        if self.tools.is_pythonic:
            return re.match(rf"{before}({NAME.pattern})(?=\()", held)
        if self.tools.arguments:
            key = rf'"\s*,\s*"{self.tools.arguments}"\s*:\s*(?=\{{)'
            return re.match(rf'{before}\{{\s*"name"\s*:\s*"([^"\\]+){key}', held)
        parts = (self.tools.head, self.tools.call_id, self.tools.middle)
        head, call_id, middle = (r"\s*".join(map(re.escape, part.split())) for part in parts)
        identifier = rf"(?:{call_id}\w+)?" if call_id else ""
        return re.match(rf"{before}{head}\s*({NAME.pattern})\s*{identifier}\s*{middle}\s*(?=\{{)", held)

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

    def _take_keywords(self, name: str, text: str) -> bool:
        """Take a call in Python; return whether it is one. text: its arguments, with their brackets."""
        arguments = read_keywords(text)
        if arguments is None:
            return False
        self._begin_call(name, json.dumps(arguments, ensure_ascii=False))
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
        """Read what is left of a call behind its arguments."""
        if not self.tools.arguments:
            held, tail = self._held.lstrip(), self.tools.tail.strip()
            if tail and tail.startswith(held) and held != tail:
                return False
            self._held = held.removeprefix(tail)
            self._enter("after")
            return True
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
        head = self.tools.head if not self.tools.arguments else ""
        if not held or any(mark.startswith(held) and held != mark for mark in (closing, head)):
            return False
        if closing and held.startswith(closing):
            self._held = held[len(closing) :]
            self._enter("text" if self.tools.opening else "after")
        elif not self.tools.is_repeated and (held[0] in ",;" or (head and held.startswith(head))):
            self._taken = ""
            self._enter("call")
        else:
            self._leave()
        return True

    def _read_plain(self) -> bool:
        self._text, self._held = self._text + self._held, ""
        return False

    def _enter(self, state: State) -> None:
        self._state, self._seen = state, 0
        self._scanner = ObjectScanner(1 if state == "rest" else 0, "\"'" if self.tools.is_pythonic else '"')

    def _leave(self) -> None:
        """Read text again: up to the next call, where calls have an opening."""
        self._enter("text" if self.tools.opening else "plain")

    def _finish(self) -> None:
        """Show what was held back, as far as it belongs to no call."""
        if self._state == "call":
            self._text += self._taken + self._held
        elif self._state == "text" and (self._held.strip() or not self.calls):
            self._text += self._held


@lru_cache(maxsize=64)
def find_tool_format(template: str, shown: str = "") -> ToolFormat:
    """Return the format of the calls of a chat template: one whose mark it contains, and by which a call is read as the
    template shows it, where it does. shown: a call of `probe` with a `value`, at the end of a chat. Raises InputError
    for one that is not known."""
    for tools in FORMATS:
        is_marked = tools.mark in template and not any(part in template for part in tools.unlike)
        if is_marked and (not shown or reads_call(tools, shown)):
            return tools
    raise InputError("the model's chat template writes calls in a format that this server does not read")


def reads_call(tools: ToolFormat, shown: str) -> bool:
    """Return whether the call of `probe` at the end of a chat is read in a format."""
    start = shown.rfind(tools.opening or ("[probe(" if tools.is_pythonic else tools.head))
    if start < 0:
        return False
    read = ToolReader(tools, {"probe"}).read(TextPiece(0, shown[start:], (), "stop"))
    return any("value" in (parse_object(call.arguments) or ()) for call in join_pieces([read]).calls)


def parse_object(text: str) -> dict[str, object] | None:
    """Return the object in a JSON text; None where it holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
