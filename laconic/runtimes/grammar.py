"""Grammars that a written text must match: JSON schemas, regular expressions and Lark, by llguidance.

A grammar is text, in llguidance's variant of Lark, or in JSON as `grammar_of_schema` writes it.
"""

import json
from collections.abc import Mapping
from typing import Any

from laconic.errors import InputError
from laconic.registry import missing_package

SPACE = r"[ \n\t]{0,24}"
"""White space between the parts of JSON. With any amount of it, a model may write nothing else to the end."""
LONGEST = 200
"""Characters of the library's explanation that are passed on."""


def grammar_of_schema(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON texts that match a JSON schema; `check_grammar` says whether it is one. Raises
    InputError for a schema that is nested too deep."""
    matcher = import_matcher()
    try:
        return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": SPACE}))
    except (ValueError, RecursionError) as error:
        raise InputError(explain_refusal(str(error))) from error


def check_grammar(grammar: str) -> None:
    """Raise InputError for what is no grammar, or one too large, with the reason in a sentence."""
    message = import_matcher().validate_grammar(grammar)
    if message and not message.startswith("WARNING"):
        raise InputError(explain_refusal(message))


def explain_refusal(message: str) -> str:
    """Say in one sentence why a grammar is refused. message: of the library, whose panics tell paths of the machine
    that built it."""
    if ".rs" in message:
        return "the grammar or the JSON schema cannot be compiled"
    lines = message.splitlines()
    reason = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    return f"the grammar or the JSON schema cannot be compiled: {reason[:LONGEST].rstrip(':')}"


def import_matcher() -> Any:
    """Return llguidance's class of matchers. Raises MissingPackage."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise missing_package("llguidance") from error
    return LLMatcher
