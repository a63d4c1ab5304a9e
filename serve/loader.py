"""Opens artifacts as models: in the server's own process, or in workers."""

from collections.abc import Iterable
from pathlib import Path

from laconic.artifacts.artifact import Artifact
from laconic.artifacts.manifest import MANIFEST
from laconic.errors import UsageError
from laconic.hashing import digest_file
from serve.backend import Backend
from serve.model import Model
from serve.server_settings import Settings
from serve.workers.engine_job import EngineJob
from serve.workers.engine_sessions import EngineSessions
from serve.workers.worker_pool import Patience, WorkerPool

TINY = 1e-3
"""Seconds for one sample, below which a model runs in the server's own process: a worker takes 0.1 to 0.3 ms of
processor time a batch. With one client a model of 0.1 ms gave 0.46 of the requests per CPU-second in a worker, one of
0.7 ms 0.76 and one of 3 ms all; with 16 clients 0.97, 0.95 and all."""


def open_models(paths: Iterable[Path], settings: Settings) -> list[Model]:
    """Load and check every artifact. Raises UsageError for none or two of a name, and the artifact's own errors."""
    artifacts: dict[str, Artifact] = {}
    for path in paths:
        artifact = Artifact.load(path)
        if artifact.name in artifacts:
            raise UsageError(
                f"{path} and {artifacts[artifact.name].path} would both be served as {artifact.name!r}. "
                f"Rename one of the folders"
            )
        artifacts[artifact.name] = artifact
    if not artifacts:
        raise UsageError("no artifact was given: there is nothing to serve")
    models: list[Model] = []
    try:
        for artifact in artifacts.values():
            models.append(Model(artifact, open_backend(artifact, settings), settings))
    except BaseException:
        for model in models:
            model.close()
        raise
    return models


def open_backend(artifact: Artifact, settings: Settings) -> Backend:
    """Open the sessions of an artifact, one for each executor; each is checked against the golden outputs.

    Raises UnprovenArtifact, unless the settings allow it, and the engine's errors.
    """
    executors, threads = settings.parallelism()
    workers = choose_workers(artifact) if settings.workers is None else settings.workers
    if not workers:
        return EngineSessions.open(
            artifact, executors, threads=threads, runtime=settings.runtime, unproven=settings.unproven
        )
    job = EngineJob(
        path=str(artifact.path.resolve()),
        digest=digest_file(artifact.path / MANIFEST).sha256,
        sessions=max(1, executors // workers),
        threads=threads,
        runtime=settings.runtime,
        unproven=settings.unproven,
    )
    return WorkerPool.open(job, [{}] * workers, Patience(settings.watchdog, settings.max_crashes))


def choose_workers(artifact: Artifact) -> int:
    """The workers of a model where the settings leave it open: none for one that is tiny, or was never timed."""
    latency = artifact.measured.lone_latency
    return 0 if latency is None or latency < TINY else 1
