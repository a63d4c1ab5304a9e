"""Running an engine on the test samples: the outputs that a verdict is derived from, and the golden outputs."""

from pathlib import Path

from export.candidates.engine_option import EngineOption
from export.validation.evidence import Evidence, GraphDeviation
from laconic.arrays import Arrays
from laconic.artifacts.golden import measure_golden_agreement
from laconic.data.dataset import Dataset
from laconic.hardware import cores
from laconic.runtimes.predict import predict
from laconic.tasks.task import Task

GOLDEN_BATCHES = (1, 4)
"""Sizes of the golden batches."""

PARITY_SAMPLES = 40
"""Samples of the parity checks: run one by one, in one batch, and by the graph run node by node; fewer of a large
model."""


def collect_evidence(
    option: EngineOption,
    model: Path,
    task: Task,
    judge: Dataset,
    few: Dataset,
    *,
    original: Arrays,
    deviation: GraphDeviation | None,
    basis: str,
    original_name: str = "original",
) -> tuple[Evidence, list[tuple[Arrays, Arrays]]]:
    """Run an engine on the inputs of all parity and drift checks, and on the golden batches.

    judge: the test samples. few: those of the parity checks. original: the source's outputs for the former, [samples,
    ...] by name. Returns the evidence, and the golden pairs of inputs and outputs.
    """
    # Samples of different shapes share a batch only where the task pads.
    alike = [few.samples[at] for at in range(len(few)) if task.padding or str(few.shapes[at]) == str(few.shapes[0])]
    with option.open(model, 1) as session:
        artifact = predict(session, task, judge)
        alone = predict(session, task, few, rows=1)
        together = predict(session, task, few, rows=len(few))
        batches = [task.encode(alike[:rows]) for rows in GOLDEN_BATCHES]
        golden = [(inputs, session.run(inputs)) for inputs in batches]
    with option.open_reference(model, cores()) as session:
        plain = predict(session, task, few, rows=1)
        golden_agreement = min(measure_golden_agreement(task, golden, session.run).values())
    evidence = Evidence(
        deviation=deviation,
        original=original,
        artifact=artifact,
        labels=task.label_samples(judge.samples, judge.labels),
        plain=plain,
        alone=alone,
        golden_agreement=golden_agreement,
        together=together,
        basis=basis,
        kinds=judge.kinds,
        per_row=judge.per_row,
        describe=judge.describe_sample,
        reference=option.reference,
        original_name=original_name,
    )
    return evidence, golden
