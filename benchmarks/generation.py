"""How fast language models write: tokens per second of the engines that write, beside transformers.

    python benchmarks/generation.py ARTIFACT [--checkpoint FOLDER] [--streams 1,4,16] [--tokens 48] [--rounds 7]

Each round writes with every engine in turn, on one thread, greedily and without an end token, behind prompts of random
tokens that share no beginning. Counted are the tokens behind the first of every stream, per second of wall time: the
medians over rounds, with their quartiles; then the time to the first token of one stream, and of a second prompt with
the same first 400 tokens, which the prefix cache holds: also of the stepped engine after it was opened again, with the
file of its prefix cache, whose reading is counted apart. An artifact that was made for llama.cpp is written by that
engine, too. `--checkpoint` adds transformers' `generate` in FP32 and BF16, all streams as one batch, less the time of
writing one token. `--onnxruntime-genai` adds a model that `python -m onnxruntime_genai.models.builder` made,
`--llama-cpp NODE_MODULES MODEL.gguf` one in llama.cpp by itself.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import torch
from generation_peers import Measure, Prompts, open_llama_cpp, open_onnxruntime_genai
from results import Results, make_parser
from transformers import AutoModelForCausalLM

from laconic.artifacts.artifact import Artifact
from laconic.registry import resolve
from laconic.runtimes.generator import GenerationRequest, Generator, Sampling
from laconic.runtimes.openvino_decoder import OpenVinoDecoder
from laconic.runtimes.openvino_genai import OpenVinoGenAi

PREFIX = 400
CACHE = 1 << 30
EngineT = TypeVar("EngineT", OpenVinoGenAi, OpenVinoDecoder)


def main() -> None:
    """Measure, and print the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--checkpoint", type=Path, default=None, help="the original, for transformers")
    parser.add_argument("--onnxruntime-genai", type=Path, default=None)
    parser.add_argument("--llama-cpp", type=Path, nargs=2, default=None)
    parser.add_argument("--streams", default="1,4,16", help="numbers of streams, with commas between them")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="written for each prompt")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    torch.set_num_threads(1)
    ours = open_generators(arguments.artifact)
    vocabulary = ours["paged"].vocabulary
    generators: dict[str, Generator] = {**ours, **open_llamacpp(arguments.artifact)}
    measures: dict[str, Measure] = {
        name: lambda prompts, generator=generator: write(generator, prompts, arguments.tokens)  # type: ignore[misc]
        for name, generator in generators.items()
    }
    if arguments.checkpoint is not None:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"transformers, {str(dtype).removeprefix('torch.')}"
            measures[name] = open_transformers(arguments.checkpoint, dtype, arguments.tokens)
    if arguments.onnxruntime_genai is not None:
        measures["ONNX Runtime GenAI"] = open_onnxruntime_genai(arguments.onnxruntime_genai, arguments.tokens)
    if arguments.llama_cpp is not None:
        modules, model = arguments.llama_cpp
        measures["llama.cpp by itself"] = open_llama_cpp(modules, model, arguments.tokens)
    streams = [int(each) for each in arguments.streams.split(",")]
    speeds: dict[tuple[str, int], list[float]] = {(name, count): [] for name in measures for count in streams}
    for seed in range(arguments.rounds + 1):
        for count in streams:
            prompts = draw_prompts(vocabulary, count, arguments.prompt, seed)
            for name, measure in measures.items():
                speed = measure(prompts)
                if seed:  # the first round warms up
                    speeds[name, count].append(speed)
    rows = [[name, *(describe(speeds[name, count]) for count in streams)] for name in measures]
    results.table("tokens per second", ["tokens per second", *(f"{count} at once" for count in streams)], rows)
    print()
    head = ["time to the first token, s", "first prompt", "second, same beginning", "ratio"]
    results.begin("first token", head)
    for name, generator in generators.items():
        results.add("first token", [name, *time_prefix(generator, vocabulary, arguments.rounds)])
    results.add("first token", time_reopened(arguments.artifact, vocabulary, arguments.rounds))


def describe(values: Sequence[float]) -> str:
    """Describe measurements by their median and quartiles."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{median:.3g} ({low:.3g} to {high:.3g})"


def draw_prompts(vocabulary: int, count: int, length: int, seed: int) -> Prompts:
    """Draw prompts of random tokens."""
    rows = np.random.default_rng(seed).integers(0, vocabulary, (count, length))
    return [tuple(row) for row in rows.tolist()]


def open_generators(path: Path, cache: int = CACHE) -> dict[str, OpenVinoGenAi | OpenVinoDecoder]:
    """Open the model of an artifact in both engines of OpenVINO. cache: its bytes, of each."""
    return {"paged": open_engine(OpenVinoGenAi, path, cache), "stepped": open_engine(OpenVinoDecoder, path, cache)}


def open_engine(engine: type[EngineT], path: Path, cache: int = CACHE) -> EngineT:
    """Open the model of an artifact in an engine of OpenVINO."""
    artifact = Artifact.load(path)
    placement = artifact.manifest.placements[0]
    context = int(artifact.task().max_tokens)  # type: ignore[attr-defined]  # of a language model
    return engine(path / placement.model, context=context, cache_bytes=cache, compute=placement.compute)


def open_llamacpp(path: Path, cache: int = CACHE) -> dict[str, Generator]:
    """Open the model of an artifact in llama.cpp, where it was made for that. cache: its bytes."""
    artifact = Artifact.load(path)
    if artifact.manifest.placement != "llamacpp":
        return {}
    context = int(artifact.task().max_tokens)  # type: ignore[attr-defined]  # of a language model
    return {"llama.cpp": resolve("generator", "llamacpp")(artifact.model, context=context, cache_bytes=cache)}


numbers: Iterator[int] = itertools.count()
"""The identifiers of requests."""


def write(generator: Generator, prompts: Prompts, tokens: int) -> float:
    """Return the tokens per second behind the first of every stream."""
    for prompt in prompts:
        generator.add(GenerationRequest(next(numbers), prompt, Sampling(tokens)))
    begun: set[int] = set()
    written, start = 0, 0.0
    while not generator.is_idle:
        events = generator.step()
        if len(begun) == len(prompts):
            written += sum(len(event.token_ids) for event in events)
            continue
        begun |= {event.request_id for event in events if event.token_ids}
        start = time.perf_counter()
    return written / (time.perf_counter() - start)


def open_transformers(checkpoint: Path, dtype: torch.dtype, tokens: int) -> Measure:
    """Open the original."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()

    @torch.inference_mode()
    def time_tokens(ids: torch.Tensor, count: int) -> float:
        mask, start = torch.ones_like(ids), time.perf_counter()
        model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return time.perf_counter() - start

    def measure(prompts: Prompts) -> float:
        ids = torch.tensor(prompts)
        return len(prompts) * (tokens - 1) / (time_tokens(ids, tokens) - time_tokens(ids, 1))

    return measure


def time_prefix(generator: Generator, vocabulary: int, rounds: int) -> Sequence[str]:
    """Return the times to the first token of a prompt, and of another with the same beginning, and their ratio."""
    times: list[tuple[float, float]] = []
    for seed in range(rounds):
        (begin,) = draw_prompts(vocabulary, 1, PREFIX, 1000 + seed)
        times.append((time_first(generator, (*begin, 5, 6, 7)), time_first(generator, (*begin, 8, 9, 10))))
    first, second = np.array(times).T
    return [describe(first), describe(second), describe(second / first)]


def time_reopened(path: Path, vocabulary: int, rounds: int) -> Sequence[str]:
    """Return the same as `time_prefix`, where the second prompts are read by an engine that was opened again, behind
    what it is: with the size of the file and the seconds of writing and of reading it."""
    begins = draw_prompts(vocabulary, rounds, PREFIX, 2000)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "prefixes.safetensors"
        engine = open_engine(OpenVinoDecoder, path)
        engine.load_prefixes(file, "artifact")
        first = np.array([time_first(engine, (*begin, 5, 6, 7)) for begin in begins])
        start = time.perf_counter()
        engine.save_prefixes()
        written = time.perf_counter() - start
        engine.close()
        engine = open_engine(OpenVinoDecoder, path)
        start = time.perf_counter()
        engine.load_prefixes(file, "artifact")
        read, size = time.perf_counter() - start, file.stat().st_size
    second = np.array([time_first(engine, (*begin, 8, 9, 10)) for begin in begins])
    engine.close()
    name = f"stepped, opened again ({size / 1e6:.3g} MB, written in {written:.2g} s, read in {read:.2g} s)"
    return [name, *(describe(times.tolist()) for times in (first, second, second / first))]


def time_first(generator: Generator, prompt: tuple[int, ...]) -> float:
    """Return the seconds to the first token."""
    start = time.perf_counter()
    generator.add(GenerationRequest(next(numbers), prompt, Sampling(1)))
    while not generator.is_idle:
        generator.step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
