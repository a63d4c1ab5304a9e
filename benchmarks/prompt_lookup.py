"""What drafts from the text itself (prompt lookup) gain and cost, one chat at a time.

    python benchmarks/prompt_lookup.py ARTIFACT [--tokens 128] [--rounds 3]

Four kinds of questions: functions of the standard library that are to be written again with a change; their
documentation that is to be summarized, and to be answered in JSON, by a schema; and stories, which repeat nothing. The
engine that steps the decoder answers them greedily with drafts and without, in turns, and the paged one, which drafts
nothing. Times are those of this process, on one thread: seconds of the processor behind the first token.
"""

import inspect
import itertools
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from results import Results, make_parser

from laconic.artifacts.artifact import Artifact
from laconic.runtimes.decoder_opening import OpenDecoder
from laconic.runtimes.generator import GenerationRequest, Generator, Sampling, TokenEvent
from laconic.runtimes.grammar import grammar_of_schema
from laconic.runtimes.openvino_decoder import OpenVinoDecoder
from laconic.runtimes.openvino_genai import OpenVinoGenAi

CACHE = 1 << 30
HEAD = (
    "answers", "drafted a token", "of these right", "tokens/s, plain", "with drafts", "ratio", "paged", "same text",
)  # fmt: skip
SUBJECTS: Sequence[Callable[..., Any]] = (
    textwrap.dedent, textwrap.shorten, inspect.cleandoc, inspect.getmodule, itertools.groupby, time.strftime,
)  # fmt: skip
STORIES = ("a dragon who likes tea", "a lighthouse in winter", "two brothers and a boat", "the last train of the day")
FACTS = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 200} for name in ("name", "first_sentence", "last_sentence")},
    "required": ["name", "first_sentence", "last_sentence"],
    "additionalProperties": False,
}


class Undrafted(OpenVinoDecoder):
    """The engine without drafts."""

    def _draft(self, decoder: OpenDecoder) -> list[int]:
        return []


def main() -> None:
    """Measure, and print the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    artifact = Artifact.load(arguments.artifact)
    task: Any = artifact.task()
    placement = artifact.manifest.placements[0]
    options: dict[str, Any] = {"context": int(task.max_tokens), "cache_bytes": CACHE, "compute": placement.compute}
    model, tokenizer = arguments.artifact / placement.model, arguments.artifact / "tokenizer.json"
    drafting, plain = (kind(model, **options, tokenizer=tokenizer) for kind in (OpenVinoDecoder, Undrafted))
    paged = OpenVinoGenAi(model, **options)
    results.begin("drafts", HEAD)
    for kind, questions in list_questions().items():
        stop = tuple(task.settings.eos_token_id)
        grammar = grammar_of_schema(FACTS) if kind == "JSON" else ""
        sampling = Sampling(arguments.tokens, stop_token_ids=stop, grammar=grammar)
        prompts = [encode(task, question) for question in questions]
        results.add("drafts", [kind, *compare(prompts, sampling, drafting, plain, paged, arguments.rounds)])


def list_questions() -> dict[str, Sequence[str]]:
    """Return the questions, by their kind."""
    sources = [textwrap.dedent(inspect.getsource(each)) for each in SUBJECTS if inspect.isfunction(each)]
    texts = [inspect.getdoc(each) or "" for each in SUBJECTS]
    return {
        "code": [f"Write this function again, with the name `new_function`:\n\n{source}" for source in sources],
        "summaries": [f"Summarize this text:\n\n{text}" for text in texts],
        "JSON": [f"Extract the name and the first and the last sentence as JSON:\n\n{text}" for text in texts],
        "stories": [f"Write a story about {subject}." for subject in STORIES],
    }


def encode(task: Any, question: str) -> tuple[int, ...]:
    """Return the tokens of a chat that asks."""
    text = task.chat.render([{"role": "user", "content": question}], prompt=True)
    return tuple(task.tokenizer.encode(text, add_special_tokens=False).ids)


def compare(
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    drafting: Generator,
    plain: Generator,
    paged: Generator,
    rounds: int,
) -> list[str]:
    """Return the columns of one kind: medians over rounds, the ratio with its quartiles."""
    engines = [plain, drafting] if sampling.grammar else [plain, drafting, paged]
    speeds: list[list[float]] = []
    equal = drafted = accepted = written = 0
    for turn in range(rounds + 1):
        texts: list[list[tuple[int, ...]]] = []
        row: list[float] = []
        for engine in engines:
            answers = [write(engine, prompt, sampling) for prompt in prompts]
            texts.append([text for text, _, _ in answers])
            row.append(sum(len(text) - 1 for text in texts[-1]) / sum(seconds for _, seconds, _ in answers))
            if engine is drafting:
                events = [event for _, _, each in answers for event in each]
                drafted, accepted = sum(each.drafted for each in events), sum(each.accepted for each in events)
                written = sum(len(text) for text in texts[-1])
        equal = sum(pair[0] == pair[1] for pair in zip(*texts[:2], strict=True))
        if turn:  # the first warms up
            speeds.append(row)
    table = np.array(speeds)
    low, ratio, high = np.quantile(table[:, 1] / table[:, 0], [0.25, 0.5, 0.75])
    medians = [f"{value:.1f}" for value in np.median(table, axis=0)] + ["", ""]
    cells = [f"{drafted / written:.2f}", f"{accepted / max(1, drafted):.2f}", medians[0], medians[1]]
    return [*cells, f"{ratio:.2f} ({low:.2f} to {high:.2f})", medians[2], f"{equal} of {len(prompts)}"]


numbers: Iterator[int] = itertools.count()
"""The identifiers of requests."""


def write(
    generator: Generator, prompt: tuple[int, ...], sampling: Sampling
) -> tuple[tuple[int, ...], float, list[TokenEvent]]:
    """Return an answer, the seconds of the processor behind its first token, and its events."""
    generator.add(GenerationRequest(next(numbers), prompt, sampling))
    events: list[TokenEvent] = []
    start = 0.0
    while not generator.is_idle:
        step = [event for event in generator.step() if event.token_ids]
        if step and not events:
            start = time.process_time()
        events += step
    text = tuple(token for event in events for token in event.token_ids)
    return text, time.process_time() - start, events


if __name__ == "__main__":
    main()
