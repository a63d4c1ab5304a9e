"""How long running texts wait for their next tokens while a long prompt is read.

    python benchmarks/long_prompts.py ARTIFACT [--streams 4] [--prompt 4000] [--rounds 3]

Each round writes streams with every engine in turn, on one thread, by themselves and then beside a prompt. Counted is
the processor time between two tokens of a stream, which other work of the machine hardly touches: medians and the 99th
percentile of all gaps of all rounds; to the first token behind the prompt, beside the streams and alone; and to that
behind a short prompt that comes just after it. The aim is a 99th percentile of at most twice the one without the
prompt.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from generation import draw_prompts, numbers, open_generators, open_llamacpp
from results import Results, make_parser

from laconic.runtimes.generator import GenerationRequest, Generator, Sampling

CACHE = 6 << 30
"""Bytes of the cache of an engine: all rows of the second one are as wide as the longest."""
SHORT, TOKENS = 32, 64
"""Tokens of the streams' own prompts, and of what they write by themselves."""


def main() -> None:
    """Measure, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    ours = open_generators(arguments.artifact, CACHE)
    generators: dict[str, Generator] = {**ours, **open_llamacpp(arguments.artifact, CACHE)}
    vocabulary = ours["paged"].vocabulary
    gaps: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in generators}
    first: dict[str, tuple[list[float], list[float], list[float]]] = {name: ([], [], []) for name in generators}
    for seed in range(arguments.rounds):
        *streams, long = draw_prompts(vocabulary, arguments.streams + 1, arguments.prompt, seed)
        short = [prompt[:SHORT] for prompt in streams]
        for name, generator in generators.items():
            if not seed:
                watch(generator, short, ())  # warms up
            gaps[name][0].extend(watch(generator, short, ())[0])
            beside, seconds, behind = watch(generator, short, long)
            gaps[name][1].extend(beside)
            alone = watch(generator, [], long[::-1])[1]
            for kept, each in zip(first[name], (seconds, alone, behind), strict=True):
                kept.append(each)
    results.table(
        f"{arguments.streams} streams, a prompt of {arguments.prompt} tokens",
        ["", "between tokens, ms: median, 99 %", "beside the prompt", "its first token, s", "alone", "a short one's"],
        [[name, *map(describe, gaps[name]), *(f"{np.median(each):.1f}" for each in first[name])] for name in first],
    )


def watch(
    generator: Generator, streams: Sequence[tuple[int, ...]], long: tuple[int, ...]
) -> tuple[list[float], float, float]:
    """Write streams, and where there is a long prompt until its first token. Return the seconds of processor time
    between two tokens of a stream, from when all write and the prompt is read, those to its first token, and those to
    the first one behind its end as a prompt of its own, which comes right after it."""
    identifiers = [next(numbers) for _ in streams]
    for number, prompt in zip(identifiers, streams, strict=True):
        generator.add(GenerationRequest(number, prompt, Sampling(1 << 11 if long else TOKENS)))
    last: dict[int, float] = {}
    gaps: list[float] = []
    asked, start, seconds, behind = -1, 0.0, 0.0, 0.0
    while True:
        if long and asked < 0 and len(last) == len(streams):
            asked, start = next(numbers), time.process_time()
            generator.add(GenerationRequest(asked, long, Sampling(1)))
            late = next(numbers)
            generator.add(GenerationRequest(late, long[-SHORT:], Sampling(1)))
        if generator.is_idle:
            return gaps, seconds, behind
        is_counted = len(last) == len(streams) and (start > 0 or not long)
        for event in generator.step():
            now = time.process_time()
            if event.request_id == asked and event.token_ids:
                seconds = now - start
                for number in identifiers:
                    generator.cancel(number)
            elif asked >= 0 and event.request_id == late:
                behind = now - start
            elif event.token_ids and not seconds:
                if is_counted:
                    gaps.append(now - last[event.request_id])
                last[event.request_id] = now


def describe(seconds: Sequence[float]) -> str:
    """Describe gaps by their median and 99th percentile, in ms."""
    return ", ".join(f"{1000 * value:.0f}" for value in np.quantile(seconds, [0.5, 0.99]))


if __name__ == "__main__":
    main()
