"""Comparison of two artifacts: figures, settings and, on samples, their outputs."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from laconic.artifacts.artifact import Artifact
from laconic.artifacts.record import Record
from laconic.data.reader import read
from laconic.errors import UsageError
from laconic.hardware import cores
from laconic.runtimes.predict import predict
from laconic.tasks.agreement import ALL
from laconic.tasks.fidelity import make_finite, measure_fidelity
from laconic.timing.measurements import ORIGINAL, Timing
from laconic.units import format_bytes, format_fidelity, format_seconds

HistoryKey = tuple[str, int]
"""A stage of a history: its name, and the number of earlier stages of that name."""


def compare(first: Path, second: Path, data: Path | None = None, runtime: str | None = None) -> dict[str, Any]:
    """Compare two artifacts: figures of both and the settings that differ, JSON-ready.

    data: samples to run both on; the outputs are compared with each other and with labels, if there are any. runtime:
    the engine for that; by default each artifact's own. Raises ArtifactError, UsageError for different tasks,
    DataError.
    """
    pair = (Artifact.load(first), Artifact.load(second))
    check_same_task(*pair)
    sides = [summarize(artifact) for artifact in pair]
    comparison: dict[str, Any] = {"a": sides[0], "b": sides[1], "differ": list(list_differences(*pair))}
    if data is not None:
        comparison["agreement"] = measure_agreement(*pair, data, runtime)
    return comparison


def check_same_task(first: Artifact, second: Artifact) -> None:
    """Raise UsageError unless both are for one task."""
    if first.manifest.task != second.manifest.task:
        raise UsageError(
            f"{first.path} is for {first.manifest.task}, {second.path} for {second.manifest.task}: there is nothing to "
            f"compare. Give two artifacts of one task"
        )


def summarize(artifact: Artifact) -> dict[str, Any]:
    """Summarize one artifact in figures, JSON-ready.

    latency: seconds for one sample; throughput: rows per second at the knee; speedup: of one sample, over the original;
    all as measured when the artifact was made.
    """
    manifest, measured, verdict = artifact.manifest, artifact.measured, artifact.manifest.verdict
    lone, full = (find_own_timing(measured.timings, batch) for batch in (1, measured.knee))
    drift = verdict.drift[0] if verdict and verdict.drift else None
    return {
        "name": artifact.name,
        "path": str(artifact.path),
        "task": manifest.task,
        "engine": f"{manifest.placement}, {manifest.compute}",
        "size": artifact.size,
        "latency": lone and lone.seconds,
        "speedup": lone and lone.speedup,
        "throughput": full and full.rows_per_second,
        "fidelity": drift and drift.figures.get("fidelity"),
        "fidelity_worst": drift and drift.figures.get("fidelity_worst"),
        "metric": drift and drift.figures.get("metric"),
        "against": drift and drift.against,
        "verdict": verdict.state if verdict else "none",
        "layers": dict(Counter(manifest.precision.values()).most_common()),
        "arithmetic": measured.arithmetic,
        "stages": [record.stage for record in manifest.history],
        "machine": measured.machine.processor,
    }


def find_own_timing(timings: tuple[Timing, ...], batch: int) -> Timing | None:
    """Find the artifact's own timing at a batch size."""
    return next((time for time in timings if time.engine != ORIGINAL and time.batch == batch), None)


def list_differences(first: Artifact, second: Artifact) -> Iterator[dict[str, Any]]:
    """List the settings that differ: name, and the value of each artifact.

    A stage that only one of them went through is one row, with its settings in the recipe.
    """
    shared = index_history(first).keys() & index_history(second).keys()
    one, two = flatten_settings(first, shared), flatten_settings(second, shared)
    for name in dict.fromkeys((*one, *two)):
        if one.get(name) != two.get(name):
            yield {"setting": name, "a": one.get(name), "b": two.get(name)}


def index_history(artifact: Artifact) -> dict[HistoryKey, Record]:
    """Index the records of the history by stage."""
    seen: Counter[str] = Counter()
    records = {}
    for record in artifact.manifest.history:
        records[record.stage, seen[record.stage]] = record
        seen[record.stage] += 1
    return records


def flatten_settings(artifact: Artifact, shared: Collection[HistoryKey]) -> dict[str, Any]:
    """Return all settings of an artifact by name. shared: the stages whose settings are listed one by one."""
    manifest = artifact.manifest
    settings: dict[str, Any] = {
        "source": manifest.source.get("kind"),
        "target": manifest.target,
        "engine": manifest.placement,
        "compute": manifest.compute,
        "inputs": [spec.describe() for spec in manifest.inputs],
        "outputs": [spec.describe() for spec in manifest.outputs],
    }
    for step, record in index_history(artifact).items():
        name = f"{step[0]} ({step[1] + 1})" if step[1] else step[0]
        if step in shared:
            settings |= {f"{name}, {setting}": value for setting, value in record.config.items()}
        else:
            settings[name] = find_recipe_config(manifest.recipe, step) or "as it is by default"
    goal = manifest.recipe.get("goal")
    settings |= {f"goal.{name}": value for name, value in goal.items()} if isinstance(goal, Mapping) else {}
    settings |= {"seed": manifest.recipe.get("seed")}
    settings |= {f"samples to {role}": fingerprint for role, fingerprint in manifest.data.items()}
    return settings | {f"version of {name}": version for name, version in manifest.versions.items()}


def find_recipe_config(recipe: Mapping[str, Any], step: HistoryKey) -> dict[str, Any]:
    """Find the settings of a stage in a recipe; empty for defaults, or for a stage of an earlier run."""
    stages = recipe.get("stages")
    listed = [each for each in stages if isinstance(each, Mapping)] if isinstance(stages, list) else []
    named = [each.get("config") for each in listed if each.get("name") == step[0]]
    config = named[step[1]] if step[1] < len(named) else None
    return dict(config) if isinstance(config, Mapping) else {}


def measure_agreement(first: Artifact, second: Artifact, data: Path, runtime: str | None) -> dict[str, Any]:
    """Measure the fidelity of the second artifact's outputs to the first's, and each one's metric where the samples
    have labels.

    Raises UsageError for outputs of different shapes.
    """
    shapes = [[(spec.name, spec.shape) for spec in artifact.manifest.outputs] for artifact in (first, second)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"{first.path} answers {[spec.describe() for spec in first.manifest.outputs]}, {second.path} "
            f"{[spec.describe() for spec in second.manifest.outputs]}: they cannot be compared. Leave out --data"
        )
    task = first.task()
    dataset = read(data, task)
    predictions = []
    for artifact in (first, second):
        with artifact.open(runtime, threads=cores()) as session:
            predictions.append(predict(session, artifact.task(), dataset))
    fidelity = measure_fidelity(task, *predictions)
    labels = task.label_samples(dataset.samples, dataset.labels)
    agreements = task.agreements(*make_finite(*predictions)[:2], labels)
    figures: dict[str, Any] = {
        "samples": len(dataset),
        "fidelity": float(fidelity.mean()),
        "fidelity_worst": float(fidelity.min()),
        **{each.name: each.value for each in agreements if each.subject == ALL},
    }
    if labels is not None:
        every = np.arange(len(dataset))
        one, two = (task.scorer(each, labels)(every) for each in predictions)
        figures |= {"metric": task.metric, "metric_a": float(one), "metric_b": float(two)}
    return figures


def make_rows(comparison: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Make rows of the comparison for people: name, and a formatted value of each artifact."""
    sides = (comparison["a"], comparison["b"])

    def row(name: str, key: str, write: Callable[[Any], str]) -> tuple[str, str, str]:
        one, two = ("" if each[key] is None else write(each[key]) for each in sides)
        return name, one, two

    yield row("engine", "engine", str)
    yield row("size", "size", format_bytes)
    yield row("latency, one sample", "latency", format_seconds)
    yield row("speed-up, one sample", "speedup", "{:.2f} x".format)
    yield row("throughput", "throughput", "{:.0f} rows/s".format)
    yield row("fidelity, mean", "fidelity", format_fidelity)
    yield row("fidelity, worst", "fidelity_worst", format_fidelity)
    if any(each["metric"] is not None for each in sides):
        yield row("metric", "metric", "{:.4f}".format)
    yield row("compared with", "against", str)
    yield row("verdict", "verdict", str)
    yield row("layers", "layers", lambda layers: "\n".join(f"{count} {name}" for name, count in layers.items()))
    yield row("stages", "stages", "\n".join)
