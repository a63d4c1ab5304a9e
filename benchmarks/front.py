"""MiniLM cut, healed and quantized, beside other tools, in one run: fidelity, speed and size.

    python benchmarks/front.py [--rounds N] [--cache FOLDER] [--batches N,...] [--optimum FILE]

The models learn from sentences of the docstrings of installed packages, and are judged by docstrings of the standard
library and by descriptions of datasets, none of which they were given. Making them takes an hour and a half on one
quiet core; what is made is kept. NNCF has a row where it is installed; of Optimum, which needs other versions of what
Laconic is built on, a model that `optimum-cli onnxruntime quantize --avx512_vnni` wrote can be given.
"""

import argparse
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnx
from corpus import corpus
from inputs import model_folder, texts
from minilm import LACONIC, ORIGINAL, faithful, fidelity_rows, kind_rows, speed_rows
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from run import table

from laconic.artifact import Artifact, make_runtime
from laconic.cache import VARIABLE, Cache
from laconic.data import Dataset, batches, read
from laconic.progress import Steps
from laconic.race import race
from laconic.recipe import Recipe
from laconic.runtimes.runtime import Session
from laconic.source import open_source
from laconic.tasks.task import Task
from laconic.tensor import Arrays

RECIPES = ("text-embedding", "text-embedding-small")
CALIBRATE = 300
"""Texts that the other tools calibrate with."""
Way = tuple[str, Session, int]


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
        ways = [*own(source, made, folder, stack), *others(made["export"], data, task, folder, stack)]
        if arguments.optimum:
            path = named(arguments.optimum, made["export"].model, folder / "front-optimum.onnx")
            ways.append(("Optimum, INT8 dynamic", opened(path, stack), path.stat().st_size))
        sessions = {name: session for name, session, _ in ways}
        rows = list(faithful(sessions, task, unseen))
        sizes = tuple(int(size) for size in arguments.batches.split(","))
        with Steps().step("time all ways in turns", len(sizes)) as step:
            times = race(
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


def own(source: Path, made: dict[str, Artifact], folder: Path, stack: ExitStack) -> Iterator[Way]:
    """The original, and what Laconic made of it."""
    original = open_source(Recipe.default(str(source), stages=[]), Cache(folder / "cache"), trust=False)
    yield ORIGINAL, stack.enter_context(original.open(1)), original.size
    for name, artifact in made.items():
        if name != "export":
            shown = f"`--recipe {name}`" if name in RECIPES else "`compress`"
            yield f"{shown} ({artifact.manifest.placement})", stack.enter_context(artifact.open()), artifact.size


def others(export: Artifact, data: Path, task: Task, folder: Path, stack: ExitStack) -> Iterator[Way]:
    """What other tools make of the same graph, with the same texts to calibrate with, as their guides say."""
    few = read(data, task).take(CALIBRATE)
    path = folder / "front-dynamic.onnx"
    quantize_dynamic(export.model, path, per_channel=True, weight_type=QuantType.QInt8)
    yield "ONNX Runtime, dynamic", opened(path, stack), path.stat().st_size
    path = folder / "front-static.onnx"
    quantize_static(
        export.model, path, Reader(few, task), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul"],
    )  # fmt: skip
    yield "ONNX Runtime, static", opened(path, stack), path.stat().st_size
    if importlib.util.find_spec("nncf"):
        path = folder / "front-nncf.onnx"
        nncf_int8(export.model, few, task, path)
        engine = make_runtime("openvino").open(path, threads=1)
        yield "NNCF, INT8 (OpenVINO)", stack.enter_context(engine), path.stat().st_size


def named(path: Path, like: Path, to: Path) -> Path:
    """The file with one output, that which has the number of dimensions and gets the name of the other file's."""
    model, (wanted,) = onnx.load(path), onnx.load(like, load_external_data=False).graph.output
    rank = len(wanted.type.tensor_type.shape.dim)
    (given,) = [each for each in model.graph.output if len(each.type.tensor_type.shape.dim) == rank]
    model.graph.node.add(op_type="Identity", input=[given.name], output=[wanted.name])
    given.name = wanted.name
    del model.graph.output[:]
    model.graph.output.append(given)
    onnx.save(model, to)
    return to


def opened(path: Path, stack: ExitStack) -> Session:
    """A file in ONNX Runtime, one thread."""
    return stack.enter_context(make_runtime("onnxruntime").open(path, threads=1))


def nncf_int8(model: Path, few: Dataset, task: Task, path: Path) -> None:
    """NNCF's INT8 for transformers, with its defaults."""
    import nncf

    batch = [inputs for _, inputs in batches(few, task, 1)]
    found = nncf.quantize(
        onnx.load(model), nncf.Dataset(batch), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(batch)
    )
    onnx.save(found, path)


class Reader(CalibrationDataReader):
    """Samples for ONNX Runtime's calibration, one a batch."""

    def __init__(self, few: Dataset, task: Task) -> None:
        self.batches = (inputs for _, inputs in batches(few, task, 1))

    def get_next(self) -> Arrays | None:
        """The next sample's inputs; None behind the last."""
        found = next(self.batches, None)
        return None if found is None else {name: np.asarray(array) for name, array in found.items()}


if __name__ == "__main__":
    main()
