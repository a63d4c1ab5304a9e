"""all-MiniLM-L6-v2: what compression gains and costs, beside other ways to run the same model."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from peers import Way, in_torch, peers, pruned

from export.sources import as_checkpoint_source, capture_graph, open_source
from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.gain import format_speedup
from laconic.cache import VARIABLE, Cache
from laconic.data.reader import make_dataset, read
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.runtimes.predict import predict
from laconic.runtimes.runtime import Session
from laconic.tasks.task import Task
from laconic.timing.benchmark import benchmark_sessions
from laconic.timing.measurements import Timing
from laconic.units import format_seconds

CALIBRATE = 300
"""Texts that the other tools calibrate with."""
FAST = Path(__file__).parents[1] / "examples" / "fast.yaml"
LACONIC = Path(sys.executable).parent / "laconic"
ORIGINAL = "torch eager, FP32"
SUMMARY = (
    ORIGINAL, "torch.compile, BF16", "torch.compile, INT8", "`compress` (", "`compress --fidelity 0.999` (",
    "ONNX Runtime, dynamic", "NNCF, INT8 (OpenVINO",
)  # fmt: skip
"""The beginnings of the names of the ways in the summary."""
SUMMARY_BATCH = 8
WAYS = {
    "`export`": ["export"],
    "`compress`": ["compress"],
    "`compress --fidelity 0.999`": ["compress", "--fidelity", "0.999"],
    "`compress --fidelity 0.9999`": ["compress", "--fidelity", "0.9999"],
}
TOGETHER = 40
"""Texts that are answered alone, and in one batch."""


def artifacts(source: Path, data: Path, folder: Path, *, fast: bool) -> dict[str, Artifact]:
    """Made by the commands that people use. fast: the recipe that looks at no layer, which cannot reach more."""
    found = {}
    recipe: list[str | Path] = ["--recipe", FAST] if fast else []
    for number, (name, words) in enumerate(list(WAYS.items())[: 2 if fast else None]):
        path = folder / f"minilm-{number}.laconic"
        command: list[str | Path] = [
            LACONIC,
            *words,
            source,
            "--data",
            data,
            "-o",
            path,
            *(recipe if words[0] == "compress" else []),
        ]
        environment = os.environ | {VARIABLE: str(folder / "cache")}
        code = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment).returncode
        if code not in (0, 3):  # 3: the goal was missed; the figures are what is wanted here
            sys.exit(f"bench: {name} ended with exit code {code}")
        found[name] = Artifact.load(path)
    return found


def ways(source: Path, made: Mapping[str, Artifact], data: Path, folder: Path, stack: ExitStack) -> Iterator[Way]:
    """Every way to run the model, with one thread. data: what other tools calibrate with."""
    cache = Cache(folder / "cache")
    original = open_source(Recipe.default(str(source), stages=[]), cache, trust=False)
    yield ORIGINAL, stack.enter_context(original.open(1)), original.size
    for name, artifact in made.items():
        where = f"{artifact.manifest.placement}, {artifact.manifest.compute}"
        yield f"{name} ({where})", stack.enter_context(artifact.open()), artifact.size
    graph = capture_graph(original, cache).path  # as other tools have it, and not placed for an engine
    checkpoint = as_checkpoint_source(original).checkpoint
    few = read(data, checkpoint.task).take(CALIBRATE)
    yield from peers(graph, checkpoint, few, folder, stack)
    yield in_torch("Torch-Pruning alone (torch eager)", pruned(checkpoint.module, checkpoint.task), checkpoint, stack)


def measure(
    source: Path,
    made: Mapping[str, Artifact],
    data: Path,
    unseen: Mapping[str, list[str]],
    folder: Path,
    rounds: int,
    sizes: list[int],
) -> dict[str, Any]:
    """Fidelity, independence of the batch, and speed, each of all ways in one run."""
    task = made["`export`"].task()
    with ExitStack() as stack:
        found = list(ways(source, made, data, folder, stack))
        sessions = {name: session for name, session, _ in found}
        rows = list(faithful(sessions, task, unseen))
        for row, (_, _, size) in zip(rows, found, strict=True):
            row["MB"] = size / 1e6
        with Steps().step("time all ways in turns", len(sizes)) as step:
            times = benchmark_sessions(
                sessions,
                task,
                baseline=ORIGINAL,
                batches=tuple(sizes),
                threads=1,
                step=step,
                rounds=rounds,
                patience=math.inf,
            )
    return {
        "fidelity": rows,
        "timings": [time.model_dump() for time in times],
        "unseen": {k: len(v) for k, v in unseen.items()},
    }


def faithful(sessions: Mapping[str, Session], task: Task, unseen: Mapping[str, list[str]]) -> Iterator[dict[str, Any]]:
    """For each way, how near its answers are to the original's on texts that nothing has seen."""
    data = make_dataset([text for kind in unseen.values() for text in kind], task)
    few = data.take(TOGETHER)
    kinds = np.repeat(np.arange(len(unseen)), [len(kind) for kind in unseen.values()])
    reference: Arrays = {}
    with Steps().step("ask all ways", len(sessions)) as step:
        for name, session in sessions.items():
            given = predict(session, task, data)
            reference = reference or given
            cosine = task.fidelity(reference, given)
            company = task.fidelity(predict(session, task, few, rows=1), predict(session, task, few, rows=len(few)))
            step.advance()
            yield {
                "way": name,
                "mean": cosine.mean(),
                "worst": cosine.min(),
                **{each.name: each.value for each in task.agreements(reference, given)},
                "kinds": {
                    kind: [
                        cosine[kinds == n].mean(),
                        cosine[kinds == n].min(),
                        alike(task, reference, given, kinds == n),
                    ]
                    for n, kind in enumerate(unseen)
                },
                "batch": [company.mean(), company.min()],
            }


def speed_rows(timings: list[dict[str, Any]], unit: str = "x") -> tuple[list[str], list[list[str]]]:
    """A column for each batch size; the first way's in milliseconds, what the others' speed-ups refer to."""
    times = [Timing.model_validate(time) for time in timings]
    sizes = list(dict.fromkeys(time.batch for time in times))
    rows = []
    for way in dict.fromkeys(time.engine for time in times):
        own = [time for time in times if time.engine == way]
        first = way == times[0].engine
        rows.append([way, *(f"1 ({format_seconds(time.seconds)})" if first else format_speedup(time) for time in own)])
    return ["", *(f"batch {size}" for size in sizes)], rows


def summary_rows(found: list[dict[str, Any]], timings: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Size, speed at batch 8 and faithfulness of the ways that people choose between."""
    eights = [time for time in timings if time["batch"] == SUMMARY_BATCH]
    speeds = {row[0]: row[1] for row in speed_rows(eights)[1]}
    sizes = {each["way"]: f"{each['MB']:.1f}" for each in found}
    head, rows = fidelity_rows(found)
    chosen = [row for row in rows if row[0].startswith(SUMMARY)]
    return ["", "MB", "speed", *head[1:]], [[row[0], sizes[row[0]], speeds[row[0]], *row[1:]] for row in chosen]


def alike(task: Task, reference: Arrays, given: Arrays, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> float:
    """Spearman's correlation of the similarities among some of the texts."""
    one, other = ({name: array[chosen] for name, array in each.items()} for each in (reference, given))
    return {each.name: each.value for each in task.agreements(one, other)}["similarity_spearman"]


def fidelity_rows(found: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Faithfulness of each way."""
    rows = [
        [
            each["way"],
            *(f"{each[key]:.5f}" for key in ("mean", "worst", "similarity_spearman")),
            f"{each['neighbour_agreement']:.3f}",
        ]
        for each in found
    ]
    return ["", "cosine, mean", "worst", "Spearman", "top-1"], rows


def batch_rows(found: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Size, and the cosine of an answer given in company with the same given alone."""
    rows = [[each["way"], f"{each['MB']:.1f}", *(f"{value:.6f}" for value in each["batch"])] for each in found]
    return ["", "MB", "alone or in a batch, mean", "worst"], rows


def kind_rows(found: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The cosine, and Spearman's correlation, by kind of text."""
    kinds = list(found[0]["kinds"])
    head = ["", *(f"{kind}: {figure}" for kind in kinds for figure in ("mean", "worst", "Spearman"))]
    return head, [[each["way"], *(f"{value:.5f}" for kind in kinds for value in each["kinds"][kind])] for each in found]
