"""The outputs that a verdict is derived from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.build import EngineOption
from laconic.arrays import Arrays
from laconic.data.dataset import Dataset
from laconic.hardware import cores
from laconic.runtimes.predict import predict
from laconic.tasks.task import Task

GOLDEN_BATCHES = (1, 4)
"""Sizes of the golden batches."""

PARITY_SAMPLES = 40
"""Samples of the parity checks: run one by one, in one batch, and by the graph run node by node."""


@dataclass(frozen=True)
class Evidence:
    """The outputs that a verdict is derived from, each [samples, ...] by name.

    capture_error: the captured graph's largest error against the module, relative to the largest output; None if the
    source was a graph. original: the source's outputs for the test samples; artifact: the engine's outputs for them;
    labels: of the test samples, if there are any. For a few of the samples, plain: outputs of the artifact's graph run
    node by node; alone: of the engine, one sample at a time; together: of the engine, in one batch. made_up: whether
    the samples are synthetic examples of the task, because no samples were given. kinds: of the test samples, by the
    rows that name one; empty where none does. reference: whether the engine is not on this machine, so that all of the
    artifact's outputs are those of its graph run node by node.
    """

    capture_error: float | None
    original: Arrays
    artifact: Arrays
    labels: list[Any] | None
    plain: Arrays
    alone: Arrays
    together: Arrays
    made_up: bool = False
    kinds: tuple[str, ...] = ()
    reference: bool = False


def collect_evidence(
    option: EngineOption,
    model: Path,
    task: Task,
    judge: Dataset,
    *,
    original: Arrays,
    capture_error: float | None,
    made_up: bool,
    seed: int,
) -> tuple[Evidence, list[tuple[Arrays, Arrays]]]:
    """Run an engine on the inputs of all parity and drift checks, and on the golden batches.

    judge: the test samples. original: the source's outputs for them, [samples, ...] by name. Returns the evidence, and
    the golden pairs of inputs and outputs.
    """
    few = judge.take(PARITY_SAMPLES, seed)
    with option.open(model, 1) as session:
        artifact = predict(session, task, judge)
        alone = predict(session, task, few, rows=1)
        together = predict(session, task, few, rows=len(few))
        batches = [task.encode(few.samples[:rows]) for rows in GOLDEN_BATCHES]
        golden = [(inputs, session.run(inputs)) for inputs in batches]
    with option.open_reference(model, cores()) as session:
        plain = predict(session, task, few, rows=1)
    evidence = Evidence(
        capture_error=capture_error,
        original=original,
        artifact=artifact,
        labels=judge.labels,
        plain=plain,
        alone=alone,
        together=together,
        made_up=made_up,
        kinds=judge.kinds,
        reference=option.reference,
    )
    return evidence, golden
