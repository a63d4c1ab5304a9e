"""Opens artifacts as models: in the server's own process, or in workers."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from laconic.artifacts.artifact import Artifact, is_installed
from laconic.artifacts.artifact_signature import check_signature
from laconic.artifacts.golden_tokens import choose_golden_tokens
from laconic.artifacts.manifest import MANIFEST, check_manifest_exists
from laconic.errors import CorruptArtifact, MissingPackage, RuntimeFailure, UsageError, describe_error
from laconic.files import follow_links
from laconic.hashing import digest_file
from serve.generation.generation_job import GenerationJob
from serve.generation.generation_worker import GenerationWorker
from serve.generation.image_text_writer import ImageTextTask, ImageTextWriter
from serve.generation.packed_inputs import pack_golden
from serve.generation.recording_writer import RecordingWriter, SpeechTask
from serve.generation.source_writer import SourceWriter, TextSourceTask
from serve.generation.text_writer import TextWriter, TokenTask, TokenWriter, WritingTask
from serve.model_repository.artifact_sources import read_signer
from serve.model_repository.backend import Backend
from serve.model_repository.model import Model
from serve.model_repository.versions import VERSION, find_versions
from serve.settings.server_settings import Settings
from serve.workers.devices import assign_gpus, list_gpus
from serve.workers.engine_job import EngineJob
from serve.workers.engine_sessions import EngineSessions
from serve.workers.worker_pool import WatchdogLimits, WorkerPool

log = logging.getLogger("laconic.serve")

TINY = 1e-3
"""Seconds for one sample, below which a model runs in the server's own process: a worker takes 0.1 to 0.3 ms of
processor time a batch. With one client a model of 7 us gave 0.79 of the requests per CPU-second in a worker, one of
0.3 ms 0.84 and one of 2.1 ms 0.81; with 16 clients 0.76, 0.91 and 0.96 (AMD EPYC, benchmarks/processes.py)."""


def open_models(paths: Mapping[str, Path], settings: Settings) -> list[Model]:
    """Load and check the newest version of every model, by its name. Raises the artifact's own errors."""
    artifacts = {name: load_newest(path, settings) for name, path in paths.items()}
    models: list[Model] = []
    try:
        for name, (version, artifact) in artifacts.items():
            models.append(open_model(artifact, settings, name=name, version=version))
    except BaseException:
        for model in models:
            model.close()
        raise
    return models


def load_newest(path: Path, settings: Settings) -> tuple[str, Artifact]:
    """Load and check the artifact in a folder, or its newest version; return it with its version. Raises the
    artifact's own errors."""
    version, newest = next(iter(find_versions(path).items()), (VERSION, path))
    return version, load_artifact(newest, settings)


def open_version(path: Path, settings: Settings, *, name: str, version: str) -> Model:
    """Load and check one version of a model. Raises the artifact's own errors."""
    return open_model(load_artifact(path, settings), settings, name=name, version=version)


def load_artifact(path: Path, settings: Settings) -> Artifact:
    """Load an artifact, after its signature where the settings ask for one. Raises UnsignedArtifact, the artifact's own
    errors, and UsageError for a key that cannot be used."""
    if (signer := read_signer(settings)) is not None:
        check_manifest_exists(path)
        check_signature(path, signer)
    return Artifact.load(path)


def open_model(artifact: Artifact, settings: Settings, *, name: str, version: str) -> Model:
    """Open a loaded artifact as a model of that name and version. Raises CorruptArtifact unless its manifest has the
    digest that the settings name, and what opening it raises."""
    digest = digest_file(artifact.path / MANIFEST).sha256
    if settings.find_digest(name) not in (None, digest):
        raise CorruptArtifact(
            f"{artifact.path} is another artifact than --sha256 says: the digest of its {MANIFEST} is {digest}"
        )
    with ExitStack() as stack:  # what is opened before an error is closed, or workers would live on
        backend = open_backend(artifact, settings, name, digest)
        stack.callback(backend.close)
        writer = open_writer(artifact, settings, name, digest)
        if writer is not None:
            stack.callback(writer.close)
        model = Model(artifact, backend, settings, name=name, version=version, digest=digest, writer=writer)
        stack.pop_all()
    return model


GENERATOR, LLAMACPP = "openvino", "llamacpp"
"""The engine that models write with, and that of artifacts that were made for it."""
TOKENIZER = "tokenizer.json"
"""The file of a tokenizer in an artifact; every model that writes has one."""
READER = "openvino"
"""The engine whose graphs it reads best; those of others have operators of their own."""


def open_writer(artifact: Artifact, settings: Settings, name: str, digest: str) -> TokenWriter | None:
    """Open the engine of a model that writes token by token; return None for any other, and for an encoder-decoder
    that this engine refuses, whose answers are then written as a whole. digest: of the manifest.

    Raises MissingPackage, and RuntimeFailure where the engine refuses the graph of a language model.
    """
    task = artifact.task()
    if task.generation is None:
        return None
    if isinstance(task, WritingTask):
        has_adapters = settings.adapters is not None
        worker = open_worker(artifact, settings, name, digest, context=task.max_tokens, has_adapters=has_adapters)
        if isinstance(task, ImageTextTask):
            return ImageTextWriter(worker, task, task)
        return TextWriter(worker, task, task.max_tokens, task.chat)
    if not isinstance(task, TokenTask):
        return None
    recordings = task if isinstance(task, SpeechTask) else None
    longest = task.max_tokens if isinstance(task, TextSourceTask) else 0
    if recordings is None and not longest:
        return None
    try:
        worker = open_worker(
            artifact,
            settings,
            name,
            digest,
            context=task.generation.max_new_tokens,
            generation=task.generation.model_dump(mode="json"),
            longest=longest,
        )
    except (RuntimeFailure, MissingPackage) as error:
        log.warning("%s writes its answers as a whole, not token by token: %s", name, error)
        return None
    return SourceWriter(worker, task, longest) if recordings is None else RecordingWriter(worker, task, recordings)


def open_worker(
    artifact: Artifact,
    settings: Settings,
    name: str,
    digest: str,
    *,
    context: int,
    generation: Mapping[str, Any] | None = None,
    longest: int = 0,
    has_adapters: bool = False,
) -> GenerationWorker:
    """Open a model in a generation worker. context, generation, longest, has_adapters: as `GenerationJob` has them."""
    placements = artifact.manifest.placements
    placement = next((each for each in placements if each.runtime == READER), placements[0])
    executors, threads = settings.parallelism(name)
    engine = choose_generator(placement.runtime, settings.runtime)
    job = GenerationJob(
        engine=engine,
        model=str(follow_links(artifact.path / placement.model)),
        tokenizer=str(follow_links(artifact.path / TOKENIZER)),
        manifest=str(follow_links(artifact.path / MANIFEST)),
        digest=digest,
        context=context,
        cache_bytes=settings.kv_cache,
        threads=executors * threads,
        compute=placement.compute if placement.runtime == engine else "float32",
        generation=generation,
        longest=longest,
        golden=pack_golden(choose_golden_tokens(artifact.golden(placement))),
        has_adapters=has_adapters,
        prefixes=find_prefix_file(settings.prefix_cache, digest),
        draft=find_draft(artifact) if engine == GENERATOR else None,
    )
    return GenerationWorker.open(
        job, watchdog=settings.watchdog, crashes=settings.max_crashes, most_waiting=settings.max_waiting
    )


def find_draft(artifact: Artifact) -> dict[str, Any] | None:
    """Return the fields of a `DraftFile`, if the artifact has a draft model."""
    draft = artifact.manifest.draft
    if draft is None:
        return None
    return draft.model_dump() | {"model": str(follow_links(artifact.path / draft.model))}


def find_prefix_file(folder: Path | None, digest: str) -> str:
    """Return the file that the prefix cache of an artifact is kept in; empty without a folder, which is made for this
    user alone. Raises UsageError where it cannot be made."""
    if folder is None:
        return ""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder {folder} cannot be made: {describe_error(error)}. Give another one to --prefix-cache"
        ) from None
    return str(folder / f"{digest}.safetensors")


def choose_generator(made_for: str, asked: str | None) -> str:
    """Choose the engine that a model writes with: llama.cpp where it is asked for, or where the artifact was made for
    it and it is installed. made_for, asked: runtimes."""
    is_llamacpp = asked == LLAMACPP if asked else made_for == LLAMACPP and is_installed(LLAMACPP)
    return LLAMACPP if is_llamacpp else GENERATOR


TOKENS_PER_WATCH = 32
"""Tokens that a model may write in the time that any other has for a batch."""


def open_backend(artifact: Artifact, settings: Settings, name: str, digest: str) -> Backend:
    """Open the sessions of an artifact, one for each executor; each is checked against the golden outputs.

    digest: of the manifest. Raises UnprovenArtifact, unless the settings allow it, and the engine's errors.
    """
    executors, threads = settings.parallelism(name)
    environments = plan_workers(artifact, settings.workers)
    job = EngineJob(
        path=str(follow_links(artifact.path)),
        digest=digest,
        sessions=max(1, executors // max(1, len(environments))),
        threads=threads,
        runtime=settings.runtime,
        unproven=settings.unproven,
    )
    if not environments:
        return EngineSessions.open(artifact, job)
    batch_seconds = settings.watchdog * count_runs(artifact)
    return WorkerPool.open(job, environments, WatchdogLimits(settings.watchdog, settings.max_crashes, batch_seconds))


def count_runs(artifact: Artifact) -> int:
    """Return how many times the patience of other models a batch of this one gets: a decoder runs for each token."""
    generation = artifact.task().generation
    return 1 if generation is None else -(-generation.max_new_tokens // TOKENS_PER_WATCH)


def plan_workers(artifact: Artifact, workers: int | None) -> list[dict[str, str]]:
    """Return what the environment of each worker of a model has besides the server's; without workers it runs in the
    server.

    workers: how many; where None, one for each GPU. For a processor it is one then, and none if the model is tiny or
    was never timed.
    """
    if artifact.manifest.target != "cpu":
        return assign_gpus(workers, list_gpus())
    if workers is not None:
        return [{}] * workers
    latency = artifact.measured.lone_latency
    return [] if latency is None or latency < TINY else [{}]
