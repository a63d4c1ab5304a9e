"""How models write calls of functions (tools): one format for each family, found by what its chat template contains."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laconic.errors import InputError

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function that takes nothing."""
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How templates write JSON, by the filter `tojson`."""
ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How models of a family write calls: `opening`, objects with `name` and `arguments`, and `closing`.

    mark: what the chat templates of the family contain; unlike: what those contain that write calls otherwise.
    opening: empty where the call is the whole text. before: a pattern of what is between it and the first object.
    between: what separates calls; empty where there is one at most. is_repeated: whether each call has an opening and a
    closing of its own.
    """

    mark: str
    unlike: str
    opening: str
    before: str
    arguments: str
    closing: str
    between: str
    is_repeated: bool = False


FORMATS = (
    ToolFormat(  # Hermes 2 Pro, Qwen 2.5 and 3
        mark="<tool_call>",
        unlike="<function=",
        opening="<tool_call>",
        before=r"\n",
        arguments="arguments",
        closing="\n</tool_call>",
        between="\n",
        is_repeated=True,
    ),
    ToolFormat(  # Mistral up to version 7 of its tokenizers
        mark="[TOOL_CALLS]",
        unlike="[ARGS]",
        opening="[TOOL_CALLS]",
        before=r" ?\[",
        arguments="arguments",
        closing="]",
        between=", ",
    ),
    ToolFormat(  # Llama 3.1 to 3.3
        mark='"parameters": ',
        unlike="<function=",
        opening="",
        before="",
        arguments="parameters",
        closing="",
        between="",
    ),
)


def find_tool_format(template: str) -> ToolFormat:
    """Return the format of the calls of a chat template. Raises InputError for one that is not known."""
    for tools in FORMATS:
        if tools.mark in template and tools.unlike not in template:
            return tools
    raise InputError("the model's chat template writes calls in a format that this server does not read")


def make_call_grammar(
    tools: ToolFormat,
    functions: Mapping[str, Mapping[str, Any]],
    *,
    special: int | None,
    is_several: bool,
    answer: Mapping[str, Any] | None = None,
    is_free: bool = False,
) -> str:
    """Make the grammar, in llguidance's Lark, of calls whose arguments match the schemas of their functions.

    functions: their schemas, by name. special: the opening's token, where it is a special one. is_several: whether
    there may be more than one call. answer: the schema of the JSON that may be written instead. is_free: whether any
    text may be, alone or before the calls. Raises InputError for an answer in JSON where calls have no opening.
    """
    opening = "" if not tools.opening else quote(tools.opening) if special is None else f"<[{special}]>"
    alternatives = ["calls"]
    rules = {"calls": join_calls(tools, opening, opening, is_several=is_several)}
    rules["body"] = " | ".join(f"call_{place}" for place in range(len(functions)))
    for place, (name, schema) in enumerate(functions.items()):
        begin = f'{{"name": {json.dumps(name)}, "{tools.arguments}": '
        rules[f"call_{place}"] = f'{quote(begin)} arguments_{place} "}}"'
        rules[f"arguments_{place}"] = embed_schema(schema)
    if answer is not None:
        if not opening:
            raise InputError(
                "this model writes calls as JSON without a mark, so an answer in JSON cannot be told apart"
            )
        alternatives.append("answer")
        rules["answer"] = embed_schema(answer)
    elif is_free:
        alternatives.append("TEXT")
        rules["TEXT"] = r"/(\s*[^\s{](?s:.*))?/" if not opening else ANY_TEXT if special else exclude(tools.opening)
        if opening:  # whatever ends with an opening, since what is read as text would take that too
            alternatives.append("late_calls")
            first = f"TEXT {opening}" if special else "opened"
            rules["late_calls"] = join_calls(tools, first, opening, is_several=is_several)
            rules |= {} if special else {f"opened[suffix={opening}]": ANY_TEXT}
    return "\n".join(f"{name}: {rule}" for name, rule in {"start": " | ".join(alternatives), **rules}.items())


def join_calls(tools: ToolFormat, first: str, opening: str, *, is_several: bool) -> str:
    """Return the rule of calls. first: what opens the first of them; opening: any other. is_several: whether there may
    be more than one."""
    before, closing, between = f"/{tools.before}/" if opening else "", quote(tools.closing), quote(tools.between)
    if not is_several or not between:
        return f"{first} {before} body {closing}"
    if tools.is_repeated:
        return f"{first} {before} body {closing} ({between} {opening} {before} body {closing})*"
    return f"{first} {before} body ({between} body)* {closing}"


def exclude(opening: str) -> str:
    """Return the pattern of texts in which no call begins. opening: of calls."""
    escaped = "".join(f"\\{letter}" if letter in "[]" else letter for letter in opening)
    return f"{ANY_TEXT} & ~/(?s:.*){escaped}(?s:.*)/"


def embed_schema(schema: Mapping[str, Any]) -> str:
    """Return the rule of JSON that matches a schema."""
    return "%json " + json.dumps({**schema, "x-guidance": SEPARATORS})


def quote(text: str) -> str:
    """Quote a text for Lark."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def complete_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, which are an object. Raises InputError for anything else."""
    if parameters is None:
        return NO_ARGUMENTS
    if parameters.get("type", "object") != "object":
        raise InputError("the parameters of a function are the schema of an object, with the type 'object'")
    return {"type": "object", **parameters}


def find_special_token(tokens: Mapping[int, Any], opening: str) -> int | None:
    """Return the opening's token where it is a special one, which texts do not show. tokens: those that were added to
    a vocabulary."""
    return next((index for index, token in tokens.items() if token.special and token.content == opening), None)
