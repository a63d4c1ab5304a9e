"""Grammars: what is refused, in one sentence; and how much white space JSON may have."""

import pytest

from laconic.errors import InputError

pytest.importorskip("llguidance")
from laconic.runtimes.grammar import check_grammar, explain_refusal, grammar_of_schema


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" | /[0-9]+/', 'start: "call " %json {"type": "object"}', grammar_of_schema({"type": "object"})],
)
def test_grammars_of_each_kind_are_taken(grammar):
    check_grammar(grammar)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("", "Empty grammar"),
        ("start: name", 'unknown name: "name"'),
        ("start: /(/", "unclosed group"),
        (grammar_of_schema({"type": "number of things"}), "Invalid type"),
        (grammar_of_schema({"not": {"type": "string"}}), "not"),
        (grammar_of_schema({"type": "string", "pattern": "(?=x)a"}), "look-around"),
        (grammar_of_schema({"$ref": "file:///etc/passwd"}), "does not fetch"),
        (
            grammar_of_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}),
            "too large",
        ),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason_in_one_line(grammar, reason):
    with pytest.raises(InputError, match="cannot be compiled: ") as refused:
        check_grammar(grammar)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_schema_that_goes_on_without_end_is_refused():
    schema = {"type": "string"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InputError, match="recursion limit"):
        grammar_of_schema(schema)


def test_paths_of_the_library_are_not_passed_on():
    assert "/root" not in explain_refusal("panicked at /root/.cargo/src/parser.rs:12: index out of bounds")
