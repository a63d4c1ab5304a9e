"""Open the source that a recipe names, and capture its float graph; graphs are kept in the cache."""

import dataclasses
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from export.capture.capture import capture, measure_parity
from export.capture.onnx_source import import_onnx
from laconic.artifacts.artifact import read_manifest
from laconic.cache import Cache
from laconic.errors import SourceError
from laconic.hashing import code_version, digest_file, hash_of
from laconic.models.checkpoint import is_onnx, load_source
from laconic.models.processors import plain_task
from laconic.models.source import CheckpointSource, GraphSource, Source
from laconic.quantization.graph import Graph
from laconic.recipes.recipe import Origin, Recipe
from laconic.runtimes.runtime import Session

GRAPH = TypeAdapter(Graph)
GRAPH_FILE = "graph.json"


def open_source(origin: Origin, cache: Cache, *, trust: bool) -> Source:
    """Load the model that a recipe names. Raises SourceError where it is missing, damaged or of an unknown kind."""
    path = Path(origin.source)
    if not path.exists():
        raise SourceError(
            f"there is no {path}. Give a checkpoint's folder, a weights file with --builder, or an ONNX file"
        )
    if is_onnx(path):
        return open_onnx(path, origin.task, cache)
    checkpoint = load_source(
        path,
        task=origin.task,
        builder=origin.builder,
        arguments=origin.arguments or None,
        inputs=origin.inputs or None,
        trust=trust,
    )
    return CheckpointSource.of(checkpoint)


def open_onnx(path: Path, task: str | None, cache: Cache) -> GraphSource:
    """An ONNX file of any framework as a source, its graph normalized."""
    file = digest_file(path)
    key = hash_of("onnx", file.sha256, task, code_version())

    def fill(folder: Path) -> None:
        graph, _ = import_onnx(path, folder, task)
        write_graph_json(graph, folder)

    graph = read_graph_json(cache.directory(f"graph-{key}", fill))
    return GraphSource(
        task=plain_task(task or "tensors", graph.inputs, path),
        key=key,
        size=file.size,
        licence=None,
        description={"kind": "onnx", "sha256": file.sha256},
        graph=graph,
    )


def capture_graph(source: Source, cache: Cache) -> Graph:
    """The float graph of a source."""
    if isinstance(source, GraphSource):
        return source.graph
    checkpoint = as_checkpoint_source(source).checkpoint
    return read_graph_json(
        cache.directory(
            f"graph-{hash_of('capture', checkpoint.key, code_version())}",
            lambda folder: write_graph_json(capture(checkpoint, folder), folder),
        )
    )


def measure_capture_error(source: Source, graph: Graph, cache: Cache) -> float | None:
    """The graph's largest error against the module, relative to the largest output; None for a source without one."""
    if isinstance(source, GraphSource):
        return None
    checkpoint = as_checkpoint_source(source).checkpoint
    key = hash_of("capture-error", checkpoint.key, graph.key, code_version())
    return float(cache.json(f"error-{key}", lambda: measure_parity(checkpoint, graph)))


def as_checkpoint_source(source: Source) -> CheckpointSource:
    """The same source, known to have a module. Raises SourceError for a graph, which has none."""
    if not isinstance(source, CheckpointSource):
        raise SourceError("an ONNX file is a graph without a module. Stages that change the module need the checkpoint")
    return source


def open_original(path: Path, artifact: Path, threads: int, *, trust: bool) -> Session:
    """Open the model that an artifact was made from, in full precision.

    Raises SourceError, or ArtifactError where there is no artifact.
    """
    manifest = read_manifest(artifact)
    made = manifest.source
    given: dict[str, Any] = {"source": str(path), "task": manifest.task}
    if made.get("kind") == "builder":
        given |= {"builder": made["builder"], "arguments": made["arguments"], "inputs": manifest.inputs}
    return open_source(Recipe.parse(given | {"stages": []}), Cache(), trust=trust).open(threads)


def write_graph_json(graph: Graph, folder: Path) -> None:
    """Write what the ONNX file does not say of itself, beside it."""
    relative = dataclasses.replace(graph, path=graph.path.relative_to(folder))
    (folder / GRAPH_FILE).write_bytes(GRAPH.dump_json(relative, indent=1))


def read_graph_json(folder: Path) -> Graph:
    """Read what `write_graph` wrote."""
    graph = GRAPH.validate_json((folder / GRAPH_FILE).read_bytes())
    return dataclasses.replace(graph, path=folder / graph.path)
