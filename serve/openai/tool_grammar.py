"""Grammars, in llguidance's Lark, that hold answers to calls of functions whose arguments match their schemas."""

import json
import re
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import Any

from laconic.errors import InputError
from serve.openai.tool_format import ToolFormat

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function that takes nothing."""
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How templates write JSON, by the filter `tojson`."""
DEFINITIONS = ("$defs", "definitions")
"""The keys of a schema to which references in its parts lead."""
ANY_TEXT = "/(?s:.*)/"


def make_call_grammar(
    tools: ToolFormat,
    functions: Mapping[str, Mapping[str, Any]],
    *,
    specials: Mapping[str, int],
    is_several: bool,
    answer: Mapping[str, Any] | None = None,
    is_free: bool = False,
) -> str:
    """Make the grammar of calls whose arguments match the schemas of their functions.

    functions: their schemas, by name. specials: the special tokens in the format. is_several: whether there may be more
    than one call. answer: the schema of the JSON that may be written instead. is_free: whether any text may be, alone
    or before the calls. Raises InputError for an answer in JSON where calls have no opening.
    """
    opening, is_special = quote(tools.opening, specials), tools.opening in specials
    alternatives = ["calls"]
    rules = {"calls": join_calls(tools, opening, specials, is_several=is_several)}
    rules["body"] = " | ".join(f"call_{place}" for place in range(len(functions)))
    for place, (name, schema) in enumerate(functions.items()):
        rules |= make_call_rules(tools, place, name, schema, specials)
    if answer is not None:
        if not opening:
            raise InputError("this model writes calls without a mark, so an answer in JSON cannot be told apart")
        alternatives.append("answer")
        rules["answer"] = embed_schema(answer)
    elif is_free:
        alternatives.append("TEXT")
        first = "[" if tools.is_pythonic else "{"
        rules["TEXT"] = rf"/(\s*[^\s\{first}](?s:.*))?/" if not opening else ANY_TEXT
        if opening and not is_special:
            rules["TEXT"] = exclude(tools.opening)
        if opening:  # whatever ends with an opening, since what is read as text would take that too
            alternatives.append("late_calls")
            opened = f"TEXT {opening}" if is_special else "opened"
            rules["late_calls"] = join_calls(tools, opened, specials, is_several=is_several)
            rules |= {} if is_special else {f"opened[suffix={opening}]": ANY_TEXT}
    return "\n".join(f"{name}: {rule}" for name, rule in {"start": " | ".join(alternatives), **rules}.items())


def join_calls(tools: ToolFormat, first: str, specials: Mapping[str, int], *, is_several: bool) -> str:
    """Return the rule of calls. first: what opens the first of them. is_several: whether there may be more than one."""
    opening, closing, between = (quote(text, specials) for text in (tools.opening, tools.closing, tools.between))
    before = r"/ ?\[/" if tools.before == "[" else quote(tools.before)
    if not is_several or tools.is_single:
        return f"{first} {before} body {closing}"
    if tools.is_repeated:
        return f"{first} {before} body {closing} ({between} {opening} {before} body {closing})*"
    return f"{first} {before} body ({between} body)* {closing}"


def make_call_rules(
    tools: ToolFormat, place: int, name: str, schema: Mapping[str, Any], specials: Mapping[str, int]
) -> dict[str, str]:
    """Return the rules of the calls of one function. place: its number."""
    if tools.is_pythonic:
        return {f"call_{place}": f'{quote(f"{name}(")} values_{place}_0 ")"'} | make_value_rules(place, schema)
    identifier = f"{quote(tools.call_id, specials)} /[a-zA-Z0-9]{{9}}/" if tools.call_id else ""
    head, middle, tail = (quote(text, specials) for text in (tools.head + name, tools.middle, tools.tail))
    return {
        f"call_{place}": f"{head} {identifier} {middle} arguments_{place} {tail}",
        f"arguments_{place}": embed_schema(schema),
    }


def make_value_rules(place: int, schema: Mapping[str, Any]) -> dict[str, str]:
    """Return the rules of the arguments of a function as Python writes them, by their names and in the order of the
    schema, with values in JSON: from each argument on, with others before it or without. place: of the function."""
    properties, required = schema.get("properties", {}), schema.get("required", ())
    shared = {key: schema[key] for key in DEFINITIONS if key in schema}
    rules: dict[str, str] = {}
    for number, (name, part) in enumerate(properties.items()):
        if not name.isidentifier() or iskeyword(name):
            raise InputError(f"this model calls functions as in Python, which can have no argument {name!r}")
        value, first, rest = (f"{kind}_{place}_{number}" for kind in ("value", "values", "more"))
        then = f"more_{place}_{number + 1}"
        rules[value] = embed_schema({**shared, **part})
        rules[first] = f"{quote(f'{name}=')} {value} {then}"
        rules[rest] = f"{quote(f', {name}=')} {value} {then}"
        if name not in required:
            rules[first] += f" | values_{place}_{number + 1}"
            rules[rest] += f" | {then}"
    return rules | {f"{kind}_{place}_{len(properties)}": '""' for kind in ("values", "more")}


def exclude(opening: str) -> str:
    """Return the pattern of texts in which no call begins. opening: of calls."""
    escaped = "".join(f"\\{letter}" if letter in "[]|" else letter for letter in opening)
    return f"{ANY_TEXT} & ~/(?s:.*){escaped}(?s:.*)/"


def embed_schema(schema: Mapping[str, Any]) -> str:
    """Return the rule of JSON that matches a schema."""
    return "%json " + json.dumps({**schema, "x-guidance": SEPARATORS})


def quote(text: str, specials: Mapping[str, int] = {}) -> str:
    """Quote a text for Lark; special tokens in it by their ids."""
    pieces: Sequence[str] = [text]
    if specials:
        pieces = re.split("(" + "|".join(re.escape(token) for token in sorted(specials, key=len)[::-1]) + ")", text)
    return " ".join(
        f"<[{specials[piece]}]>" if piece in specials else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    )


def complete_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, which are an object. Raises InputError for anything else."""
    if parameters is None:
        return NO_ARGUMENTS
    if parameters.get("type", "object") != "object":
        raise InputError("the parameters of a function are the schema of an object, with the type 'object'")
    return {"type": "object", **parameters}
