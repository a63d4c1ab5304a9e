"""The end of an object, or of a call in Python, in a text that comes in pieces; and what such a call passes."""

import ast
from typing import Any

OPENING, CLOSING = "{[(", "}])"
JSON_NAMES = {"true": True, "false": False, "null": None}
"""The values that JSON names otherwise than Python: models that write Python write these, too."""


class ObjectScanner:
    """Finds the end of what begins with a bracket. quotes: the letters that begin and end strings. depth: of the
    brackets that are open."""

    def __init__(self, depth: int = 0, quotes: str = '"') -> None:
        self.depth = depth
        self._quotes = quotes
        self._string = ""
        self._is_escaped = False

    def scan(self, text: str) -> int | None:
        """Return how many characters of the text belong to the object; None where it goes on."""
        for place, letter in enumerate(text):
            if self._string:
                if self._is_escaped:
                    self._is_escaped = False
                elif letter == "\\":
                    self._is_escaped = True
                elif letter == self._string:
                    self._string = ""
            elif letter in self._quotes:
                self._string = letter
            elif letter in OPENING:
                self.depth += 1
            elif letter in CLOSING:
                self.depth -= 1
                if self.depth <= 0:
                    return place + 1
        return None


def read_keywords(text: str) -> dict[str, Any] | None:
    """Read the arguments of a call in Python, all by their names and with values that are written out, as
    `(a="b", c=[1])`. Return None for anything else."""
    try:
        call = ast.parse(f"call{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            return None
        return {str(each.arg): read_value(each.value) for each in call.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def read_value(node: ast.expr) -> Any:
    """Read a value that JSON has. Raises ValueError."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in JSON_NAMES:
            return JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [read_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            names = [read_value(key) if key is not None else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(read_value, values), strict=True))
    raise ValueError("no value that JSON has")
