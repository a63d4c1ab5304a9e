"""The artifact: the folder that is shipped, with a model, its validation results, and everything needed to serve it.

manifest.json       describes the artifact; sealed with its own digest, and lists the digest of every file that is used
model.onnx          the graph, with Q/DQ nodes placed for one engine
golden.safetensors  golden outputs: a few inputs with the outputs they must give, checked at every load
tokenizer.json, labels.json, preprocess.json   preprocessing and labels, as the task needs them
measured.json       timings and the machine; separate from the manifest, since they differ from run to run
report.html         the report, for people
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from safetensors import SafetensorError
from safetensors.numpy import load_file

from laconic import registry
from laconic.artifacts.record import Record
from laconic.artifacts.verdict import ENGINE, Verdict
from laconic.config import explain
from laconic.errors import ArtifactError, CorruptArtifact, MissingPackage, UnknownFormat, UnprovenArtifact, UsageError
from laconic.files import find_replaced, replace_folder
from laconic.hashing import FileDigest, check_digest, unseal
from laconic.runtimes.runtime import Compute, Runtime, Session, make_runtime
from laconic.tasks.task import Task, open_task
from laconic.tensor import Arrays, TensorSpec
from laconic.timing.measurements import Measurements

FORMAT = 1
MANIFEST = "manifest.json"
MODEL = "model.onnx"
GOLDEN = "golden.safetensors"
MEASURED = "measured.json"
REPORT = "report.html"
GOLDEN_FLOOR = 0.98
"""The fidelity that golden outputs must reach at load. The same engine on another processor (BF16 or not, another INT8
kernel) changed MiniLM's outputs by up to 0.003; a processor whose INT8 sums overflow changes them by more than 0.05."""


class Manifest(BaseModel):
    """The description of an artifact. The same inputs give the same manifest, byte by byte.

    target: the hardware target of the compression. placement: the engine that Q/DQ nodes are placed for. compute: the
    arithmetic of the layers that are not quantized. batching: whether outputs are independent of the other samples in a
    batch; if not, the model is served one sample at a time. precision: the precision of weights and activations, by
    layer. data: the fingerprint of each data file, by role. licence: the licence that the source states.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    task: str
    inputs: tuple[TensorSpec, ...] = Field(min_length=1)
    outputs: tuple[TensorSpec, ...] = Field(min_length=1)
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

    @field_validator("task", "target", "placement")
    @classmethod
    def _registered(cls, name: str, field: ValidationInfo) -> str:
        """Names that select code are those of the registry, never addresses."""
        kind = {"placement": "runtime"}.get(str(field.field_name), str(field.field_name))
        known = registry.TARGETS if kind == "target" else registry.TABLES[kind]
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}. {registry.did_you_mean(name, known)}")
        return name

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        for name in files:
            if Path(name).name != name:
                raise ValueError(f"{name!r} is not a file in the artifact's own folder")
        return files


class Artifact:
    """An artifact on disk, with verified digests."""

    def __init__(self, path: Path, manifest: Manifest, measured: Measurements) -> None:
        self.path = path
        self.manifest = manifest
        self.measured = measured

    @classmethod
    def load(cls, path: Path) -> "Artifact":
        """Read an artifact and verify the digest of every file that will be used.

        Raises ArtifactError if the folder holds none, UnknownFormat for one of another format version, CorruptArtifact
        if a file was changed after it was written.
        """
        if not (path / MANIFEST).is_file():
            if replaced := find_replaced(path):
                raise ArtifactError(
                    f"there is no {path}: a run that was killed left the earlier artifact in {replaced[0]}. Move it "
                    f"back, or run the same command again"
                )
            what = "a checkpoint" if (path / "model.json").is_file() else "not an artifact"
            raise ArtifactError(f"{path} is {what}: it holds no {MANIFEST}. `laconic compress` makes one")
        manifest, measured = read_manifest(path), read_measurements(path)
        for name, expected in manifest.files.items():
            check_digest(path / name, expected)
        return cls(path, manifest, measured)

    @property
    def name(self) -> str:
        """The name that the model is served under: the folder's name without its extension."""
        return self.path.resolve().stem

    @property
    def model(self) -> Path:
        """The path of the ONNX graph."""
        return self.path / MODEL

    @property
    def size(self) -> int:
        """Bytes of the files that are needed to serve the artifact."""
        return sum(file.size for file in self.manifest.files.values())

    def task(self) -> Task:
        """Make the task, with the preprocessing that the artifact holds."""
        return open_task(self.manifest.task, self.path, self.manifest.inputs)

    def require_proof(self) -> None:
        """Raise UnprovenArtifact unless the artifact has a verdict and it passed."""
        verdict = self.manifest.verdict
        if verdict is None:
            raise UnprovenArtifact(f"{self.path} has no verdict. Run `laconic compress` to its end, or give --unproven")
        if not verdict.passed:
            raise UnprovenArtifact(
                f"{self.path} failed its validation: {'; '.join(verdict.failures)}. "
                f"Compress with another goal, or give --unproven"
            )

    def golden(self) -> list[tuple[Arrays, Arrays]]:
        """Read the golden pairs: inputs, and the outputs that they must give."""
        try:
            tensors = load_file(self.path / GOLDEN)
        except (SafetensorError, OSError) as error:
            raise CorruptArtifact(f"{self.path / GOLDEN} cannot be read: {error}") from error
        pairs: dict[str, tuple[Arrays, Arrays]] = {}
        for key, array in sorted(tensors.items()):
            number, _, rest = key.partition(".")
            side, _, name = rest.partition(".")
            pairs.setdefault(number, ({}, {}))[side == "output"][name] = array
        ordered = [spec.name for spec in self.manifest.outputs]
        if not pairs or any(outputs.keys() != set(ordered) for _, outputs in pairs.values()):
            raise CorruptArtifact(f"{self.path / GOLDEN} does not hold the outputs {ordered}. Compress the model again")
        return [(inputs, {name: outputs[name] for name in ordered}) for inputs, outputs in pairs.values()]

    def runtime(self, name: str | None = None) -> Runtime:
        """Choose the engine to open the artifact with: the named one, or else the one that its graph is placed for, or
        else the first of its target's engines that is installed."""
        if name is not None:
            return make_runtime(name)
        engines = registry.TARGETS.get(self.manifest.target, ())
        for candidate in dict.fromkeys((self.manifest.placement, *engines)):
            try:
                return make_runtime(candidate)
            except MissingPackage:
                continue
        raise MissingPackage("no engine is installed. Try: pip install 'laconic[cpu]'")

    def open(self, runtime: str | None = None, *, threads: int = 1) -> Session:
        """Load the model into an engine, and check its golden outputs.

        Raises UnprovenArtifact if they differ: this processor or this engine computes something else.
        """
        return self.open_many(1, runtime, threads=threads)[0]

    def open_many(self, count: int, runtime: str | None = None, *, threads: int = 1) -> Sequence[Session]:
        """Open `count` sessions that run concurrently, each with `threads` threads; golden outputs are checked."""
        engine = self.runtime(runtime)
        sessions = engine.open_many(self.model, count, threads=threads, compute=self.manifest.compute)
        worst = min(self.measure_golden_fidelity(session) for session in sessions)
        if not worst >= self.golden_floor:
            for session in sessions:
                session.close()
            raise UnprovenArtifact(
                f"{self.path} does not give its golden outputs in {engine.name} on this machine: fidelity {worst:.4f}, "
                f"expected at least {self.golden_floor:.4g}. Try another --runtime, or compress it on this machine"
            )
        return sessions

    @property
    def golden_floor(self) -> float:
        """The fidelity that golden outputs must reach: GOLDEN_FLOOR, or less where the engine and the graph run node by
        node differed more when the artifact was made: then twice that difference is allowed."""
        for comparison in self.manifest.verdict.parity if self.manifest.verdict else ():
            if comparison.subject == ENGINE:
                return min(GOLDEN_FLOOR, 1 - 2 * (1 - comparison.figures["fidelity_worst"]))
        return GOLDEN_FLOOR

    def measure_golden_fidelity(self, session: Session) -> float:
        """Measure the fidelity of the worst golden output in a session."""
        task = self.task()
        return min(float(np.min(task.fidelity(answers, session.run(inputs)))) for inputs, answers in self.golden())


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the artifact in a folder. Raises UnknownFormat or CorruptArtifact."""
    content = unseal(path / MANIFEST)
    if content.get("format") != FORMAT:
        raise UnknownFormat(
            f"{path} is an artifact of format {content.get('format')!r}; this version of Laconic reads {FORMAT}. "
            f"Upgrade Laconic, or compress the model again"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise CorruptArtifact(explain(error, f"{path} has a manifest that does not match its format")) from None


def read_measurements(path: Path) -> Measurements:
    """Read the measurements in the artifact in a folder. Raises CorruptArtifact."""
    try:
        return Measurements.model_validate(unseal(path / MEASURED))
    except ValidationError as error:
        raise CorruptArtifact(explain(error, f"{path / MEASURED} does not match its format")) from None


def check_destination(path: Path) -> None:
    """Raise UsageError if writing an artifact to `path` would overwrite something that is not an artifact."""
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file()):
        raise UsageError(f"{path} exists and is not an artifact: it will not be overwritten. Choose another --output")


def publish_artifact(folder: Path, destination: Path) -> None:
    """Move a finished artifact to its destination atomically, replacing an earlier artifact."""
    check_destination(destination)
    replace_folder(folder, destination)
