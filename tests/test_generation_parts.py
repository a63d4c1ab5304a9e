"""From tokens to text, stop strings, admission to a cache by blocks, and the fields of requests for text."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from chat_models import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from laconic.errors import DeadlineExceeded, InputError, NotReady, Overloaded
from laconic.runtimes.generator import BlockLedger, GenerationRequest, Sampling, TokenEvent
from serve.generation.admission import Admission, QueueOverflow
from serve.generation.detokenizer import Detokenizer, StopMatcher
from serve.generation.written_choice import TextPiece, WrittenChoice
from serve.openai.chat_request import ChatRequest
from serve.openai.completion_request import CompletionRequest
from serve.openai.text_answer import describe_token
from serve.requests.public_errors import InvalidParameter

BYTES = make_tokenizer()
WORDS = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2, "?": 3}, unk_token="?"))
WORDS.decoder = decoders.Metaspace()


def decode(tokenizer: Tokenizer, tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*map(detokenizer.add, tokens), detokenizer.finish()]


@given(st.text(max_size=30), st.text(max_size=5))
def test_the_pieces_of_a_text_are_the_text_and_no_piece_has_a_part_of_a_character(text: str, prompt: str) -> None:
    pieces = decode(BYTES, BYTES.encode(text).ids, BYTES.encode(prompt).ids)
    assert "".join(pieces) == text
    assert all(piece.isprintable() or piece in text for piece in pieces)


def test_characters_of_several_tokens_come_when_they_are_whole() -> None:
    pieces = decode(BYTES, BYTES.encode("a😀漢").ids)
    assert pieces == ["a", "", "", "", "😀", "", "", "漢", ""]
    broken = decode(BYTES, [*BYTES.encode("😀").ids[:3], *BYTES.encode("b").ids])
    assert broken == ["", "", "", "\N{REPLACEMENT CHARACTER}b", ""]
    assert decode(BYTES, BYTES.encode("😀").ids[:2])[-1] == "\N{REPLACEMENT CHARACTER}"


def test_a_word_behind_a_prompt_begins_with_its_space() -> None:
    assert decode(WORDS, [0, 1, 2]) == ["the", " cat", "s", ""]
    assert decode(WORDS, [0, 1, 2], prompt=[1]) == [" the", " cat", "s", ""]


@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4))
def test_what_is_shown_ends_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher, text, shown, is_stopped = StopMatcher(stops), "", "", False
    for piece in pieces:
        text += piece
        more, is_stopped = matcher.add(piece)
        shown += more
        if is_stopped:
            break
        assert not any(stop in shown for stop in stops)
    else:
        shown += matcher.finish()
    ends = [text.find(stop) for stop in stops if stop in text]
    assert is_stopped == bool(ends)
    assert shown == (text[: min(ends)] if ends else text)


def write(text: str, *, stops: Sequence[str] = (), end: int | None = None, size: int = 1) -> list[TextPiece]:
    """The pieces of a choice that writes a text, so many tokens a step."""
    tokens = [*BYTES.encode(text).ids, *([] if end is None else [end])]
    request = GenerationRequest(0, (), Sampling(len(tokens), stop_token_ids=(1,), logprobs=True))
    choice = WrittenChoice.begin(0, BYTES, request, stops, {})
    pieces = []
    for start in range(0, len(tokens), size):
        step = tuple(tokens[start : start + size])
        reason = None if start + size < len(tokens) else "stop" if end == 1 else "length"
        piece = choice.add(TokenEvent(0, 0, step, tuple(-0.5 for _ in step), reason))
        pieces += [] if piece is None else [piece]
        if choice.is_finished:
            break
    assert choice.tokens == sum(len(piece.logprobs) for piece in pieces) or pieces[-1].finish_reason == "stop"
    return pieces


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_logprobs_of_a_choice_are_those_of_the_tokens_that_are_shown(size: int) -> None:
    for text, stops, end, shown, reason, tokens in (
        ("a😀b", (), None, "a😀b", "length", 6),
        ("a😀b", (), 1, "a😀b", "stop", 6),
        ("ab STOP c", ("STOP",), None, "ab ", "stop", 3),
        ("ab ST", ("STOP",), 1, "ab ST", "stop", 5),
        ("a😀b", ("😀",), None, "a", "stop", 1),
    ):
        pieces = write(text, stops=stops, end=end, size=size)
        assert "".join(piece.text for piece in pieces) == shown
        assert pieces[-1].finish_reason == reason
        assert sum(len(piece.logprobs) for piece in pieces) == tokens
        assert all(piece.finish_reason is None for piece in pieces[:-1])


def test_a_part_of_a_character_is_described_by_its_bytes() -> None:
    emoji = [describe_token(BYTES, token)[1] for token in BYTES.encode("😀").ids]
    assert [byte for each in emoji for byte in each or ()] == list("😀".encode())
    assert describe_token(BYTES, BYTES.encode("a").ids[0]) == ("a", [97])
    pieces = Tokenizer(models.WordLevel({"<0xF0>": 0, "?": 1}, unk_token="?"))
    pieces.decoder = decoders.ByteFallback()
    assert describe_token(pieces, 0) == ("\N{REPLACEMENT CHARACTER}", [0xF0])


def make_request(number: int, blocks: int, n: int = 1) -> GenerationRequest:
    return GenerationRequest(number, (1,) * 4, Sampling(8 * blocks - 4, n=n))


def test_blocks_are_held_from_the_beginning_of_a_choice_to_its_end() -> None:
    ledger = BlockLedger(6, 8)
    assert ledger.count(GenerationRequest(0, (1,) * 5, Sampling(4))) == 2
    ledger.hold(make_request(1, 2, n=2))
    assert ledger.used == 4
    with pytest.raises(Overloaded):
        ledger.hold(make_request(2, 3))
    ledger.release(1, 0)
    ledger.release(1, 0)
    ledger.hold(make_request(2, 3))
    assert ledger.used == 5
    with pytest.raises(InputError, match="exceed the cache of 48 tokens"):
        ledger.check(make_request(3, 7))
    with pytest.raises(InputError, match="for each of 4 choices exceed"):
        ledger.check(make_request(3, 2, n=4))


def test_requests_wait_in_turn_and_one_that_leaves_makes_room() -> None:
    async def scenario() -> list[Any]:
        admission = Admission(BlockLedger(4, 8), most=3)
        seen: list[Any] = []

        async def enter(number: int, blocks: int, timeout: float = 5.0) -> None:
            try:
                await admission.enter(make_request(number, blocks), timeout)
                seen.append(number)
            except (DeadlineExceeded, QueueOverflow, NotReady) as error:
                seen.append((number, type(error)))

        await enter(1, 3)
        tasks = [asyncio.create_task(enter(2, 4)), asyncio.create_task(enter(3, 1))]
        await asyncio.sleep(0)
        assert (seen, admission.waiting) == ([1], 2)  # 3 would fit, and does not overtake
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        assert (seen, admission.ledger.used) == ([1, 3], 4)
        tasks += [asyncio.create_task(enter(number, 1, timeout=0.05 if number == 4 else 5.0)) for number in (4, 5, 6)]
        await asyncio.sleep(0)
        await enter(7, 1)  # three wait already
        await asyncio.sleep(0.1)
        admission.release(1, 0, seconds=2.0)
        await asyncio.sleep(0)
        admission.close()
        tasks.append(asyncio.create_task(enter(8, 1)))
        await asyncio.sleep(0)
        admission.reopen()
        await asyncio.sleep(0)
        assert admission.ledger.used == 1
        admission.close()
        tasks.append(asyncio.create_task(enter(9, 1)))
        await asyncio.sleep(0)
        admission.fail(NotReady("it is not started again"))
        await asyncio.gather(*tasks, return_exceptions=True)
        return seen

    assert asyncio.run(scenario()) == [1, 3, (7, QueueOverflow), (4, DeadlineExceeded), 5, 6, 8, (9, NotReady)]


def list_turns(requests: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The order in which requests of keys begin, each with so many blocks, where all wait and one holds the cache."""

    async def scenario() -> list[tuple[str, int]]:
        admission = Admission(BlockLedger(4, 8), most=100)
        admission.ledger.hold(make_request(0, 4))
        order: list[tuple[str, int]] = []

        async def enter(number: int, key: str, blocks: int) -> None:
            await admission.enter(make_request(number, blocks), 5.0, key)
            order.append((key, blocks))
            await asyncio.sleep(0)
            admission.release(number, 0)

        tasks = [asyncio.create_task(enter(number, *each)) for number, each in enumerate(requests, 1)]
        await asyncio.sleep(0)
        admission.release(0, 0)
        await asyncio.gather(*tasks)
        assert admission.ledger.used == 0
        return order

    return asyncio.run(scenario())


def test_keys_take_turns_by_the_blocks_that_their_requests_hold() -> None:
    assert list_turns([("a", 4)] * 3 + [("b", 4)] * 2) == [("a", 4), ("b", 4), ("a", 4), ("b", 4), ("a", 4)]
    short = list_turns([("a", 4)] * 2 + [("b", 1)] * 8)
    assert short == [("a", 4), *[("b", 1)] * 4, ("a", 4), *[("b", 1)] * 4]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), min_size=1, max_size=30))
def test_no_key_waits_for_more_than_one_request_beyond_its_share(requests: list[tuple[str, int]]) -> None:
    order = list_turns(requests)
    assert sorted(order) == sorted(requests)
    for key in "abc":
        assert [each for each in order if each[0] == key] == [each for each in requests if each[0] == key]
    waiting = Counter(key for key, _ in requests)
    held: Counter[str] = Counter()
    for key, blocks in order:
        others = [held[other] for other, left in waiting.items() if left]
        assert held[key] <= min(others) + 4, order
        held[key] += blocks
        waiting[key] -= 1


def test_the_wait_that_is_told_grows_with_what_waits() -> None:
    async def scenario() -> list[int]:
        admission = Admission(BlockLedger(4, 8), most=0)
        admission.ledger.hold(make_request(0, 4))
        waits = []
        for seconds in (1.0, 100.0, 1e6):
            admission.release(99, 0, seconds)
            with pytest.raises(QueueOverflow) as refused:
                await admission.enter(make_request(1, 4), 1.0)
            waits.append(refused.value.retry_after)
        return waits

    assert asyncio.run(scenario()) == [1, 21, 60]


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BROKEN_CALL = CALL | {"function": {"name": "f", "arguments": "{"}}
SCHEMA = {"name": "a", "schema": {}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


HELLO = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]}
ONCE = {"model": "chat", "prompt": "Once"}


@pytest.mark.parametrize(
    ("changes", "parameter", "message"),
    [
        ({"foo": 1}, "foo", "unknown parameter"),
        ({"model": None}, "model", "does not fit"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "Hello"}, "messages", "valid list"),
        ({"messages": [{"role": "user"}]}, "messages", "message 1 has no 'content'"),
        ({"messages": [{"role": "tool", "content": "5"}]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "user", "content": "5", "tool_call_id": "a"}]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "messages", "not the assistant's"),
        ({"messages": [{"role": "assistant", "tool_calls": [BROKEN_CALL]}]}, "messages", "no JSON object"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "does not fit"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": []}]}, "messages", "does not fit"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 1.5}, "n", "does not fit"),
        ({"n": True}, "n", "valid integer"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "does not fit"),
        ({"seed": 1 << 70}, "seed", "does not fit"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "older name"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "less than or equal to 100"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "pattern"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "pattern"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        ({"presence_penalty": -2.5}, "presence_penalty", "greater than or equal to -2"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "Set 'logprobs' to true"),
        ({"response_format": {"type": "xml"}}, "response_format", "does not fit"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "text", "json_schema": SCHEMA}}, "response_format", "type 'json_schema' alone"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "Field required"),
        ({"tools": [{"type": "function"}]}, "tools", "Field required"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools", "does not fit"),
        ({"tools": [tool("a b")]}, "tools", "pattern"),
        ({"tools": [tool("a"), tool("a")]}, "tools", "two functions of one name"),
        ({"tool_choice": "required"}, "tool_choice", "no 'tools'"),
        ({"tool_choice": "some"}, "tool_choice", "does not fit"),
        ({"tools": [tool("a")], "tool_choice": tool("b")}, "tool_choice", "not in 'tools'"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "streams alone"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options", "does not fit"),
    ],
)
def test_a_chat_that_does_not_fit_is_refused_with_the_name_of_the_field(
    changes: dict[str, Any], parameter: str, message: str
) -> None:
    with pytest.raises(InvalidParameter, match=message) as refused:
        ChatRequest.read(HELLO | changes)
    assert refused.value.parameter == parameter


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_text_that_does_not_fit_is_refused_with_the_name_of_the_field(
    changes: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(InvalidParameter) as refused:
        CompletionRequest.read(ONCE | changes)
    assert refused.value.parameter == parameter


def test_fields_that_ask_for_nothing_are_taken() -> None:
    nothing: dict[str, Any] = dict.fromkeys(ChatRequest.model_fields.keys() - HELLO.keys())
    assert ChatRequest.read(HELLO | nothing).choices == 1
    asked = {
        "logit_bias": {},
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
    }
    assert ChatRequest.read(HELLO | asked).most_tokens is None
    assert CompletionRequest.read(ONCE | {"echo": False, "best_of": 2, "n": 2, "suffix": ""}).choices == 2
    with pytest.raises(InputError, match="must be an object"):
        ChatRequest.read([])
    with pytest.raises(InvalidParameter, match="'messages' is missing"):
        ChatRequest.read({"model": "chat"})


def test_functions_reach_the_template_as_they_are_given() -> None:
    given = {"name": "f", "parameters": {"properties": {"a": {"default": None}}}, "description": None}
    (tool,) = ChatRequest.read(HELLO | {"tools": [{"type": "function", "function": given}]}).tools or ()
    assert tool.function.describe() == {"name": "f", "parameters": given["parameters"]}
