"""What a stepped decoder writes and reads: the rows of its batch, and the prompts in front of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from laconic.arrays import Array
from laconic.runtimes.generator import GenerationRequest
from laconic.runtimes.low_rank_adapter import LowRankAdapter
from laconic.runtimes.prompt_lookup import PromptLookup
from laconic.runtimes.token_chooser import TokenChooser, measure_token


@dataclass
class DecoderRow:
    """A choice of a request. source: of its request, as the encoder made it. length: its tokens in the cache. token:
    the one that is read next. lookup: drafts its tokens while it is alone. adapter: which it is written with, to its
    end; None for the base alone."""

    request: GenerationRequest
    index: int
    chooser: TokenChooser
    source: Mapping[str, Array] = field(default_factory=dict)
    length: int = 0
    token: int = 0
    lookup: PromptLookup | None = None
    adapter: LowRankAdapter | None = None
    is_cancelled: bool = False
    is_done: bool = False


@dataclass
class PromptReading:
    """A prompt that is read, or waits to be: once, whatever the number of choices. source: as the encoder made it.
    past: of the tokens read so far. scores: of its tokens behind the first, as events have them. cached: the number
    of tokens that the prefix cache had."""

    request: GenerationRequest
    tokens: tuple[int, ...]
    rows: list[DecoderRow]
    source: Mapping[str, Array] = field(default_factory=dict)
    past: list[Array] = field(default_factory=list)
    scores: list[tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=list)
    read: int = 0
    cached: int = 0

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
