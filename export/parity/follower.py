"""Following the outputs of a model from the original to the HTTP response, step by step."""

import tempfile
from pathlib import Path

from export.candidates.collect_evidence import PARITY_SAMPLES
from export.capture.parity import relative_difference
from export.parity.model_step import EXACTNESS, IDENTICAL, ModelStep, Serving
from export.parity.step_list import StepList
from export.sources import check_original, open_original_source
from export.validation.validate import fidelity_of
from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact, Choice
from laconic.artifacts.parity_ledger import ParityLedger, ParityRow
from laconic.artifacts.verdict import Comparison
from laconic.data.dataset import Dataset
from laconic.data.reader import make_dataset, read
from laconic.errors import CaptureError, RuntimeFailure, UnprovenArtifact, UsageError
from laconic.progress import Steps
from laconic.runtimes.predict import predict
from laconic.tasks.task import Task


def make_parity_ledger(
    artifact: Artifact,
    original: Path,
    choice: Choice,
    serving: Serving,
    *,
    data: Path | None = None,
    builder: str | None = None,
    trust: bool = False,
    steps: Steps | None = None,
) -> ParityLedger:
    """Follow the outputs of a few samples, each in a batch of its own, from the original to the HTTP response.

    data: a file of samples; synthetic examples of the task without one. builder, trust: as for `open_original_source`.
    Raises SourceError for an original that is another model, UsageError for a model that writes texts, DataError, and
    what opening either raises.
    """
    task = artifact.task()
    if task.generation is not None:
        raise UsageError(
            f"the ledger follows a model that is one graph, and {artifact.name} is an encoder and a decoder. Leave out "
            f"--ledger; the verdict compares both with the original"
        )
    dataset = read_samples(data, task)
    source = open_original_source(original, artifact.path, builder=builder, trust=trust)
    check_original(source, original, artifact.path, artifact.manifest)
    with tempfile.TemporaryDirectory() as folder:
        bounded = data is not None or not artifact.manifest.data
        listed = StepList(artifact, source, choice, serving, Path(folder), bounded=bounded, trust=trust)
        follower = Follower(task, dataset, steps or Steps())
        rows = tuple(follower.follow_step(each) for each in listed)
    return ParityLedger(artifact=artifact.name, samples=len(dataset), data=dataset.name, bounded=bounded, rows=rows)


def read_samples(data: Path | None, task: Task) -> Dataset:
    """Read at most PARITY_SAMPLES samples of a file, or as many synthetic examples."""
    if data is None:
        return make_dataset(task.examples(PARITY_SAMPLES), task, name="made-up samples")
    return read(data, task).take(PARITY_SAMPLES)


class Follower:
    """Runs the samples through the steps, and compares the outputs of each with those before."""

    def __init__(self, task: Task, dataset: Dataset, steps: Steps) -> None:
        self.task = task
        self.dataset = dataset
        self.steps = steps
        self.outputs: dict[str, Arrays] = {}

    def follow_step(self, model: ModelStep) -> ParityRow:
        """Run one step, compare it, and find where it diverges if it misses what is required of the step itself."""
        if model.open is None:
            return ParityRow(step=model.name, ran=model.ran, skipped=model.skipped)
        try:
            with self.steps.step(model.name, len(self.dataset)) as step, model.open() as session:
                outputs = predict(session, self.task, self.dataset, step, rows=1)
            comparisons = tuple(self.compare(model, outputs))
        except (CaptureError, RuntimeFailure, UnprovenArtifact) as error:
            if not self.outputs:  # nothing can be compared without the original
                raise
            return ParityRow(step=model.name, ran=model.ran, refused=str(error))
        self.outputs[model.name] = outputs
        divergence = None
        if comparisons and not comparisons[0].passed and model.explain is not None:
            with self.steps.step("find the divergence"):
                samples = [self.task.encode([sample]) for sample in self.dataset.samples]
                divergence = model.explain(samples)
        return ParityRow(step=model.name, ran=model.ran, comparisons=comparisons, divergence=divergence)

    def compare(self, model: ModelStep, found: Arrays) -> list[Comparison]:
        """Compare a step's outputs with those of the step before it, and with the original's."""
        if not self.outputs:
            return []
        first, last = next(iter(self.outputs)), list(self.outputs)[-1]
        before = self.outputs[last]
        figures = fidelity_of(self.task, before, found)
        required = dict(model.required) if last in model.before else {}
        if EXACTNESS in required:
            figures[EXACTNESS] = round(max(1 - relative_difference(before, found, self.task.align), 0.0), 9)
        if IDENTICAL in required:
            figures[IDENTICAL] = sum(is_identical(before, found, row) for row in range(self.count)) / self.count
        if last == first:
            required |= model.required_of_original
        comparisons = [self.make_comparison(model, last, figures, required)]
        if last != first:
            whole = fidelity_of(self.task, self.outputs[first], found)
            comparisons.append(self.make_comparison(model, first, whole, dict(model.required_of_original)))
        return comparisons

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self.dataset)

    def make_comparison(
        self, model: ModelStep, against: str, figures: dict[str, float], required: dict[str, float]
    ) -> Comparison:
        """Make the comparison of a step with another one."""
        return Comparison(subject=model.name, against=against, samples=self.count, figures=figures, required=required)


def is_identical(before: Arrays, actual: Arrays, row: int) -> bool:
    """Return whether all outputs of a sample are the same to the bit."""
    return all(
        before[name].dtype == array.dtype and before[name][row].tobytes() == array[row].tobytes()
        for name, array in actual.items()
    )
