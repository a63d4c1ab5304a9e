"""The artifact: the folder that is shipped, with a model, its validation results, and everything needed to serve it.

manifest.json       describes the artifact; sealed with its own digest, and lists the digest of every file that is used
model.onnx          the graph, with Q/DQ nodes placed for one engine
golden.safetensors  golden outputs: a few inputs with the outputs they must give, checked at every load
model.encoder.onnx  of an encoder-decoder; model.onnx is then its decoder
draft.onnx          a smaller model that drafts the tokens of a language model
model.ENGINE.onnx, golden.ENGINE.safetensors   the same for another engine, in a portable artifact
calibration.safetensors   what calibration found, so that the model can be placed for another engine without samples
graph.onnx, graph.json   the float graph and its layers, where it was asked for
tokenizer.json, labels.json, preprocess.json   preprocessing and labels, as the task needs them
measured.json       timings and the machine; separate from the manifest, since they differ from run to run
report.html         the report, for people
model.sig           the signature over all other files, where it is signed
"""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from laconic import registry
from laconic.artifacts.artifact_files import check_digest, check_external_data, check_unlisted, open_plain, read_report
from laconic.artifacts.golden import GoldenPair, find_golden_floor, measure_golden_agreement, read_golden
from laconic.artifacts.manifest import (
    MANIFEST,
    MEASURED,
    MODEL,
    REPORT,
    Manifest,
    check_manifest_exists,
    read_manifest,
    read_measurements,
)
from laconic.artifacts.model_name import make_name
from laconic.artifacts.placement import Placement, find_fastest_placement
from laconic.cache import Cache
from laconic.errors import ArtifactError, CorruptArtifact, MissingPackage, RuntimeFailure, UnprovenArtifact, UsageError
from laconic.files import replace_folder
from laconic.hardware import this_machine
from laconic.hashing import environment_digest, hash_of
from laconic.runtimes.decoder_file import encoder_of, is_language_model
from laconic.runtimes.fake import Fake
from laconic.runtimes.model_session import open_models
from laconic.runtimes.runtime import Runtime, Session, make_runtime
from laconic.tasks.task import Task, open_task
from laconic.timing.benchmark import measure_speeds
from laconic.timing.measurements import Measurements


@dataclass(frozen=True)
class Choice:
    """What an artifact is opened with. speeds: of each placement by engine, relative to the preferred one, where they
    were timed on this machine."""

    engine: Runtime
    placement: Placement
    speeds: dict[str, float]


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
        artifact = cls.read(path)
        for name, expected in artifact.manifest.files.items():
            check_digest(path / name, expected)
        if artifact.measured.report is not None:
            artifact.read_report()
        artifact.check_graphs()
        for placement in artifact.manifest.placements:
            artifact.golden(placement)
        return artifact

    @classmethod
    def read(cls, path: Path) -> "Artifact":
        """Read an artifact, and check that its files are there and plain; for one whose digests have been verified.

        Raises ArtifactError if the folder holds none, UnknownFormat for one of another format version, CorruptArtifact.
        """
        check_manifest_exists(path)
        artifact = cls(path, read_manifest(path), read_measurements(path))
        for name in artifact.listed:
            open_plain(path / name).close()
        check_unlisted(path, artifact.listed)
        return artifact

    @property
    def listed(self) -> list[str]:
        """The names of all files of the artifact."""
        report = [REPORT] if self.measured.report is not None else []
        return [MANIFEST, MEASURED, *report, *self.manifest.files]

    def read_report(self) -> bytes:
        """Read the report. Raises ArtifactError if the artifact has none, CorruptArtifact if it was changed."""
        if self.measured.report is None:
            raise ArtifactError(f"{self.path} has no report. `laconic compress` writes one")
        return read_report(self.path / REPORT, self.measured.report)

    def check_graphs(self) -> None:
        """Raise CorruptArtifact for a graph that is not ONNX, or has weights in a file that the artifact does not list.
        The models of the fake engine need not be graphs."""
        is_fake = all(placement.runtime == Fake.name for placement in self.manifest.placements)
        for name in self.manifest.files:
            if name.endswith(".onnx"):
                check_external_data(self.path / name, self.listed, is_graph=not is_fake)

    @property
    def name(self) -> str:
        """The name that the model is served under."""
        return make_name(self.path.resolve())

    @property
    def model(self) -> Path:
        """The path of the preferred placement's graph."""
        return self.path / MODEL

    def model_for(self, runtime: str) -> Path:
        """Return the path of the graph that is placed for an engine; without one, of the preferred placement's
        graph."""
        placement = next((each for each in self.manifest.placements if each.runtime == runtime), None)
        return self.path / placement.model if placement else self.model

    @property
    def size(self) -> int:
        """Bytes of the files that are needed to serve the artifact."""
        return self.manifest.served_size

    def task(self) -> Task:
        """Make the task, with the preprocessing that the artifact holds. Samples may repeat the inputs of the source
        that became constants."""
        task = open_task(self.manifest.task, self.path, self.manifest.inputs)
        task.constants = self.manifest.source.get("constants", {})
        return task

    def require_proof(self, placement: Placement) -> None:
        """Raise UnprovenArtifact for a placement without a verdict, or with one that failed."""
        verdict = placement.verdict
        if verdict is None:
            raise UnprovenArtifact(f"{self.path} has no verdict. Run `laconic compress` to its end, or give --unproven")
        if verdict.state == "failed":
            raise UnprovenArtifact(
                f"{self.path} failed its validation: {verdict.summarize_reasons()}. "
                f"Compress it with another recipe, or give --unproven"
            )

    def golden(self, placement: Placement) -> list[GoldenPair]:
        """Read a placement's golden pairs: inputs, and the outputs that they must give. Raises CorruptArtifact."""
        size = self.manifest.files[placement.golden].size
        return read_golden(self.path / placement.golden, size, self.manifest.inputs, self.manifest.outputs)

    def choose(self, runtime: str | None = None, *, threads: int = 1, again: bool = False) -> Choice:
        """Choose the engine to open the artifact with, and the placement that it gets.

        runtime: an engine, which gets the graph that is placed for it, or else the preferred one. By default the
        placement that is fastest on this machine, of those whose engine is installed; if none is, the preferred one, in
        the first of the target's engines that is installed. Placements are timed once; the cache keeps the result.
        again: time them now, whatever the cache holds.
        """
        placements = self.manifest.placements
        if runtime is not None:
            placement = next((each for each in placements if each.runtime == runtime), placements[0])
            return Choice(make_runtime(runtime), placement, {})
        installed = {each.runtime: each for each in placements if is_installed(each.runtime)}
        if len(installed) > 1:
            speeds = self._race(installed, threads, again=again)
            name = find_fastest_placement(speeds)
            return Choice(make_runtime(name), installed[name], speeds)
        engines = registry.TARGETS.get(self.manifest.target, ())
        for name in (*installed, *engines):
            if is_installed(name):
                return Choice(make_runtime(name), installed.get(name, placements[0]), {})
        raise MissingPackage(
            f"no engine of target {self.manifest.target!r} is on this machine: {', '.join(engines)}. "
            f"Try: {find_remedy(engines)}"
        )

    def open(self, runtime: str | None = None, *, threads: int = 1) -> Session:
        """Load the model into an engine, and check its golden outputs.

        Raises UnprovenArtifact if they differ: this processor or this engine computes something else.
        """
        return self.open_many(1, runtime, threads=threads)[0]

    def open_many(self, count: int, runtime: str | None = None, *, threads: int = 1) -> Sequence[Session]:
        """Open `count` sessions that run concurrently, each with `threads` threads; golden outputs are checked."""
        choice = self.choose(runtime, threads=threads)
        return self.open_placement(choice.engine, choice.placement, count, threads=threads)

    def open_placement(
        self, engine: Runtime, placement: Placement, count: int = 1, *, threads: int = 1
    ) -> Sequence[Session]:
        """Open sessions of one placement in an engine; golden outputs are checked."""
        sessions = self.open_unchecked(engine, placement, count, threads=threads)
        agreements = [self.measure_golden_agreement(session, placement) for session in sessions]
        name, worst = min((pair for each in agreements for pair in each.items()), key=lambda pair: pair[1])
        if not worst >= (floor := find_golden_floor(placement.verdict)):
            for session in sessions:
                session.close()
            raise UnprovenArtifact(
                f"{self.path} does not give its golden outputs in {engine.name} on this machine: agreement of "
                f"{name!r} is {worst:.4f}, expected at least {floor:g}. Try another --runtime, or compress it "
                f"on this machine"
            )
        return sessions

    def open_unchecked(
        self, engine: Runtime, placement: Placement, count: int = 1, *, threads: int = 1
    ) -> Sequence[Session]:
        """Open sessions of one placement in an engine, whatever they answer: of the model's file, or of both files of
        an encoder-decoder. Raises CorruptArtifact for a model that should write and lacks a file for it."""
        model = self.path / placement.model
        open_many = partial(engine.open_many, count=count, threads=threads, compute=placement.compute)
        if (generation := self.task().generation) is None:
            return open_many(model)
        if (encoder := encoder_of(model)).name not in self.manifest.files and not is_language_model(model):
            raise CorruptArtifact(f"{self.path} has no {encoder.name}. Compress the model again")
        return open_models(model, open_many, generation)

    def measure_golden_agreement(self, session: Session, placement: Placement) -> dict[str, float]:
        """Measure how closely a session gives a placement's golden outputs, for each output by name."""
        return measure_golden_agreement(self.task(), self.golden(placement), session.run)

    def _race(self, installed: dict[str, Placement], threads: int, *, again: bool) -> dict[str, float]:
        """Return the speed of each placement on this machine, relative to the first; from the cache if it was
        measured."""
        key = hash_of(
            "placements",
            self.manifest.model_dump(mode="json"),
            {name: make_runtime(name).version() for name in installed},
            this_machine().model_dump(),
            threads,
            environment_digest(),
        )

        def measure() -> dict[str, float]:
            with ExitStack() as stack:
                sessions: dict[str, Session] = {}
                for name, each in installed.items():
                    # One that this machine cannot run is out of the race; it fails with its reason if none can.
                    with suppress(UnprovenArtifact, RuntimeFailure):
                        (opened,) = self.open_placement(make_runtime(name), each, threads=threads)
                        sessions[name] = stack.enter_context(opened)
                speeds = measure_speeds(sessions, self.task(), threads) if len(sessions) > 1 else {}
                return dict.fromkeys(installed, 0.0) | dict.fromkeys(sessions, 1.0) | speeds

        try:
            speeds: dict[str, float] = Cache().json(f"placements-{key}", measure, again=again)
        except OSError:  # a server in a container may have no folder to write to
            speeds = measure()
        return {name: speeds[name] for name in installed}


def is_installed(runtime: str) -> bool:
    """Return whether the package of an engine can be imported."""
    try:
        make_runtime(runtime)
    except MissingPackage:
        return False
    return True


def find_remedy(engines: Sequence[str]) -> str:
    """Return what to try where none of these engines is installed."""
    on_cpu = set(engines) <= set(registry.TARGETS["cpu"])
    return "pip install 'laconic[cpu]'" if on_cpu else "laconic doctor; or --runtime onnxruntime, on the CPU"


def check_destination(path: Path) -> None:
    """Raise UsageError if writing an artifact to `path` would overwrite something that is not an artifact."""
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file()):
        raise UsageError(f"{path} exists and is not an artifact: it will not be overwritten. Choose another --output")


def publish_artifact(folder: Path, destination: Path) -> None:
    """Move a finished artifact to its destination atomically, replacing an earlier artifact."""
    check_destination(destination)
    replace_folder(folder, destination)
