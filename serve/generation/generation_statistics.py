"""Counters of a model that writes."""

from dataclasses import dataclass, field

from serve.batching.buckets import Buckets


@dataclass
class GenerationStatistics:
    """Counters of one model that writes; they only grow. From the event loop only. Times in nanoseconds.

    first_token: from a request to the first token of each of its choices. between_tokens: from one token of a choice to
    the next. prompt_tokens, generated_tokens: what the requests that began had, and what was written, stop tokens
    included. cached_tokens: of the prompts, those that a prefix cache had, where the engine says so.
    drafted_tokens: those that were proposed for a step before the model chose; accepted_tokens: those of them that it
    chose.
    """

    first_token: Buckets = field(default_factory=Buckets)
    between_tokens: Buckets = field(default_factory=Buckets)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
