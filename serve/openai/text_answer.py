"""Answers to requests for text in OpenAI's API: whole, and as the chunks of a stream."""

import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from tokenizers import Tokenizer

from serve.generation.detokenizer import BROKEN
from serve.generation.text_writer import WrittenAnswer
from serve.generation.written_choice import CallPart, TextPiece, TokenLogprob
from serve.openai.text_request import TextRequest

Json = dict[str, Any]

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""The name of a byte's token in a vocabulary of SentencePiece."""
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))
}
"""The bytes by the letters that stand for them in a byte-level vocabulary, GPT-2's and those after it."""


class AnswerFormat(ABC):
    """The shape of one answer to a request."""

    prefix: ClassVar[str]
    """What the identifier of an answer begins with."""
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    """The kinds of a whole answer, and of a chunk."""

    def __init__(self, request: TextRequest, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.has_logprobs = request.has_logprobs
        self.has_usage = request.has_usage
        self.has_calls = request.has_calls
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": request.model}

    @abstractmethod
    def format_choice(self, choice: TextPiece) -> Json:
        """Format a whole choice."""

    @abstractmethod
    def format_delta(self, piece: TextPiece) -> Json:
        """Format what a choice has more."""

    def opening(self, choices: int) -> Iterable[Json]:
        """Return the chunks that begin a stream."""
        return ()

    def whole(self, choices: Sequence[TextPiece], usage: Json) -> Json:
        """Return a whole answer."""
        formatted = [self.format_choice(choice) for choice in choices]
        return {**self._head, "object": self.whole_kind, "choices": formatted, "usage": usage}

    def chunk(self, choices: Sequence[Json], usage: Json | None = None) -> Json:
        """Return a chunk. usage: only in the last."""
        used = {"usage": usage} if self.has_usage else {}
        return {**self._head, "object": self.chunk_kind, "choices": choices, **used}

    def chunks(self, piece: TextPiece) -> Iterable[Json]:
        """Return the chunks of a piece: its text, and then why the choice ended, if it did."""
        if piece.text or piece.logprobs or piece.calls:
            shown = piece if piece.finish_reason is None else replace(piece, finish_reason=None, stop_token=None)
            yield self.chunk([self.format_delta(shown)])
        if piece.finish_reason is not None:
            end = TextPiece(piece.choice, "", finish_reason=piece.finish_reason, stop_token=piece.stop_token)
            yield self.chunk([self.format_delta(end)])


class ChatFormat(AnswerFormat):
    """The shape of an answer to a chat."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, choices: int) -> Iterable[Json]:
        for index in range(choices):
            delta = {"role": "assistant", "content": None if self.has_calls else ""}
            yield self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def format_choice(self, choice: TextPiece) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            calls = [format_call(part) for part in choice.calls]
            message |= {"content": choice.text or None, "tool_calls": calls}
        return {
            "index": choice.choice,
            "message": message,
            "logprobs": self._format_logprobs(choice.logprobs) if self.has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def format_delta(self, piece: TextPiece) -> Json:
        calls = [{"index": part.index, **format_call(part)} for part in piece.calls]
        return {
            "index": piece.choice,
            "delta": ({"content": piece.text} if piece.text else {}) | ({"tool_calls": calls} if calls else {}),
            "logprobs": self._format_logprobs(piece.logprobs) if piece.logprobs else None,
            "finish_reason": piece.finish_reason,
        }

    def _format_logprobs(self, logprobs: Sequence[TokenLogprob]) -> Json:
        content = [
            self._format_token(entry.token, entry.logprob)
            | {"top_logprobs": [self._format_token(*likely) for likely in entry.likeliest]}
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def _format_token(self, token: int, logprob: float | None) -> Json:
        text, data = describe_token(self.tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": data}


class CompletionFormat(AnswerFormat):
    """The shape of the continuation of a text. Its scores are of all tokens, that which ended the choice included, as
    in vLLM: lm-evaluation-harness takes the last one for what was written behind the prompt."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def format_choice(self, choice: TextPiece) -> Json:
        scored = choice.logprobs if choice.stop_token is None else [*choice.logprobs, choice.stop_token]
        return {
            "index": choice.choice,
            "text": choice.text,
            "logprobs": self._format_logprobs(scored) if self.has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def format_delta(self, piece: TextPiece) -> Json:
        return self.format_choice(piece)

    def _format_logprobs(self, logprobs: Sequence[TokenLogprob]) -> Json:
        name = partial(name_token, self.tokenizer)
        likeliest = [
            None
            if entry.logprob is None
            else {name(token): logprob for token, logprob in (*entry.likeliest, (entry.token, entry.logprob))}
            for entry in logprobs
        ]
        return {
            "tokens": [name(entry.token) for entry in logprobs],
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": likeliest if any(entry.likeliest for entry in logprobs) else None,
            "text_offset": [entry.start for entry in logprobs],
        }


def format_call(part: CallPart) -> Json:
    """Format a call of a function, or a part of one."""
    head = {"id": part.identifier, "type": "function"} if part.name else {}
    named = {"name": part.name} if part.name else {}
    return {**head, "function": {**named, "arguments": part.arguments}}


def format_usage(answer: WrittenAnswer) -> Json:
    """Format the tokens of the prompts, and of all choices so far."""
    prompt, written, cached = answer.prompt_tokens, answer.tokens, answer.cached_tokens
    usage: Json = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
    return usage if cached is None else usage | {"prompt_tokens_details": {"cached_tokens": cached}}


def name_token(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as text; a part of a character as OpenAI names it, `bytes:\\xf0`, so that no two tokens share a
    name."""
    text, data = describe_token(tokenizer, token)
    if BROKEN not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) if data else f"token:{token}"


def describe_token(tokenizer: Tokenizer, token: int) -> tuple[str, list[int] | None]:
    """Return a token as text, and its bytes. Those of a part of a character, which text cannot hold, are found by the
    token's name in the two kinds of vocabularies that have such tokens; None in any other."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    if BROKEN not in text:
        return text, list(text.encode())
    name = tokenizer.id_to_token(token) or ""
    if match := BYTE.fullmatch(name):
        return text, [int(match[1], 16)]
    return text, [BYTES[letter] for letter in name] if set(name) <= BYTES.keys() else None
