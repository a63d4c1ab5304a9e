"""MiniLM cut, healed and quantized, beside other tools, in one run: fidelity, speed and size.

    python benchmarks/front.py [--rounds N] [--cache FOLDER] [--batches N,...] [--optimum FILE]

The models learn from sentences of the docstrings of installed packages, and are judged by docstrings of the standard
library and by descriptions of datasets, none of which they were given. Making them takes an hour and a half on two
quiet cores; what is made is kept. NNCF has a row where it is installed; of Optimum, which needs other versions of what
Laconic is built on, a model that `optimum-cli onnxruntime quantize --avx512_vnni` wrote can be given.
"""

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from corpus import corpus
from inputs import model_folder, texts
from minilm import LACONIC, ORIGINAL, faithful, fidelity_rows, kind_rows, speed_rows
from peers import Way, optimum, peers
from run import table

from export.sources import as_checkpoint_source, open_source
from laconic.artifacts.artifact import Artifact
from laconic.cache import VARIABLE, Cache
from laconic.models.source import Source
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.timing.benchmark import benchmark_sessions

RECIPES = ("text-embedding", "text-embedding-small")


def main() -> None:
    """Make, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="how often each way is run")
    parser.add_argument("--batches", default="1,8,32", help="batch sizes, with commas between them")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where inputs and artifacts go")
    parser.add_argument("--optimum", type=Path, help="an ONNX file that Optimum quantized")
    arguments = parser.parse_args()
    folder = arguments.cache
    folder.mkdir(parents=True, exist_ok=True)
    source = model_folder(folder)
    data, unseen = texts(folder)
    made = artifacts(source, data, folder)
    task = next(iter(made.values())).task()
    with ExitStack() as stack:
        original = open_source(Recipe.default(str(source), stages=[]), Cache(folder / "cache"), trust=False)
        graph = made["export"].model
        ways = [
            *own(original, made, stack),
            *peers(graph, as_checkpoint_source(original).checkpoint, data, folder, stack),
        ]
        if arguments.optimum:
            ways.append(optimum(arguments.optimum, graph, folder, stack))
        sessions = {name: session for name, session, _ in ways}
        rows = list(faithful(sessions, task, unseen))
        sizes = tuple(int(size) for size in arguments.batches.split(","))
        with Steps().step("time all ways in turns", len(sizes)) as step:
            times = benchmark_sessions(
                sessions, task, baseline=ORIGINAL, batches=sizes, threads=1, step=step, rounds=arguments.rounds,
                patience=math.inf,
            )  # fmt: skip
    print(f"\nOn {' and '.join(f'{len(kind)} {name}' for name, kind in unseen.items())}:\n")
    head, found = fidelity_rows(rows)
    table(
        ["", "MB", *head[1:]],
        [[row[0], f"{size / 1e6:.1f}", *row[1:]] for row, (_, _, size) in zip(found, ways, strict=True)],
    )
    print("\nBy kind of text:\n")
    table(*kind_rows(rows))
    print(f"\n{times[0].length} tokens, one thread, {arguments.rounds} rounds, medians and quartiles:\n")
    table(*speed_rows([time.model_dump() for time in times]))


def artifacts(source: Path, data: Path, folder: Path) -> dict[str, Artifact]:
    """Made by the commands that people use, and kept."""
    learn = folder / "corpus.jsonl"
    if not learn.exists():
        corpus(learn, 90_000)
    made = {}
    for name in ("export", "compress", *RECIPES):
        path = folder / f"front-{name}.laconic"
        words: list[str | Path] = [name] if name not in RECIPES else ["compress", "--recipe", name, "--train", learn]
        command = [LACONIC, *words, source, "--data", data, "-o", path]
        if not path.exists():
            code = subprocess.run(command, env=os.environ | {VARIABLE: str(folder / "cache")}).returncode
            if code not in (0, 3):  # 3: the goal was missed; the figures are what is wanted here
                sys.exit(f"bench: {name} ended with exit code {code}")
        made[name] = Artifact.load(path)
    return made


def own(original: Source, made: dict[str, Artifact], stack: ExitStack) -> Iterator[Way]:
    """The original, and what Laconic made of it."""
    yield ORIGINAL, stack.enter_context(original.open(1)), original.size
    for name, artifact in made.items():
        if name != "export":
            shown = f"`--recipe {name}`" if name in RECIPES else "`compress`"
            yield f"{shown} ({artifact.manifest.placement})", stack.enter_context(artifact.open()), artifact.size


if __name__ == "__main__":
    main()
