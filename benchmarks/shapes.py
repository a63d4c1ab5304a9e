"""Models of the shapes of ResNet-50, BERT-base and ViT-B/16: Laconic's default beside other tools, error and speed.

    python benchmarks/shapes.py [SHAPE ...] [--rounds N] [--cache FOLDER]

The weights are random, so the error shows what a tool rounds, and not what that costs a trained model. `laconic
compress` runs from an empty cache, and its seconds are kept beside the artifact: what is there is not made again. All
ways take turns, in one thread, and are compared by processor time, so that other programs disturb little. NNCF has
rows where it is installed, BF16 where the processor has its instructions. Half an hour for all three on two cores.
"""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from family_checkpoint import CLASSES, sharpen, write_images
from inputs import model_folder, texts
from minilm import ORIGINAL, speed_rows
from peers import peers
from results import Results, make_parser
from torch import nn

from export.sources import as_checkpoint_source, capture_graph, open_source
from laconic.artifacts.artifact import Artifact
from laconic.cache import VARIABLE, Cache
from laconic.data.dataset import Dataset
from laconic.data.reader import read
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.runtimes.predict import predict
from laconic.runtimes.runtime import Session
from laconic.tasks.task import Task
from laconic.timing.benchmark import benchmark_sessions

CALIBRATE = 64
"""Samples that the other tools calibrate with."""
COMPARED = 32
"""Samples whose outputs are compared: the last ones."""
SAMPLES = 600
"""Texts for `laconic`, of which there are 120 images."""
BATCHES = (1, 8)
SHIFT = 0.1
"""Of the biases of batch normalization, whose outputs have a deviation of about 1."""
LABELS = (*CLASSES, *(f"class {number}" for number in range(len(CLASSES), 1000)))
Command = list[str | Path]


@dataclass(frozen=True)
class Shape:
    """A published model's shape. config, model: classes of transformers, whose defaults are the shape. processor: of
    images, with its settings; None where it reads texts. attention: whether it is a transformer."""

    config: str
    model: str
    processor: str | None
    pixels: dict[str, Any]
    attention: bool

    def write(self, folder: Path, tokenizer: Path) -> None:
        """Write the checkpoint with random weights of a fixed seed. tokenizer: a folder with that of BERT."""
        transformers.set_seed(0)
        labels = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
        config = getattr(transformers, self.config)(**(labels if self.processor else {}))
        model = getattr(transformers, self.model)(config)
        shift_normalization(model)
        sharpen(model.eval()).save_pretrained(folder)
        if self.processor:
            getattr(transformers, self.processor)(**self.pixels).save_pretrained(folder)
        else:
            transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def shift_normalization(model: nn.Module) -> None:
    """Draw the biases of batch normalization, which start at zero: folded into the convolutions they would be left out,
    as in no trained model."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias, std=SHIFT)


SQUARE = {"size": {"height": 224, "width": 224}}
SHAPES = {
    "ResNet-50": Shape(
        "ResNetConfig", "ResNetForImageClassification", "ConvNextImageProcessorPil", {"size": {"shortest_edge": 224}},
        attention=False,
    ),
    "BERT-base": Shape("BertConfig", "BertModel", None, {}, attention=True),
    "ViT-B": Shape("ViTConfig", "ViTForImageClassification", "ViTImageProcessorPil", SQUARE, attention=True),
}  # fmt: skip


def main() -> None:
    """Make, measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=7, help="how often each way is run")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where inputs and artifacts go")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    for name in arguments.shapes:
        folder = arguments.cache / name
        folder.mkdir(parents=True, exist_ok=True)
        measure(
            name, SHAPES[name], folder, arguments.rounds, results, *write_inputs(SHAPES[name], folder, arguments.cache)
        )


def write_inputs(shape: Shape, folder: Path, cache: Path) -> tuple[Path, Path]:
    """The checkpoint and its samples, unless they are there."""
    source = folder / "source"
    if not source.exists():
        shape.write(source, model_folder(cache))
    if shape.processor is None:
        return source, texts(cache, SAMPLES)[0]
    images = folder / "images"
    return source, images if images.exists() else write_images(images)


def measure(name: str, shape: Shape, folder: Path, rounds: int, results: Results, source: Path, data: Path) -> None:
    """Print the time of `laconic compress`, and the table of all ways."""
    made = make_artifact(source, data, folder)
    artifact = Artifact.load(folder / "compress")
    task = artifact.task()
    samples = read(data, task)
    few, compared = samples.take(CALIBRATE), samples.rows(range(len(samples) - COMPARED, len(samples)), "compared")
    cache = Cache(folder / "cache")
    original = open_source(Recipe.default(str(source), stages=[]), cache, trust=False)
    with ExitStack() as stack:
        graph = capture_graph(original, cache).path
        found = [
            (ORIGINAL, stack.enter_context(original.open(1)), original.size),
            (describe(artifact), stack.enter_context(artifact.open()), artifact.size),
            *peers(graph, as_checkpoint_source(original).checkpoint, few, folder, stack, attention=shape.attention),
        ]
        sessions = {way: session for way, session, _ in found}
        errors = measure_errors(sessions, task, compared)
        with Steps().step("time all ways in turns", len(BATCHES)) as step:
            times = benchmark_sessions(
                sessions, task, baseline=ORIGINAL, batches=BATCHES, threads=1, step=step, rounds=rounds,
                patience=math.inf, clock=time.process_time,
            )  # fmt: skip
    print(f"\n### {name}\n\n`laconic compress` from an empty cache, exit code {made['code']}:\n")
    seconds = [f"{made['wall']:.0f} s", f"{made['processor']:.0f} s"]
    results.table(f"{name}: laconic compress", ["from an empty cache", "of the processor"], [seconds])
    print(f"\nOne thread, {rounds} rounds, by processor time, medians and quartiles.\n")
    head, rows = speed_rows([each.model_dump() for each in times])
    columns = ["", "MB", "error, mean", "largest", *head[1:]]
    results.table(
        name,
        columns,
        [
            [row[0], f"{size / 1e6:.1f}", *(f"{each:.4f}" for each in errors[way]), *row[1:]]
            for row, (way, _, size) in zip(rows, found, strict=True)
        ],
    )


def describe(artifact: Artifact) -> str:
    """The name of the row: what was chosen."""
    return f"`laconic compress` ({artifact.manifest.placement}, {artifact.manifest.compute})"


def make_artifact(source: Path, data: Path, folder: Path) -> dict[str, float]:
    """Compress with the default recipe from an empty cache, unless that was done. Returns wall and processor seconds,
    and the exit code."""
    kept = folder / "compress.json"
    if not kept.exists():
        shutil.rmtree(folder / "cache", ignore_errors=True)
        shutil.rmtree(folder / "compress", ignore_errors=True)
        before, start = processor_seconds(), time.perf_counter()
        code = run_command(["compress", source, "--data", data, "-o", folder / "compress"], folder)
        seconds = {"wall": time.perf_counter() - start, "processor": processor_seconds() - before, "code": code}
        kept.write_text(json.dumps(seconds), encoding="utf-8")
    made: dict[str, float] = json.loads(kept.read_text(encoding="utf-8"))
    return made


def run_command(words: Command, folder: Path) -> int:
    """Run a command of Laconic in one process. Returns its exit code; 3 says that the goal was missed."""
    command: Command = [sys.executable, "-m", "laconic", *words]
    code = subprocess.run(command, env=os.environ | {VARIABLE: str(folder / "cache")}).returncode
    if code not in (0, 3):
        sys.exit(f"bench: laconic {words[0]} ended with exit code {code}")
    return code


def processor_seconds() -> float:
    """The processor time of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_errors(sessions: dict[str, Session], task: Task, compared: Dataset) -> dict[str, tuple[float, float]]:
    """By way, the norm of the difference from the original's output relative to the norm of that: mean and largest."""
    (_, original), *_ = sessions.items()
    reference = predict(original, task, compared, rows=1)
    found = {}
    with Steps().step("compare the outputs", len(sessions)) as step:
        for name, session in sessions.items():
            outputs = predict(session, task, compared, rows=1)
            errors = [
                np.linalg.norm(outputs[key][row] - each) / np.linalg.norm(each)
                for key in reference
                for row, each in enumerate(reference[key])
            ]
            found[name] = float(np.mean(errors)), float(np.max(errors))
            step.advance()
    return found


if __name__ == "__main__":
    main()
