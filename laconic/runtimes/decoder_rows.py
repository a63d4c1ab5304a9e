"""What a stepped decoder writes and reads: the rows of its batch, and the prompts in front of it."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from laconic.arrays import Array, Arrays
from laconic.runtimes.draft_model import DraftModel, ModelDrafts
from laconic.runtimes.draft_source import DraftSource
from laconic.runtimes.generator import GenerationRequest, TokenEvent
from laconic.runtimes.grammar import GrammarMatch
from laconic.runtimes.low_rank_adapter import LowRankAdapter
from laconic.runtimes.prompt_lookup import PromptLookup
from laconic.runtimes.source_encoder import SourceEncoder
from laconic.runtimes.token_chooser import ChosenToken, TokenChooser, measure_token
from laconic.tasks.generation_settings import GenerationSettings


@dataclass
class DecoderRow:
    """A choice of a request. source: of its request, as the encoder made it. length: its tokens in the cache. token:
    the one that is read next. text: its number in an engine whose cache numbers its texts. sources: what
    drafts its tokens while it is alone, first the one that is asked first; drafting: of these the one that did last.
    adapter: which it is written with, to its end; None for the base alone."""

    request: GenerationRequest
    index: int
    chooser: TokenChooser
    source: Mapping[str, Array] = field(default_factory=dict)
    length: int = 0
    token: int = 0
    text: int = 0
    sources: Sequence[DraftSource] = ()
    drafting: DraftSource | None = None
    adapter: LowRankAdapter | None = None
    is_cancelled: bool = False
    is_done: bool = False

    @property
    def adapter_digest(self) -> bytes:
        """The digest of its adapter; empty for the base alone."""
        return b"" if self.adapter is None else self.adapter.digest

    def draft(self, model: DraftModel | None = None) -> list[int]:
        """Draft the next tokens, from the text itself or else by a draft model."""
        tokens = self.chooser.tokens
        lookup = (PromptLookup(tokens),)
        self.sources = self.sources or (lookup if model is None else (*lookup, ModelDrafts(tokens, model)))
        self.drafting = None
        for source in self.sources:
            if draft := source.propose(self.chooser.left - 1):
                self.drafting = source
                return draft
        return []

    def choose(self, logits: Array, draft: Sequence[int] = ()) -> TokenEvent:
        """Choose the next token, with which the row may end, and one more behind each token of the draft that was
        chosen too: the same tokens as without, however they are chosen. logits: [1 + draft, vocabulary]."""
        chosen: list[ChosenToken] = []
        for scores, drafted in zip(logits, (*draft, None), strict=True):
            chosen.append(self.chooser.choose(scores))
            if chosen[-1].finish_reason is not None or chosen[-1].token != drafted:
                break
        accepted = len(chosen) - 1
        for source in self.sources:
            source.learn(*(len(draft), accepted) if source is self.drafting else (0, 0))
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


def make_rows(
    request: GenerationRequest,
    vocabulary: int,
    tokens: Sequence[int],
    match: GrammarMatch | None,
    settings: GenerationSettings | None,
    adapter: LowRankAdapter | None,
) -> list[DecoderRow]:
    """Make the rows of a request, one for each choice; the arguments are those of a `TokenChooser` and of a row."""
    matches = [match and match.copy() for _ in range(request.sampling.n)]
    choosers = [TokenChooser(request, index, vocabulary, tokens, each, settings) for index, each in enumerate(matches)]
    return [DecoderRow(request, index, each, adapter=adapter) for index, each in enumerate(choosers)]


@dataclass
class PromptReading:
    """A prompt that is read, or waits to be: once, whatever the number of choices. encoding: what makes the source;
    None before it has begun. source: as the encoder made it. past: of the tokens read so far; is_past_lent: whether it
    is in memory of the engine. texts: the numbers of its choices in an engine whose cache has numbers for texts, the
    first that of the prompt. scores: of its tokens behind the first, as events have them. cached: the number of tokens
    that the prefix cache had."""

    request: GenerationRequest
    tokens: tuple[int, ...]
    rows: list[DecoderRow]
    encoding: Future[Arrays] | None = None
    source: Mapping[str, Array] = field(default_factory=dict)
    past: list[Array] = field(default_factory=list)
    is_past_lent: bool = False
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

    def keep_past(self) -> None:
        """Copy the past out of the memory of the engine, which the reading of other prompts writes to."""
        if self.is_past_lent:
            self.past, self.is_past_lent = [array.copy() for array in self.past], False

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
