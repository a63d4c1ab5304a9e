"""One choice of an answer as it is written: its tokens, what of its text can be shown, and why it ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from tokenizers import Tokenizer

from laconic.runtimes.generator import GenerationRequest, TokenEvent
from serve.generation.detokenizer import Detokenizer, StopMatcher


@dataclass(frozen=True)
class TokenLogprob:
    """A token of a text with the logarithm of its probability, which the first of a prompt has not. start: where in the
    text its characters begin. likeliest: the likeliest tokens in its place with theirs, where they were asked for."""

    token: int
    logprob: float | None
    start: int
    likeliest: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class CallPart:
    """A part of a call of a function. index: of the call in its choice. arguments: what its JSON has more. identifier,
    name: with the first part alone."""

    index: int
    arguments: str
    identifier: str = ""
    name: str = ""


@dataclass(frozen=True)
class TextPiece:
    """What can be shown of a choice after a step. logprobs: of the tokens that begin within the text. finish_reason:
    `stop` or `length` with the last piece, `tool_calls` where the choice calls functions. calls: what these have
    more. stop_token: that of the model with its score, where it ended the choice and scores were asked for."""

    choice: int
    text: str
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    calls: Sequence[CallPart] = ()
    stop_token: TokenLogprob | None = None

    def shift(self, start: int) -> Self:
        """Return the piece with the places of its tokens counted from so many characters earlier."""
        logprobs = [replace(scored, start=scored.start + start) for scored in self.logprobs]
        stop = self.stop_token and replace(self.stop_token, start=self.stop_token.start + start)
        return replace(self, logprobs=logprobs, stop_token=stop)


def join_pieces(pieces: Sequence[TextPiece]) -> TextPiece:
    """Join all pieces of a choice."""
    calls: dict[int, CallPart] = {}
    for part in (part for piece in pieces for part in piece.calls):
        before = calls.get(part.index)
        calls[part.index] = part if before is None else replace(before, arguments=before.arguments + part.arguments)
    return TextPiece(
        pieces[0].choice,
        "".join(piece.text for piece in pieces),
        [logprob for piece in pieces for logprob in piece.logprobs],
        pieces[-1].finish_reason,
        list(calls.values()),
        pieces[-1].stop_token,
    )


def score_prompt(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[tuple[float, Sequence[tuple[int, float]]]]
) -> list[TokenLogprob]:
    """Return the tokens of a prompt with their scores, of which the first has none."""
    detokenizer, start, scored = Detokenizer(tokenizer), 0, []
    for token, (logprob, likeliest) in zip(prompt, [(None, ()), *scores], strict=True):
        scored.append(TokenLogprob(token, logprob, start, likeliest))
        start += len(detokenizer.add(token))
    return scored


@dataclass
class WrittenChoice:
    """A choice that is being written.

    tokens: the number that were written up to its end, stop tokens and those of a stop string included.
    prompt_scores: as those of the first event.
    """

    index: int
    detokenizer: Detokenizer
    matcher: StopMatcher
    stop_token_ids: frozenset[int]
    tokens: int = 0
    is_finished: bool = False
    prompt_scores: Sequence[tuple[float, Sequence[tuple[int, float]]]] = ()
    _decoded: int = 0
    _shown: int = 0
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _stop_token: TokenLogprob | None = None

    @classmethod
    def begin(
        cls,
        index: int,
        tokenizer: Tokenizer,
        request: GenerationRequest,
        stops: Sequence[str],
        shown: Mapping[int, str],
    ) -> Self:
        """Begin a choice of a request. index: among all choices of the answer. stops: strings that end it, and are not
        shown. shown: special tokens that are text."""
        stop_tokens = frozenset(request.sampling.stop_token_ids)
        return cls(index, Detokenizer(tokenizer, request.prompt, shown), StopMatcher(stops), stop_tokens)

    def add(self, event: TokenEvent) -> TextPiece | None:
        """Add what a step wrote; return what can be shown, None where nothing can yet."""
        text = ""
        self.prompt_scores = self.prompt_scores or event.prompt_scores
        for place, token in enumerate(event.token_ids):
            self.tokens += 1
            if event.logprobs:
                likeliest = event.top_logprobs[place] if event.top_logprobs else ()
                self._logprobs.append(TokenLogprob(token, event.logprobs[place], self._decoded, likeliest))
            if token in self.stop_token_ids:
                self._stop_token = self._logprobs.pop() if event.logprobs else None
                break
            decoded = self.detokenizer.add(token)
            self._decoded += len(decoded)
            piece, is_stopped = self.matcher.add(decoded)
            text += piece
            if is_stopped:
                return self._finish(text, "stop")
        if event.finish_reason is None:
            return self._show(text) if text else None
        piece, is_stopped = self.matcher.add(self.detokenizer.finish())
        text += piece
        if is_stopped:
            return self._finish(text, "stop")
        text += self.matcher.finish()
        return self._finish(text, "stop" if event.finish_reason == "stop" else "length", is_whole=True)

    def _show(self, text: str) -> TextPiece:
        self._shown += len(text)
        shown = [each for each in self._logprobs if each.start < self._shown]
        self._logprobs = self._logprobs[len(shown) :]
        return TextPiece(self.index, text, shown)

    def _finish(self, text: str, reason: str, *, is_whole: bool = False) -> TextPiece:
        """End the choice. is_whole: whether all of its text is shown, so that all of its tokens are too."""
        self.is_finished = True
        piece = self._show(text)
        logprobs = [*piece.logprobs, *(self._logprobs if is_whole else ())]
        return TextPiece(self.index, text, logprobs, reason, stop_token=self._stop_token)
