"""What a stepped decoder writes and reads: the rows of its batch, and the prompts in front of it."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from laconic.arrays import Array, Arrays
from laconic.runtimes.generator import GenerationRequest, TokenEvent
from laconic.runtimes.low_rank_adapter import LowRankAdapter
from laconic.runtimes.prompt_lookup import PromptLookup
from laconic.runtimes.source_encoder import SourceEncoder
from laconic.runtimes.token_chooser import ChosenToken, TokenChooser, measure_token


@dataclass
class DecoderRow:
    """A choice of a request. source: of its request, as the encoder made it. length: its tokens in the cache. token:
    the one that is read next. text: its number in an engine whose cache numbers its texts. lookup: drafts its tokens
    while it is alone. adapter: which it is written with, to its end; None for the base alone."""

    request: GenerationRequest
    index: int
    chooser: TokenChooser
    source: Mapping[str, Array] = field(default_factory=dict)
    length: int = 0
    token: int = 0
    text: int = 0
    lookup: PromptLookup | None = None
    adapter: LowRankAdapter | None = None
    is_cancelled: bool = False
    is_done: bool = False

    @property
    def adapter_digest(self) -> bytes:
        """The digest of its adapter; empty for the base alone."""
        return b"" if self.adapter is None else self.adapter.digest

    def draft(self) -> list[int]:
        """Draft the next tokens, from the text itself."""
        self.lookup = self.lookup or PromptLookup(self.chooser.tokens)
        return self.lookup.propose(self.chooser.left - 1)

    def choose(self, logits: Array, draft: Sequence[int] = ()) -> TokenEvent:
        """Choose the next token, with which the row may end, and one more behind each token of the draft that was
        chosen too: the same tokens as without, however they are chosen. logits: [1 + draft, vocabulary]."""
        chosen: list[ChosenToken] = []
        for scores, drafted in zip(logits, (*draft, None), strict=True):
            chosen.append(self.chooser.choose(scores))
            if chosen[-1].finish_reason is not None or chosen[-1].token != drafted:
                break
        accepted = len(chosen) - 1
        if self.lookup is not None:
            self.lookup.learn(len(draft), accepted)
        tokens = tuple(each.token for each in chosen if each.token is not None)
        self.token = tokens[-1] if tokens else self.token
        sampling = self.request.sampling
        return TokenEvent(
            self.request.id,
            self.index,
            tokens,
            tuple(each.logprob for each in chosen[: len(tokens)]) if sampling.logprobs else (),
            chosen[-1].finish_reason,
            tuple(each.likeliest for each in chosen[: len(tokens)]) if sampling.top_logprobs else (),
            drafted=len(draft),
            accepted=accepted,
        )


@dataclass
class PromptReading:
    """A prompt that is read, or waits to be: once, whatever the number of choices. encoding: what makes the source;
    None before it has begun. source: as the encoder made it. past: of the tokens read so far. texts: the numbers of its
    choices in an engine whose cache has numbers for texts, the first that of the prompt. scores: of its tokens behind
    the first, as events have them. cached: the number of tokens that the prefix cache had."""

    request: GenerationRequest
    tokens: tuple[int, ...]
    rows: list[DecoderRow]
    encoding: Future[Arrays] | None = None
    source: Mapping[str, Array] = field(default_factory=dict)
    past: list[Array] = field(default_factory=list)
    texts: list[int] = field(default_factory=list)
    scores: list[tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=list)
    read: int = 0
    cached: int = 0

    @property
    def left(self) -> int:
        """Tokens that are to be read."""
        return len(self.tokens) - self.read

    def encode(self, encoder: SourceEncoder, pause: float) -> bool:
        """Have the source encoded, and return whether it is. pause: seconds to wait for it."""
        source = self.request.source
        self.encoding = self.encoding or encoder.begin(None if source is None else source.arrays)
        if not wait([self.encoding], pause).done:
            return False
        self.source = self.encoding.result()
        return True

    def drop_done(self) -> bool:
        """Drop the choices that are done, and return whether any is left. Without one, a source that waits to be
        encoded never is."""
        self.rows = [row for row in self.rows if not row.is_done]
        if not self.rows and self.encoding is not None:
            self.encoding.cancel()
        return bool(self.rows)

    def score(self, logits: Array) -> None:
        """Score the tokens that follow those just read. logits: of these, [tokens, vocabulary]."""
        following = self.tokens[self.read - len(logits) + 1 : self.read + 1]
        pairs = zip(logits, following, strict=False)  # nothing follows the last one
        self.scores += [measure_token(row, token, self.request.sampling) for row, token in pairs]


@dataclass(frozen=True)
class JoiningRow:
    """A row that joins the batch, and the cache that it has up to now. place: of the row in that cache."""

    row: DecoderRow
    past: list[Array]
    place: int
