"""What HTTP costs a language model: tokens per second of clients that stream, against the bare engine.

    python benchmarks/streams.py ARTIFACT [--clients 16] [--threads 1] [--rounds 7]

The server is a process of its own, and so is the bare engine: OpenVINO GenAI's pipeline, stepped with all prompts at
once, whose tokens nobody reads before the end. This process is the clients: it opens a connection for each prompt, and
reads the events as bytes. Rounds of both take turns, with the same new prompts, so that what else the machine does
falls on both alike. A rate is all tokens over the time from the first prompt to the last token; that of HTTP has
the reading of the prompts in it, and so has the other.
"""

import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from results import Results, make_parser
from server import Served

from laconic.artifacts.artifact import Artifact
from laconic.runtimes.generator import Sampling
from laconic.runtimes.openvino import HINTS, find_compute, make_properties, ov
from laconic.runtimes.openvino_genai import BLOCK_TOKENS, make_config, open_pipeline
from laconic.runtimes.stateful_graph import make_stateful
from serve.settings.server_settings import Settings

Prompts = list[list[int]]


def main() -> None:
    """Measure, and print a row for each round."""
    parser = make_parser(__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    artifact = Artifact.load(arguments.artifact)
    vocabulary = int(artifact.task().vocabulary)  # type: ignore[attr-defined]  # of a language model
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    bare = multiprocessing.get_context("spawn").Process(
        target=run_bare, args=(theirs, arguments.artifact, arguments.threads, arguments.clients), daemon=True
    )
    bare.start()
    ours.recv()  # the engine is open
    settings = Settings(threads=arguments.threads, executors=1, unproven=True, max_waiting=arguments.clients)
    ratios: list[float] = []
    results.begin("rounds", ["round", "HTTP, tokens/s", "bare, tokens/s", "ratio", "front's CPU, us/token"])
    with Served(arguments.artifact, settings) as server:
        for seed in range(arguments.rounds + 1):
            rng = np.random.default_rng(seed)
            prompts = rng.integers(0, vocabulary, (arguments.clients, arguments.prompt)).tolist()
            before = sum(server.usage.cpu_times()[:2])
            tokens, seconds = asyncio.run(stream_all(server.port, artifact.name, prompts, arguments.tokens))
            front = 1e6 * (sum(server.usage.cpu_times()[:2]) - before) / tokens
            ours.send((prompts, arguments.tokens))
            bare_tokens, bare_seconds = ours.recv()
            if seed:  # the first warms up
                rate, bare_rate = tokens / seconds, bare_tokens / bare_seconds
                ratios.append(rate / bare_rate)
                rates = [f"{rate:.1f}", f"{bare_rate:.1f}", f"{ratios[-1]:.3f}", f"{front:.0f}"]
                results.add("rounds", [str(seed), *rates])
    ours.send(None)
    bare.join()
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    results.add("rounds", ["median (quartiles)", "", "", f"{median:.3f} ({low:.3f} to {high:.3f})", ""])


def run_bare(pipe: Connection, path: Path, threads: int, clients: int) -> None:
    """Write with the engine alone: for prompts and a number of tokens, tell the tokens that were written and the time
    that it took, in seconds."""
    artifact = Artifact.load(path)
    task, placement = artifact.task(), artifact.manifest.placements[0]
    context = int(task.max_tokens)  # type: ignore[attr-defined]
    compute = find_compute(placement.compute)
    properties = make_properties(threads, compute) | {"KV_CACHE_PRECISION": HINTS[compute]}
    stateful = make_stateful(path / placement.model, context)
    kept = Settings().kv_cache // (BLOCK_TOKENS * stateful.cache.count_bytes(4))
    blocks = min(clients * -(-context // BLOCK_TOKENS), kept)
    pipeline = open_pipeline(stateful, path / placement.model, blocks, properties, True)
    ends = tuple(task.settings.eos_token_id)  # type: ignore[attr-defined]
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        prompts, tokens = asked
        config = make_config(Sampling(tokens, stop_token_ids=ends), 0)
        started = time.perf_counter()
        handles = [
            pipeline.add_request(number, ov.Tensor(np.array([prompt], np.int64)), config)
            for number, prompt in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        seconds = time.perf_counter() - started
        pipe.send((sum(len(output.generated_ids) for each in handles for output in each.read_all()), seconds))


async def stream_all(port: int, model: str, prompts: Prompts, tokens: int) -> tuple[int, float]:
    """Have every client stream the answer to a prompt; return the tokens of all, and the seconds until the last."""
    started = time.perf_counter()
    written = await asyncio.gather(*(stream(port, model, prompt, tokens) for prompt in prompts))
    return sum(written), time.perf_counter() - started


async def stream(port: int, model: str, prompt: list[int], tokens: int) -> int:
    """Return the number of tokens of a streamed answer, as it says. Raises RuntimeError for another status than 200."""
    request = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body = json.dumps(request | {"stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    usage = answer.rfind(b'"completion_tokens":')
    if b" 200 " not in answer[:32] or usage < 0:
        raise RuntimeError(answer[:400].decode(errors="replace"))
    return int(answer[usage + len(b'"completion_tokens":') :].split(b",", 1)[0])


if __name__ == "__main__":
    main()
