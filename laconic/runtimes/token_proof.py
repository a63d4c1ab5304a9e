"""Whether an engine that writes chooses the tokens that the artifact says: its golden outputs, token by token."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from laconic.errors import RuntimeFailure
from laconic.runtimes.generator import EncoderInputs, GenerationRequest, Generator, GoldenToken, Sampling

LEAST_AGREEMENT = 0.9
"""The least share of golden tokens that an engine must choose, beside one that may differ however few there are: the
scores of two tokens may be as good as equal, and then decide otherwise in another arithmetic."""


def count_differing(generator: Generator, golden: Sequence[GoldenToken]) -> int:
    """Count the golden tokens that an engine, which nobody else uses meanwhile, does not find the likeliest; by its
    scores where it gives them, as settings of the model may bind its choice. Raises RuntimeFailure."""
    sampling = Sampling(1, top_logprobs=int(generator.gives_scores))
    waiting = deque(
        GenerationRequest(number, each.prompt, sampling, measure_source(each.source, generator))
        for number, each in enumerate(golden)
    )
    differing = 0
    while waiting or not generator.is_idle:
        while waiting and generator.ledger.has_room(waiting[0]):
            generator.add(waiting.popleft())
        if generator.is_idle:
            raise RuntimeFailure("the cache is too small for a golden output")
        for event in generator.step():
            token = event.top_logprobs[0][0][0] if event.top_logprobs else event.token_ids[0]
            differing += token != golden[event.request_id].token
    return differing


def measure_source(source: EncoderInputs | None, generator: Generator) -> EncoderInputs | None:
    """Return a source with the tokens that it takes in a cache."""
    return source and replace(source, tokens=generator.source_tokens or source.tokens)


def may_differ(golden: Sequence[GoldenToken]) -> int:
    """Return how many of the golden tokens may differ."""
    return 1 + int(len(golden) * (1 - LEAST_AGREEMENT))
