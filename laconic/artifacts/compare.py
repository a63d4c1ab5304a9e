"""Two artifacts side by side."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from laconic.artifacts.artifact import Artifact
from laconic.artifacts.gain import amount, milliseconds, nines
from laconic.artifacts.record import Record
from laconic.data.dataset import read
from laconic.errors import UsageError
from laconic.hardware import cores
from laconic.runtimes.predict import predict
from laconic.timing.measurements import ORIGINAL, Timing

Step = tuple[str, int]
"""A stage of a history: its name, and how often that was there before."""


def compare(first: Path, second: Path, data: Path | None = None, runtime: str | None = None) -> dict[str, Any]:
    """What two artifacts are and where they differ, JSON-ready.

    data: samples that both answer; their answers are compared with each other, and with the labels, where there are
    any. runtime: the engine for that; by default each one's own.
    Raises ArtifactError, UsageError for two that do not do the same, DataError.
    """
    pair = (Artifact.load(first), Artifact.load(second))
    check_same_job(*pair)
    sides = [side(artifact) for artifact in pair]
    found: dict[str, Any] = {"a": sides[0], "b": sides[1], "differ": list(differences(*pair))}
    if data is not None:
        found["agreement"] = agreement(*pair, data, runtime)
    return found


def check_same_job(first: Artifact, second: Artifact) -> None:
    """Raise UsageError unless both are for one task."""
    if first.manifest.task != second.manifest.task:
        raise UsageError(
            f"{first.path} is for {first.manifest.task}, {second.path} for {second.manifest.task}: there is nothing to "
            f"compare. Give two artifacts of one task"
        )


def side(artifact: Artifact) -> dict[str, Any]:
    """One artifact in figures, JSON-ready. latency: seconds for one sample; throughput: rows per second at the knee;
    speedup: of one sample, over the original; all as they were timed when it was made."""
    manifest, measured, verdict = artifact.manifest, artifact.measured, artifact.manifest.verdict
    lone, full = (own(measured.timings, batch) for batch in (1, measured.knee))
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
        "passed": verdict is not None and verdict.passed,
        "layers": dict(Counter(manifest.precision.values()).most_common()),
        "arithmetic": measured.arithmetic,
        "stages": [record.stage for record in manifest.history],
        "machine": measured.machine.processor,
    }


def own(timings: tuple[Timing, ...], batch: int) -> Timing | None:
    """The artifact's own timing at a batch size."""
    return next((time for time in timings if time.engine != ORIGINAL and time.batch == batch), None)


def differences(first: Artifact, second: Artifact) -> Iterator[dict[str, Any]]:
    """Settings that are not the same: what it is, the one's value, the other's. A stage that only one of them went
    through is one row, with what its recipe says of it."""
    shared = steps(first).keys() & steps(second).keys()
    one, two = flat(first, shared), flat(second, shared)
    for name in dict.fromkeys((*one, *two)):
        if one.get(name) != two.get(name):
            yield {"setting": name, "a": one.get(name), "b": two.get(name)}


def steps(artifact: Artifact) -> dict[Step, Record]:
    """The history by its steps."""
    seen: Counter[str] = Counter()
    found = {}
    for record in artifact.manifest.history:
        found[record.stage, seen[record.stage]] = record
        seen[record.stage] += 1
    return found


def flat(artifact: Artifact, shared: Collection[Step]) -> dict[str, Any]:
    """Everything that was set, by name. shared: the stages that are looked into."""
    manifest = artifact.manifest
    found: dict[str, Any] = {
        "source": manifest.source.get("kind"),
        "target": manifest.target,
        "engine": manifest.placement,
        "compute": manifest.compute,
        "inputs": [spec.describe() for spec in manifest.inputs],
        "outputs": [spec.describe() for spec in manifest.outputs],
    }
    for step, record in steps(artifact).items():
        name = f"{step[0]} ({step[1] + 1})" if step[1] else step[0]
        if step in shared:
            found |= {f"{name}, {setting}": value for setting, value in record.config.items()}
        else:
            found[name] = given(manifest.recipe, step) or "as it is by default"
    found |= {f"goal.{name}": value for name, value in manifest.recipe.get("goal", {}).items()}
    found |= {"seed": manifest.recipe.get("seed")}
    found |= {f"samples to {role}": fingerprint for role, fingerprint in manifest.data.items()}
    return found | {f"version of {name}": version for name, version in manifest.versions.items()}


def given(recipe: Mapping[str, Any], step: Step) -> dict[str, Any]:
    """What a recipe says of a stage; nothing where it leaves it as it is, or where the stage is of an earlier run."""
    named = [each["config"] for each in recipe.get("stages", []) if each["name"] == step[0]]
    return dict(named[step[1]]) if step[1] < len(named) else {}


def agreement(first: Artifact, second: Artifact, data: Path, runtime: str | None) -> dict[str, Any]:
    """How alike the answers to the same samples are: fidelity of the second's to the first's, and each one's metric
    where the samples have labels. Raises UsageError for answers of different shapes."""
    shapes = [[(spec.name, spec.shape) for spec in artifact.manifest.outputs] for artifact in (first, second)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"{first.path} answers {[spec.describe() for spec in first.manifest.outputs]}, {second.path} "
            f"{[spec.describe() for spec in second.manifest.outputs]}: they cannot be compared. Leave out --data"
        )
    task = first.task()
    dataset = read(data, task)
    found = []
    for artifact in (first, second):
        with artifact.open(runtime, threads=cores()) as session:
            found.append(predict(session, artifact.task(), dataset))
    fidelity = task.fidelity(*found)
    figures: dict[str, Any] = {
        "samples": len(dataset),
        "fidelity": float(fidelity.mean()),
        "fidelity_worst": float(fidelity.min()),
        **task.figures(*found),
    }
    if dataset.labels is not None:
        every = np.arange(len(dataset))
        one, two = (task.scorer(each, dataset.labels)(every) for each in found)
        figures |= {"metric": task.metric, "metric_a": float(one), "metric_b": float(two)}
    return figures


def table(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What was found, for people: what it is, the one, the other."""
    sides = (found["a"], found["b"])

    def row(name: str, key: str, write: Callable[[Any], str]) -> tuple[str, str, str]:
        one, two = ("" if each[key] is None else write(each[key]) for each in sides)
        return name, one, two

    yield row("engine", "engine", str)
    yield row("size", "size", amount)
    yield row("latency, one sample", "latency", milliseconds)
    yield row("speed-up, one sample", "speedup", "{:.2f} x".format)
    yield row("throughput", "throughput", "{:.0f} rows/s".format)
    yield row("fidelity, mean", "fidelity", nines)
    yield row("fidelity, worst", "fidelity_worst", nines)
    if any(each["metric"] is not None for each in sides):
        yield row("metric", "metric", "{:.4f}".format)
    yield row("compared with", "against", str)
    yield row("verdict", "passed", lambda passed: "passed" if passed else "failed")
    yield row("layers", "layers", lambda layers: "\n".join(f"{count} {name}" for name, count in layers.items()))
    yield row("stages", "stages", "\n".join)
