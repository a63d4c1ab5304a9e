"""The folder that is shipped: a model, the proof that it gives the same answers, and what it takes to serve it.

manifest.json       what it is; sealed with its own digest, and holding the digest of every file that is used
model.onnx          the graph, written for one engine
golden.safetensors  a few inputs and the answers they must give, checked at every load
tokenizer.json, labels.json, preprocess.json   as the task needs
measured.json       what was timed, and on which machine: it differs from run to run, so it lives apart
report.html         for people
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from safetensors import SafetensorError
from safetensors.numpy import load_file

from laconic import registry
from laconic.artifacts.record import Record
from laconic.artifacts.verdict import ENGINE, Verdict
from laconic.errors import ArtifactError, CorruptArtifact, MissingPackage, UnknownFormat, UnprovenArtifact, UsageError
from laconic.hashing import FileDigest, check_digest, unseal
from laconic.runtimes.runtime import Compute, Runtime, Session, make_runtime
from laconic.tasks.task import Task
from laconic.tensor import Arrays, TensorSpec
from laconic.timing.measurements import Measurements

FORMAT = 1
MANIFEST = "manifest.json"
MODEL = "model.onnx"
GOLDEN = "golden.safetensors"
MEASURED = "measured.json"
REPORT = "report.html"
GOLDEN_FLOOR = 0.98
"""How faithful a golden answer must be at load. The same engine on another processor (BF16 or not, another INT8
kernel) moved MiniLM's answers by up to 0.003; a processor whose INT8 sums overflow moves them by more than 0.05."""


class Manifest(BaseModel):
    """What the artifact is. The same inputs give the same manifest, byte by byte.

    target: what it was compressed for. placement: the engine that the graph is written for. compute: the arithmetic of
    what is not quantized. batching: whether an answer is independent of who shares its batch; where it is not, the
    model is served one sample at a time. precision: how each layer's weights and activations are kept, by layer. data:
    fingerprint of each file of samples, by role. licence: of the source, as it says itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    task: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    target: str
    placement: str
    compute: Compute
    precision: dict[str, str]
    source: dict[str, Any]
    history: tuple[Record, ...]
    recipe: dict[str, Any]
    verdict: Verdict | None
    batching: bool = True
    versions: dict[str, str]
    data: dict[str, str]
    licence: str | None
    files: dict[str, FileDigest]

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        for name in files:
            if Path(name).name != name:
                raise ValueError(f"{name!r} is not a file of the artifact's own folder")
        return files


class Artifact:
    """An artifact on disk, its digests checked."""

    def __init__(self, path: Path, manifest: Manifest, measured: Measurements) -> None:
        self.path = path
        self.manifest = manifest
        self.measured = measured

    @classmethod
    def load(cls, path: Path) -> "Artifact":
        """Read an artifact and check the digest of every file that will be used.

        Raises ArtifactError where there is none, UnknownFormat for one of a newer format, CorruptArtifact for one
        that is not as it was written.
        """
        if not (path / MANIFEST).is_file():
            what = "a checkpoint" if (path / "model.json").is_file() else "not an artifact"
            raise ArtifactError(f"{path} is {what}: it holds no {MANIFEST}. `laconic compress` makes one")
        manifest, measured = read_manifest(path), read_measurements(path)
        for name, expected in manifest.files.items():
            check_digest(path / name, expected)
        return cls(path, manifest, measured)

    @property
    def name(self) -> str:
        """The name that the model is served under: the stem of the folder."""
        return self.path.resolve().stem

    @property
    def model(self) -> Path:
        """The graph."""
        return self.path / MODEL

    @property
    def size(self) -> int:
        """Bytes that are shipped to serve it."""
        return sum(file.size for file in self.manifest.files.values())

    def task(self) -> Task:
        """The task, with what it needs to make tensors from raw data."""
        if self.manifest.task not in registry.TASKS:  # an address would import whatever the artifact names
            raise ArtifactError(
                f"{self.path} is for task {self.manifest.task!r}, which this version of Laconic does not know. "
                f"{registry.did_you_mean(self.manifest.task, registry.TASKS)}"
            )
        kind = registry.resolve("task", self.manifest.task)
        task: Task = kind.from_assets(self.path, self.manifest.inputs)
        return task

    def require_proof(self) -> None:
        """Raise UnprovenArtifact unless the verdict is there and came out well."""
        verdict = self.manifest.verdict
        if verdict is None:
            raise UnprovenArtifact(f"{self.path} has no verdict. Run `laconic compress` to its end, or say --unproven")
        if not verdict.passed:
            raise UnprovenArtifact(
                f"{self.path} is not faithful enough: {'; '.join(verdict.failures)}. "
                f"Compress with another goal, or say --unproven"
            )

    def golden(self) -> list[tuple[Arrays, Arrays]]:
        """The golden pairs: inputs, and the outputs they must give."""
        try:
            tensors = load_file(self.path / GOLDEN)
        except (SafetensorError, OSError) as error:
            raise CorruptArtifact(f"{self.path / GOLDEN} does not read: {error}") from error
        pairs: dict[str, tuple[Arrays, Arrays]] = {}
        for key, array in sorted(tensors.items()):
            number, side, name = key.split(".", 2)
            pairs.setdefault(number, ({}, {}))[side == "output"][name] = array
        ordered = [spec.name for spec in self.manifest.outputs]
        return [(inputs, {name: outputs[name] for name in ordered}) for inputs, outputs in pairs.values()]

    def runtime(self, name: str | None = None) -> Runtime:
        """The engine to open it with: the named one, the one that it was written for, or any that is installed."""
        if name is not None:
            return make_runtime(name)
        for candidate in dict.fromkeys((self.manifest.placement, "openvino", "onnxruntime")):
            try:
                return make_runtime(candidate)
            except MissingPackage:
                continue
        raise MissingPackage("no engine is installed. Try: pip install 'laconic[cpu]'")

    def open(self, runtime: str | None = None, *, threads: int = 1) -> Session:
        """Load the model into an engine, and check that it gives its golden answers.

        Raises UnprovenArtifact where it does not: the processor or the engine computes something else.
        """
        return self.open_many(1, runtime, threads=threads)[0]

    def open_many(self, count: int, runtime: str | None = None, *, threads: int = 1) -> Sequence[Session]:
        """Sessions that run at the same time, each of so many threads; checked as `open` checks."""
        engine = self.runtime(runtime)
        sessions = engine.open_many(self.model, count, threads=threads, compute=self.manifest.compute)
        worst = min(self.measure_golden_fidelity(session) for session in sessions)
        if not worst >= self.golden_floor:
            for session in sessions:
                session.close()
            raise UnprovenArtifact(
                f"{self.path} does not give its golden answers in {engine.name} on this machine: fidelity {worst:.4f}, "
                f"expected at least {self.golden_floor:.4g}. Try another --runtime, or compress it on this machine"
            )
        return sessions

    @property
    def golden_floor(self) -> float:
        """How faithful a golden answer must be: GOLDEN_FLOOR, or twice as far off as two ways to compute the same graph
        were from each other when the artifact was made, where that is less."""
        for comparison in self.manifest.verdict.parity if self.manifest.verdict else ():
            if comparison.subject == ENGINE:
                return min(GOLDEN_FLOOR, 1 - 2 * (1 - comparison.figures["fidelity_worst"]))
        return GOLDEN_FLOOR

    def measure_golden_fidelity(self, session: Session) -> float:
        """The fidelity of the worst golden answer."""
        task = self.task()
        return min(float(np.min(task.fidelity(answers, session.run(inputs)))) for inputs, answers in self.golden())


def read_manifest(path: Path) -> Manifest:
    """What the artifact in a folder says that it is. Raises UnknownFormat, or CorruptArtifact."""
    content = unseal(path / MANIFEST)
    if content.get("format") != FORMAT:
        raise UnknownFormat(
            f"{path} is an artifact of format {content.get('format')!r}; this version of Laconic reads {FORMAT}. "
            f"Upgrade Laconic, or compress the model again"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise CorruptArtifact(f"{path} has a manifest that does not fit its format: {error}") from error


def read_measurements(path: Path) -> Measurements:
    """What was timed when the artifact in a folder was made. Raises CorruptArtifact."""
    try:
        return Measurements.model_validate(unseal(path / MEASURED))
    except ValidationError as error:
        raise CorruptArtifact(f"{path / MEASURED} does not fit its format: {error}") from error


def check_destination(path: Path) -> None:
    """Raise UsageError where writing an artifact would destroy something that is none."""
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file()):
        raise UsageError(f"{path} exists and is not an artifact: it will not be overwritten. Choose another --output")


def publish_artifact(folder: Path, destination: Path) -> None:
    """Move a finished artifact to where it belongs, in place of an earlier one, and never half of it."""
    check_destination(destination)
    replace_folder(folder, destination)


def replace_folder(folder: Path, destination: Path) -> None:
    """Move a folder and its files to where they belong, in place of what is there."""
    for path in (folder, *folder.iterdir()):  # a temporary folder is its maker's alone; a server is somebody else
        path.chmod(0o755 if path.is_dir() else 0o644)
    old = destination.with_name(f".{destination.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if destination.exists():
        destination.rename(old)
    try:
        folder.rename(destination)
    except OSError:
        if old.exists():
            old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)
