"""Clients of a language model that leave in the middle of their answers, while its cache is full.

    python benchmarks/disconnects.py ARTIFACT [--leaving 1000] [--staying 200] [--blocks 64]

Twenty clients at a time stream an answer and close their connection after a random number of bytes, some before the
first; others ask beside them and read to the end. The cache holds few blocks, so that requests wait for those that
leave. Then as many clients as `--staying` stream at once. Every answer that is read to the end is compared with the
same question's answer when it is asked alone; at the end no block may be held and the engine must be the same process.
Memory is that of the server and its workers, after the first tenth of the clients and at the end.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from results import Results, make_parser
from server import Served

from laconic.artifacts.artifact import Artifact
from laconic.runtimes.openvino_genai import BLOCK_TOKENS
from laconic.runtimes.stateful_graph import make_stateful
from serve.settings.server_settings import Settings

AT_ONCE = 20
QUESTIONS = 8
PROMPT, TOKENS = 24, 64
HELD = 'laconic_generation_cache_blocks{model="%s",version="1",state="used"}'


class Clients:
    """Clients of one model of a server on this machine. outcomes: how many requests ended in which way."""

    def __init__(self, port: int, model: str, prompts: list[list[int]]) -> None:
        self.port = port
        self.model = model
        self.prompts = prompts
        self.answers: list[str] = []
        self.outcomes: Counter[str] = Counter()

    async def ask_alone(self) -> None:
        """Note what each question is answered when nobody else asks."""
        for prompt in self.prompts:
            self.answers.append(read_text(await self._read(prompt, None)))
        if not all(self.answers):
            raise RuntimeError("a question has an empty answer, with which nothing can be compared: take another model")

    async def leave(self, rng: random.Random) -> None:
        """Ask, read up to a random number of bytes, and close the connection."""
        await self._read(rng.choice(self.prompts), rng.randrange(6000))
        self.outcomes["left"] += 1

    async def stay(self, number: int) -> None:
        """Ask, read to the end, and compare."""
        index = number % len(self.prompts)
        text = read_text(await self._read(self.prompts[index], None))
        self.outcomes["same answer" if text == self.answers[index] else "other answer or none"] += 1

    async def _read(self, prompt: list[int], most: int | None) -> bytes:
        """Stream the answer to a prompt, and return the bytes that were read, `most` of them."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        body = json.dumps(asked).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
        try:
            return await (reader.read() if most is None else reader.readexactly(most))
        except asyncio.IncompleteReadError as answer:
            return answer.partial
        finally:
            writer.transport.abort()

    async def count_held(self) -> int:
        """Return how many blocks of the cache are held."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        return int(float(text.partition(HELD % self.model)[2].split(maxsplit=1)[0]))


def read_text(answer: bytes) -> str:
    """Return the text of a streamed answer; empty where it did not end as it should."""
    events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        return ""
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


async def run(clients: Clients, leaving: int, staying: int, usage: psutil.Process) -> list[float]:
    """Let clients come and go; return the megabytes of the server after a tenth of them and at the end."""
    rng, memory = random.Random(0), []
    await clients.ask_alone()
    for start in range(0, leaving, AT_ONCE):
        beside = [clients.stay(start + number) for number in range(2)]
        await asyncio.gather(*(clients.leave(rng) for _ in range(min(AT_ONCE, leaving - start))), *beside)
        if start <= leaving // 10 < start + AT_ONCE:
            memory.append(measure_memory(usage))
    await asyncio.gather(*(clients.stay(number) for number in range(staying)))
    deadline = time.monotonic() + 30
    while await clients.count_held() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return [*memory, measure_memory(usage)]


def measure_memory(usage: psutil.Process) -> float:
    """Measure the resident megabytes of a process and those that it started."""
    held: int = sum(process.memory_info().rss for process in (usage, *usage.children(recursive=True)))
    return held / 1e6


def main() -> None:
    """Let clients leave, print what came of it, and exit with 1 where something was lost."""
    parser = make_parser(__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--leaving", type=int, default=1000)
    parser.add_argument("--staying", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=64, help="of the cache")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    artifact = Artifact.load(arguments.artifact)
    task: Any = artifact.task()
    cache = make_stateful(artifact.path / artifact.manifest.placements[0].model, task.max_tokens).cache
    prompts = np.random.default_rng(0).integers(0, task.vocabulary, (QUESTIONS, PROMPT)).tolist()
    size = arguments.blocks * BLOCK_TOKENS * cache.count_bytes(4)
    settings = Settings(
        threads=1, executors=1, unproven=True, kv_cache=size, max_waiting=arguments.staying, queue_seconds=600
    )
    with Served(artifact.path, settings) as server:
        clients = Clients(server.port, artifact.name, prompts)
        workers = {process.pid for process in server.usage.children(recursive=True)}
        started = time.perf_counter()
        memory = asyncio.run(run(clients, arguments.leaving, arguments.staying, server.usage))
        seconds = time.perf_counter() - started
        held = asyncio.run(clients.count_held())
        same = workers == {process.pid for process in server.usage.children(recursive=True)}
    figures = {outcome: str(count) for outcome, count in sorted(clients.outcomes.items())} | {
        "s": f"{seconds:.0f}",
        "blocks held at the end": f"{held} of {arguments.blocks}",
        "processes": "the same" if same else "others",
        "MB, after a tenth and at the end": f"{memory[0]:.0f}, {memory[-1]:.0f}",
    }
    results.table("clients", list(figures), [list(figures.values())])
    sys.exit(bool(held or not same or clients.outcomes["other answer or none"]))


if __name__ == "__main__":
    main()
