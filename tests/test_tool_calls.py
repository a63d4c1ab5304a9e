"""Calls of functions: how they are found in texts, and the grammars that hold answers to them."""

import json
from itertools import pairwise
from typing import Any

import pytest
from chat_models import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tool_templates import ARGUMENTS, CALLS, OTHER, TEMPLATES, TWICE

from laconic.errors import InputError
from laconic.runtimes.generator import GenerationRequest, Sampling, TokenEvent
from laconic.runtimes.grammar import check_grammar
from laconic.tasks.chat_template import ChatTemplate
from serve.generation.written_choice import TextPiece, WrittenChoice, join_pieces
from serve.openai.tool_format import find_special_tokens
from serve.openai.tool_grammar import make_call_grammar
from serve.openai.tool_reader import ToolReader, find_tool_format

llguidance = pytest.importorskip("llguidance")

NAMES = {"weather", "time"}
FUNCTIONS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "time": {"type": "object", "properties": {}, "additionalProperties": False},
}
ANSWER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def read(family: str, pieces: list[str], *, reason: str = "stop", is_single: bool = False) -> TextPiece:
    """What becomes of a text that comes in these pieces."""
    reader = ToolReader(find_tool_format(TEMPLATES[family].text), NAMES, is_single)
    read = [reader.read(TextPiece(0, piece)) for piece in pieces] + [reader.read(TextPiece(0, "", (), reason))]
    return join_pieces(read[: next((i for i, piece in enumerate(read) if piece.finish_reason), 0) + 1])


def summarize(piece: TextPiece) -> tuple[str, list[tuple[str, str]], str | None]:
    return piece.text, [(call.name, call.arguments) for call in piece.calls], piece.finish_reason


TIME = {
    "named": "[TOOL_CALLS] time [ARGS] {}",
    "fenced": CALLS["fenced"].replace("weather", "time").replace('{"city": "Köln"}', "{}"),
    "pythonic": "[ time( ) ]",
    "hermes": '<tool_call>{"arguments": {}, "name": "time"}</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "time", "arguments": "{}", "id": "123456789"}]',
    "llama": '{"parameters": {}, "name": "time"}',
}
"""Calls that are written in another way than the template shows."""
WEATHER = ("weather", ARGUMENTS)
PLAIN = ("Hello. ", "", " \n", "a < b [x] {y}", "<tool")
CASES: list[tuple[str, str, str, list[tuple[str, str]], str]] = [
    *((family, call, "", [WEATHER], "tool_calls") for family, call in CALLS.items()),
    *((family, call, "", [("time", "{}")], "tool_calls") for family, call in TIME.items()),
    *((family, f"\n {call} \n", "", [WEATHER], "tool_calls") for family, call in CALLS.items()),
    *((family, text, text, [], "stop") for family in CALLS for text in PLAIN),
    *((family, call.replace("weather", "unknown"), call.replace("weather", "unknown"), [], "stop")
      for family, call in CALLS.items()),
    ("hermes", f"Well. \n{CALLS['hermes']}\n{CALLS['hermes']}", "Well.", [WEATHER] * 2, "tool_calls"),
    ("hermes", f"{CALLS['hermes']}\nSo.", "\nSo.", [WEATHER], "tool_calls"),
    ("hermes", "<tool_call>none</tool_call> x", "<tool_call>none</tool_call> x", [], "stop"),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', [], "stop"),
    ("hermes", CALLS["hermes"].removesuffix("\n</tool_call>"), "", [WEATHER], "tool_calls"),
    ("mistral", f"Hm.{CALLS['mistral'][:-1]}, {CALLS['mistral'][14:]}", "Hm.", [WEATHER] * 2, "tool_calls"),
    ("llama", f"{CALLS['llama']}; {CALLS['llama']}", "", [WEATHER] * 2, "tool_calls"),
    *((family, twice, "", [WEATHER] * 2, "tool_calls") for family, twice in TWICE.items()),
    ("fenced", f"Hm. {CALLS['fenced']}\nSo.", "Hm.\nSo.", [WEATHER], "tool_calls"),
    ("named", "[TOOL_CALLS]weather", "[TOOL_CALLS]weather", [], "stop"),
    ("pythonic", f"[weather(city='{'K' * 500}')]", "", [("weather", f'{{"city": "{"K" * 500}"}}')], "tool_calls"),
    ("pythonic", "[1] says so.", "[1] says so.", [], "stop"),
    ("pythonic", f"{CALLS['pythonic']}\nSo.", "\nSo.", [WEATHER], "tool_calls"),
    ("pythonic", "[weather(city='K)', n=[-1, (True, null)], **x)]", "[weather(city='K)', n=[-1, (True, null)], **x)]",
     [], "stop"),
    ("pythonic", "[weather(city='K)', n=[-1, (True, null)], o={\"a\": 1.5})]", "",
     [("weather", '{"city": "K)", "n": [-1, [true, null]], "o": {"a": 1.5}}')], "tool_calls"),
    ("llama", f"So: {CALLS['llama']}", f"So: {CALLS['llama']}", [], "stop"),
    ("llama", '{"a": [1, "}"]} ', '{"a": [1, "}"]} ', [], "stop"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "}\\"<tool_call>"}}', "",
     [("weather", '{"city": "}\\"<tool_call>"}')], "tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls", "reason"), CASES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_taken_out_of_the_text_in_whatever_pieces_it_comes(
    family: str, text: str, content: str, calls: list[tuple[str, str]], reason: str, size: int
) -> None:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert summarize(read(family, pieces)) == (content, calls, reason)


@given(st.sampled_from(CASES), st.lists(st.integers(1, 400), max_size=8), st.integers(0, 80))
def test_a_text_that_is_cut_anywhere_is_read_the_same_in_any_pieces(case: Any, cuts: list[int], length: int) -> None:
    family, text = case[0], (case[1] * 3)[: 3 * len(case[1]) - length]
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(places)]
    whole = summarize(read(family, [text], reason="length"))
    assert summarize(read(family, pieces, reason="length")) == whole
    assert whole[2] == "length"


def test_a_call_that_is_cut_says_so_and_has_what_was_written_of_its_arguments() -> None:
    cut = read("hermes", [CALLS["hermes"][:56]], reason="length")
    assert summarize(cut) == ("", [("weather", '{"city": "K')], "length")
    ended = read("hermes", [CALLS["hermes"][:56]])
    assert ended.finish_reason == "stop"


@pytest.mark.parametrize("family", CALLS)
def test_one_call_is_the_last_where_only_one_may_be(family: str) -> None:
    assert summarize(read(family, list(TWICE[family]), is_single=True)) == ("", [WEATHER], "tool_calls")


def test_identifiers_differ_and_have_nine_letters_and_digits() -> None:
    (one, two) = read("llama", [f"{CALLS['llama']};{CALLS['llama']}"]).calls
    assert one.identifier != two.identifier
    assert all(len(call.identifier) == 9 and call.identifier.isalnum() for call in (one, two))


def accepts(grammar: str, text: str) -> bool:
    """Whether a text, with its end, matches a grammar."""
    check_grammar(grammar)
    tokenizer = make_tokenizer()
    guide = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=261, eos_token=1)
    matcher = llguidance.LLMatcher(guide, grammar)
    tokens = [*tokenizer.encode(text).ids, 1]
    return int(matcher.validate_tokens(tokens)) == len(tokens)


@pytest.mark.parametrize("family", CALLS)
def test_a_grammar_takes_calls_that_match_their_schemas_and_nothing_else(family: str) -> None:
    tools, call = find_tool_format(TEMPLATES[family].text), CALLS[family]
    wrong = call.replace('"Köln"', "5"), call.replace("weather", "time"), call.replace("weather", "x"), "Hello."
    held = make_call_grammar(tools, FUNCTIONS, specials={}, is_several=True)
    assert accepts(held, call)
    assert not any(accepts(held, text) for text in (*wrong, call[:-1], "", '{"a": 5}'))
    free = make_call_grammar(tools, FUNCTIONS, specials={}, is_several=True, is_free=True)
    assert all(accepts(free, text) for text in (call, "Hello.", "", "<b> x]"))
    assert not any(accepts(free, text) for text in wrong[:-1])
    if tools.opening:
        assert accepts(free, f"Well.\n{call}")
        or_json = make_call_grammar(tools, FUNCTIONS, specials={}, is_several=True, answer=ANSWER, is_free=True)
        assert all(accepts(or_json, text) for text in (call, '{"a": 5}'))
        assert not any(accepts(or_json, text) for text in (*wrong, '{"a": ""}'))
    else:
        with pytest.raises(InputError, match="cannot be told apart"):
            make_call_grammar(tools, FUNCTIONS, specials={}, is_several=True, answer=ANSWER)
    for several in (True, False):
        once = make_call_grammar(tools, FUNCTIONS, specials={}, is_several=several)
        assert accepts(once, TWICE[family]) is (several and family != "llama")


def test_an_opening_that_is_a_special_token_is_held_to_and_read_as_that_token() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    tools = find_tool_format(TEMPLATES["mistral"].text)
    specials = find_special_tokens(tokenizer.get_added_tokens_decoder(), tools)
    assert specials == {"[TOOL_CALLS]": 261}
    special = specials["[TOOL_CALLS]"]
    grammar = make_call_grammar(tools, FUNCTIONS, specials=specials, is_several=False)
    tokens = [*tokenizer.encode(CALLS["mistral"]).ids, 1]
    assert tokens[0] == special
    guide = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=262, eos_token=1)
    assert llguidance.LLMatcher(guide, grammar).validate_tokens(tokens) == len(tokens)
    free = make_call_grammar(tools, FUNCTIONS, specials=specials, is_several=True, is_free=True)
    check_grammar(free)
    for text in (f"Well. {CALLS['mistral']}", CALLS["mistral"], "Well."):
        longer = [*tokenizer.encode(text).ids, 1]
        assert llguidance.LLMatcher(guide, free).validate_tokens(longer) == len(longer)
    request = GenerationRequest(0, (5,), Sampling(99, stop_token_ids=(1,)))
    choice = WrittenChoice.begin(0, tokenizer, request, [], {special: "[TOOL_CALLS]"})
    pieces = [piece for token in tokens[:-1] if (piece := choice.add(TokenEvent(0, 0, (token,))))]
    assert "".join(piece.text for piece in pieces) == CALLS["mistral"]


def test_templates_say_whether_they_read_tools_and_how_calls_are_written() -> None:
    assert all(template.reads_tools for template in TEMPLATES.values())
    assert not ChatTemplate("{% for message in messages %}{{ message.tools }}{% endfor %}", {}).reads_tools
    assert not ChatTemplate("{% set tools = [] %}{{ tools }}", {}).reads_tools
    for text in (OTHER, "{{ tools }}"):
        with pytest.raises(InputError, match="in a format that this server does not read"):
            find_tool_format(text)
    tool = {"type": "function", "function": {"name": "weather", "parameters": FUNCTIONS["weather"]}}
    for family, template in TEMPLATES.items():
        message = {"role": "user", "content": "?"}
        assert json.dumps(tool["function"])[1:20] in template.render([message], tools=[tool]).replace("\n", "") or (
            family == "llama"
        )
        assert "weather" not in template.render([message])
