"""Grammars that a written text must match: JSON schemas, regular expressions and Lark, by llguidance.

A grammar is text, in llguidance's variant of Lark, or in JSON as `grammar_of_schema` writes it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from laconic.arrays import Array
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


class GrammarTokens:
    """The tokens of a model, as grammars see them."""

    def __init__(self, tokenizer: Path, vocabulary: int) -> None:
        """tokenizer: the file of the tokenizer. vocabulary: the number of tokens that the model gives scores to."""
        self.vocabulary = vocabulary
        self._path = tokenizer
        self._tokenizers: dict[tuple[int, ...], Any] = {}

    def match(self, grammar: str, end_tokens: tuple[int, ...]) -> "GrammarMatch":
        """Begin a text that must match a grammar. end_tokens: with which a text may end. Raises InputError for what is
        no grammar, and where the tokenizer is of a kind that llguidance does not read."""
        matcher = import_matcher()(self._open(end_tokens), grammar, log_level=0)
        if matcher.is_error():
            raise InputError(explain_refusal(matcher.get_error()))
        return GrammarMatch(matcher, self.vocabulary)

    def _open(self, end_tokens: tuple[int, ...]) -> Any:
        if end_tokens not in self._tokenizers:
            import llguidance

            try:
                text = self._path.read_text(encoding="utf-8")
                opened = llguidance.LLTokenizer(text, eos_token=list(end_tokens) or None)
                if opened.vocab_size < self.vocabulary:
                    opened = llguidance.LLTokenizer(text, self.vocabulary, list(end_tokens) or None)
            except Exception as error:  # the library raises ValueError and its like
                raise InputError("grammars cannot be matched with the tokenizer of this model") from error
            self._tokenizers[end_tokens] = opened
        return self._tokenizers[end_tokens]


def begin_match(tokens: GrammarTokens | None, grammar: str, end_tokens: tuple[int, ...]) -> "GrammarMatch | None":
    """Begin a text that must match a grammar; None where there is none. tokens: of the model, if its tokenizer is
    known. Raises InputError where it is not, and as `GrammarTokens.match` does."""
    if not grammar:
        return None
    if tokens is None:
        raise InputError("the model was opened without its tokenizer, which grammars need")
    return tokens.match(grammar, end_tokens)


class GrammarMatch:
    """A text that matches a grammar so far."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and can go on with nothing but its end."""
        return bool(self._matcher.is_stopped())

    def copy(self) -> "GrammarMatch":
        """Return the same text, to go on another way."""
        return GrammarMatch(self._matcher.deep_copy(), self._vocabulary)

    def find_next(self) -> Array:
        """Find which tokens may follow: a bool for each. None may where the grammar has become too complex."""
        if self._matcher.is_error():
            return np.zeros(self._vocabulary, bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(bool)

    def add(self, token: int) -> None:
        """Add a token that may follow."""
        self._matcher.consume_token(token)
