"""Adapters beside one base, swapped while clients ask for them; every answer is compared with peft's.

    python benchmarks/adapters.py CHECKPOINT ARTIFACT [--adapters 20] [--swaps 100] [--clients 4] [--tokens 16]

peft makes twice as many adapters of the checkpoint as are served, with random weights and other ranks and layers, and
writes what follows two texts with each, greedily. A server of the artifact has half of them. While clients stream
answers by the names of these, one after the other becomes another adapter: in one round its files are replaced, and it
is loaded; in the next it is unloaded first. An answer must be that of an adapter that had the name while it was
written. Requests for a name that is away get 404, and are counted. Between two swaps there are as many answers as
clients. Then the steps of the engine are timed alone: rows of the base, of one adapter, and of different ones.
"""

import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import peft
import torch
import transformers
from results import Results, make_parser
from server import Served

from laconic.artifacts.artifact import Artifact
from laconic.runtimes.generator import GenerationRequest, Sampling
from laconic.runtimes.openvino_decoder import OpenVinoDecoder
from serve.settings.server_settings import Settings

TEXTS = ("The three most useful habits are", "def count_words(text: str) -> int:\n")
TARGETS: Sequence[Any] = (["q_proj", "v_proj"], "all-linear", ["o_proj", "down_proj"])
RANKS = (8, 4, 16)
CACHE = 1 << 29
Answer = tuple[int, ...]


@dataclass
class Swapped:
    """What is served: the numbers of the adapters that each name may have now; None where it may be away. moments: of
    changes."""

    content: dict[str, set[int | None]]
    moments: list[tuple[float, str, set[int | None]]] = field(default_factory=list)

    def change(self, name: str, *numbers: int | None) -> None:
        """Note what a name may have from now on."""
        self.content[name] = set(numbers)
        self.moments.append((time.monotonic(), name, set(numbers)))

    def list_possible(self, name: str, before: set[int | None], since: float) -> set[int | None]:
        """Return what a name may have had since a moment. before: what it may have had then."""
        return before.union(*(numbers for moment, each, numbers in self.moments if each == name and moment >= since))


@torch.no_grad()
def make_adapters(source: Path, folder: Path, prompts: list[list[int]], count: int, tokens: int) -> list[list[Answer]]:
    """Save adapters, named by their numbers; return what each writes behind each prompt, and last what the model writes
    by itself."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    answers = []
    for number in range(count):
        torch.manual_seed(number)
        rank, targets = RANKS[number % 3], TARGETS[number % 3]
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        adapted.save_pretrained(str(folder / str(number)))
        answers.append([write_greedily(adapted, prompt, tokens) for prompt in prompts])
        model = adapted.unload()
    return [*answers, [write_greedily(model, prompt, tokens) for prompt in prompts]]


def write_greedily(model: Any, prompt: list[int], tokens: int) -> Answer:
    """Write what follows a prompt, as peft does it."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": tokens, "do_sample": False, "repetition_penalty": 1.0, "pad_token_id": 0}
    written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return tuple(written[0, len(prompt) :].tolist())


class Clients:
    """Clients of a server. texts: what peft writes with each adapter behind each prompt, and last the model by itself.
    outcomes: how requests ended."""

    def __init__(
        self, port: int, base: str, swapped: Swapped, prompts: list[list[int]], texts: list[list[str]], tokens: int
    ) -> None:
        self.base, self.swapped, self.prompts, self.texts, self.tokens = base, swapped, prompts, texts, tokens
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600)
        self.outcomes: Counter[str] = Counter()
        self.is_over = False

    async def ask(self, seed: int) -> None:
        """Ask for one name after the other, until the swaps are over."""
        rng = random.Random(seed)
        while not self.is_over:
            name = rng.choice([self.base, *self.swapped.content])
            place, since = rng.randrange(len(self.prompts)), time.monotonic()
            before: set[int | None] = {-1} if name == self.base else self.swapped.content[name]
            text = await self._read(name, self.prompts[place])
            possible = self.swapped.list_possible(name, before, since)
            if text is None:
                self.outcomes["404, away" if None in possible else "error"] += 1
            else:
                expected = {self.texts[number][place] for number in possible if number is not None}
                self.outcomes["as peft" if text in expected else "other text"] += 1

    async def _read(self, name: str, prompt: list[int]) -> str | None:
        """Stream an answer; return its text, or None where there is no such model."""
        body = {"model": name, "prompt": prompt, "max_tokens": self.tokens, "temperature": 0, "stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
        if answer.status_code == 404:
            return None
        if answer.status_code != 200 or not lines or lines[-1] != "[DONE]":
            raise RuntimeError(f"{name}: {answer.status_code}, {lines[-1:]}")
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])

    async def control(self, name: str, act: str) -> None:
        """Load or unload an adapter. Raises RuntimeError where it is refused."""
        answer = await self.client.post(f"/v2/repository/models/{name}/{act}")
        if answer.status_code != 200:
            raise RuntimeError(f"{name} is not {act}ed: {answer.text}")


async def swap(clients: Clients, stock: Path, served: Path, swaps: int, asking: int) -> list[float]:
    """Swap adapters while clients ask; return the seconds that each load took."""
    tasks = [asyncio.create_task(clients.ask(seed)) for seed in range(asking)]
    names = list(clients.swapped.content)
    seconds = []
    for turn in range(swaps):
        name = names[turn % len(names)]
        (now,) = clients.swapped.content[name]
        assert now is not None
        other = (now + len(names)) % (2 * len(names))
        if turn // len(names) % 2:
            clients.swapped.change(name, now, None)
            await clients.control(name, "unload")
            now = None
        shutil.copytree(stock / str(other), served / f".{name}")
        shutil.rmtree(served / name)
        (served / f".{name}").rename(served / name)
        clients.swapped.change(name, now, other)
        started = time.monotonic()
        await clients.control(name, "load")
        seconds.append(time.monotonic() - started)
        clients.swapped.change(name, other)
        most = clients.outcomes.total() + asking
        while clients.outcomes.total() < most and not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
        if any(task.done() for task in tasks):  # of an error
            break
    clients.is_over = True
    await asyncio.gather(*tasks)
    return seconds


def time_steps(artifact: Artifact, folder: Path, count: int, results: Results) -> None:
    """Time the steps of rows with the base alone, in an engine for adapters and in one for none, with one adapter, and
    with different ones."""
    task: Any = artifact.task()
    options: dict[str, Any] = {"context": int(task.max_tokens), "cache_bytes": CACHE}
    options["compute"] = artifact.manifest.placements[0].compute
    model = artifact.path / artifact.manifest.placements[0].model
    prompts = np.random.default_rng(0).integers(0, task.vocabulary, (8, 64)).tolist()
    head = ["ms of the processor a step: rows", "for no adapters", "base alone", "one adapter", "different ones"]
    results.begin("steps", head)
    with (
        OpenVinoDecoder(model, **options) as plain,
        OpenVinoDecoder(model, **options, has_adapters=True) as adapting,
    ):
        for number in range(min(8, count)):
            adapting.load_adapter(number + 1, folder / str(number))
        for rows in (1, 8):
            cases = [(plain, [0] * rows), (adapting, [0] * rows), (adapting, [1] * rows)]
            cases += [(adapting, list(range(1, rows + 1)))] if rows <= count else []
            times = [[time_step(engine, prompts, adapters) for engine, adapters in cases] for _ in range(3)]
            medians = [f"{1e3 * float(np.median(column)):.1f}" for column in zip(*times, strict=True)]
            results.add("steps", [str(rows), *medians, ""][: len(head)])


def time_step(engine: OpenVinoDecoder, prompts: list[list[int]], adapters: list[int]) -> float:
    """Measure the seconds of the processor that a step takes with these adapters."""
    for number, adapter in enumerate(adapters):
        sampling = Sampling(24, temperature=1.0, seed=number)  # texts that repeat nothing
        engine.add(GenerationRequest(number, tuple(prompts[number]), sampling, adapter=adapter))
    times: list[float] = []
    while not engine.is_idle:
        started = time.process_time()
        events = engine.step()
        if len(events) == len(adapters) and not any(event.drafted for event in events):
            times.append(time.process_time() - started)
    return float(np.median(times))


def main() -> None:
    """Swap, time, and print; exit with 1 where something failed or differed."""
    parser = make_parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--adapters", type=int, default=20)
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    artifact = Artifact.load(arguments.artifact)
    task: Any = artifact.task()
    prompts = [task.tokenizer.encode(text).ids for text in TEXTS]
    with tempfile.TemporaryDirectory() as folder:
        stock, served = Path(folder) / "stock", Path(folder) / "served" / artifact.name
        answers = make_adapters(arguments.checkpoint, stock, prompts, 2 * arguments.adapters, arguments.tokens)
        distinct = len({each for row in answers for each in row})
        texts = [[task.tokenizer.decode(list(answer)) for answer in row] for row in answers]
        content: dict[str, set[int | None]] = {f"adapter-{number}": {number} for number in range(arguments.adapters)}
        for number, name in enumerate(content):
            shutil.copytree(stock / str(number), served / name)
        settings = Settings(
            threads=1, executors=1, unproven=True, kv_cache=CACHE, adapters=served.parent, queue_seconds=600
        )
        started = time.monotonic()
        with Served(artifact.path, settings) as server:
            clients = Clients(server.port, artifact.name, Swapped(content), prompts, texts, arguments.tokens)
            seconds = asyncio.run(swap(clients, stock, served, arguments.swaps, arguments.clients))
            memory = server.memory() / 1e6
        figures = {
            "adapters": str(arguments.adapters),
            "swaps": f"{len(seconds)} in {time.monotonic() - started:.0f} s",
            "a load, s (longest)": f"{np.median(seconds):.2f} ({max(seconds):.2f})",
            "resident, MB": f"{memory:.0f}",
            "different answers": str(distinct),
        } | {outcome: str(count) for outcome, count in sorted(clients.outcomes.items())}
        results.table("swaps", list(figures), [list(figures.values())])
        print()
        time_steps(artifact, stock, arguments.adapters, results)
    sys.exit(bool(clients.outcomes["error"] or clients.outcomes["other text"]))


if __name__ == "__main__":
    main()
