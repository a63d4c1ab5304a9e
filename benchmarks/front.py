"""MiniLM made small and fast by Laconic and by other tools, in one run: fidelity, speed and size.

    python benchmarks/front.py [--rounds N] [--cache FOLDER] [--batches N,...] [--optimum FILE] [--row NAME=ARTIFACT]

The recipes heal on the docstrings of installed packages (`corpus.py`), one also on twelve kinds of text
(`wide_corpus.py`). All are compared on the development texts of `inputs.py`, by which the recipes were chosen, and on
the texts of `test_set.py`, which chose nothing: look at those once. Making the models takes three hours on two quiet
cores; what is made is kept. NNCF has a row where it is installed; of Optimum, which needs other versions of what
Laconic is built on, a model that `optimum-cli onnxruntime quantize --avx512_vnni` wrote can be given.
"""

import math
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import wide_corpus
from corpus import corpus
from inputs import model_folder, texts
from judge import judge, judgement_rows
from minilm import LACONIC, ORIGINAL, WAYS, faithful, fidelity_rows, kind_rows, speed_rows, ways
from peers import optimum
from results import Results, make_parser
from test_set import choose_texts

from laconic.artifacts.artifact import Artifact
from laconic.cache import VARIABLE
from laconic.progress import Steps
from laconic.timing.benchmark import benchmark_sessions

CORPORA = {"docstrings": "corpus.jsonl", "12 kinds": "wide.jsonl"}
"""What is healed on, and the file of its texts."""
RECIPES = (("text-embedding", "docstrings"), ("text-embedding", "12 kinds"), ("text-embedding-small", "docstrings"))
"""The ready recipes that are compared, and what each heals on."""


@dataclass(frozen=True)
class Inputs:
    """The files that the models are made of. data: samples for ranges and the verdict. corpora: by name, to heal on."""

    source: Path
    data: Path
    corpora: dict[str, Path]


def main() -> None:
    """Make, measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="how often each way is run")
    parser.add_argument("--batches", default="1,8,32", help="batch sizes, with commas between them")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where inputs and artifacts go")
    parser.add_argument("--optimum", type=Path, help="an ONNX file that Optimum quantized")
    parser.add_argument("--row", action="append", default=[], help="NAME=ARTIFACT of the same model, a row of its own")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    folder = arguments.cache
    folder.mkdir(parents=True, exist_ok=True)
    data, development = texts(folder)
    inputs = Inputs(model_folder(folder), data, write_corpora(folder, data))
    made = artifacts(inputs, folder)
    made |= {name: Artifact.load(Path(path)) for name, _, path in (row.partition("=") for row in arguments.row)}
    task = next(iter(made.values())).task()
    with ExitStack() as stack:
        found = list(ways(inputs.source, made, data, folder, stack))
        if arguments.optimum:
            like = folder / "dynamic.onnx"
            found.append(optimum(arguments.optimum, like, folder, stack))
        sessions = {name: session for name, session, _ in found}
        rows = list(faithful(sessions, task, development))
        tested = choose_texts(150, [data, inputs.corpora["docstrings"]])
        judged = dict(judge(sessions, task, tested))
        sizes = tuple(int(size) for size in arguments.batches.split(","))
        with Steps().step("time all ways in turns", len(sizes)) as step:
            times = benchmark_sessions(
                sessions, task, baseline=ORIGINAL, batches=sizes, threads=1, step=step, rounds=arguments.rounds,
                patience=math.inf,
            )  # fmt: skip
    print(f"On {' and '.join(f'{len(kind)} {name}' for name, kind in development.items())}:\n")
    head, cells = fidelity_rows(rows)
    results.table(
        "kinds of the front",
        ["", "MB", *head[1:]],
        [[row[0], f"{size / 1e6:.1f}", *row[1:]] for row, (_, _, size) in zip(cells, found, strict=True)],
    )
    print("\nBy kind of text:\n")
    results.table("by kind", *kind_rows(rows))
    print(f"\nTest set, {', '.join(f'{len(kind)} {name}' for name, kind in tested.items())}:\n")
    results.table("judged", *judgement_rows(judged))
    print(f"\n{times[0].length} tokens, one thread, {arguments.rounds} rounds, medians and quartiles:\n")
    results.table("speed", *speed_rows([time.model_dump() for time in times]))


def write_corpora(folder: Path, data: Path) -> dict[str, Path]:
    """The texts to heal on, by name, and kept."""
    paths = {name: folder / file for name, file in CORPORA.items()}
    if not paths["docstrings"].exists():
        corpus(paths["docstrings"], 90_000)
    if not paths["12 kinds"].exists():
        wide_corpus.write(paths["12 kinds"], [data, paths["docstrings"]])
    return paths


def artifacts(inputs: Inputs, folder: Path) -> dict[str, Artifact]:
    """Made by the commands that people use, and kept."""
    commands = {name: (f"minilm-{number}", words) for number, (name, words) in enumerate(WAYS.items())}
    for recipe, name in RECIPES:
        train = inputs.corpora[name]
        words = ["compress", "--recipe", recipe, "--train", str(train)]
        commands[f"`--recipe {recipe}`, healed on {name}"] = (f"{recipe}-{train.stem}", words)
    made = {}
    for name, (file, words) in commands.items():
        path = folder / f"{file}.laconic"
        command: list[str | Path] = [LACONIC, *words, inputs.source, "--data", inputs.data, "-o", path]
        if not path.exists():
            code = subprocess.run(command, env=os.environ | {VARIABLE: str(folder / "cache")}).returncode
            if code not in (0, 3):  # 3: the goal was missed; the figures are what is wanted here
                sys.exit(f"bench: {name} ended with exit code {code}")
        made[name] = Artifact.load(path)
    return made


if __name__ == "__main__":
    main()
