"""The model as it came: what the artifact is compared with, in answers and in speed."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from laconic import registry
from laconic.cache import Cache
from laconic.errors import SourceError
from laconic.hashing import code_version, digest, hash_of
from laconic.models.checkpoint import Checkpoint, is_onnx, load_source
from laconic.models.processors import plain_task
from laconic.quantization.graph import Graph
from laconic.recipes.recipe import Recipe
from laconic.runtimes.runtime import Session, make_runtime
from laconic.runtimes.torch import TorchSession
from laconic.tasks.task import Task

GRAPH = TypeAdapter(Graph)


@dataclass(frozen=True)
class Source:
    """A checkpoint, or a graph that another framework wrote.

    key: digest of its structure and weights. size: bytes of its weights, as they came. description: JSON-ready.
    """

    task: Task
    checkpoint: Checkpoint | None
    graph: Graph | None
    key: str
    size: int
    licence: str | None
    description: dict[str, Any]

    @property
    def engine(self) -> str:
        """What runs it for comparison."""
        return "torch" if self.checkpoint else "onnxruntime"

    def open(self, threads: int) -> Session:
        """The model in full precision."""
        if self.checkpoint:
            return TorchSession(self.checkpoint.module, self.checkpoint.inputs, self.checkpoint.outputs, threads)
        assert self.graph is not None
        return make_runtime("onnxruntime").open(self.graph.path, threads=threads)

    def with_checkpoint(self, checkpoint: Checkpoint) -> "Source":
        """What a stage made of it."""
        return dataclasses.replace(self, checkpoint=checkpoint, key=checkpoint.key)


def open_source(recipe: Recipe, cache: Cache, *, trust: bool) -> Source:
    """Load what a recipe names. Raises SourceError for what is missing, damaged or of another kind."""
    path = Path(recipe.source)
    if not path.exists():
        raise SourceError(
            f"there is no {path}. Give a checkpoint's folder, a weights file with --builder, or an ONNX file"
        )
    if is_onnx(path):
        return adopt(path, recipe.task, cache)
    checkpoint = load_source(
        path,
        task=recipe.task,
        builder=recipe.builder,
        arguments=recipe.arguments or None,
        inputs=recipe.inputs or None,
        trust=trust,
    )
    return Source(
        task=checkpoint.task,
        checkpoint=checkpoint,
        graph=None,
        key=checkpoint.key,
        size=checkpoint.size,
        licence=checkpoint.licence,
        description=checkpoint.source,
    )


def adopt(path: Path, task: str | None, cache: Cache) -> Source:
    """An ONNX file as a source."""
    file = digest(path)
    key = hash_of("onnx", file.sha256, task, code_version())

    def fill(folder: Path) -> None:
        graph, _ = registry.load("export.capture.onnx_source:adopt")(path, folder, task)
        write_graph(graph, folder)

    graph = read_graph(cache.directory(f"graph-{key}", fill))
    return Source(
        task=plain_task(task or "tensors", graph.inputs, path),
        checkpoint=None,
        graph=graph,
        key=key,
        size=file.size,
        licence=None,
        description={"kind": "onnx", "sha256": file.sha256},
    )


def capture(source: Source, cache: Cache) -> Graph:
    """The float graph of a source."""
    if source.checkpoint is None:
        assert source.graph is not None
        return source.graph
    checkpoint = source.checkpoint
    return read_graph(
        cache.directory(
            f"graph-{hash_of('capture', checkpoint.key, code_version())}",
            lambda folder: write_graph(registry.load("export.capture.capture:capture")(checkpoint, folder), folder),
        )
    )


def capture_error(source: Source, graph: Graph, cache: Cache) -> float | None:
    """The graph's largest error against the module, relative to the largest output; None for a source without one."""
    if source.checkpoint is None:
        return None
    key = hash_of("capture-error", source.checkpoint.key, graph.key, code_version())
    compute = registry.load("export.capture.capture:capture_parity")
    return float(cache.json(f"error-{key}", lambda: compute(source.checkpoint, graph)))


def write_graph(graph: Graph, folder: Path) -> None:
    """What the file does not say of itself, beside it."""
    relative = dataclasses.replace(graph, path=graph.path.relative_to(folder))
    (folder / "graph.json").write_bytes(GRAPH.dump_json(relative, indent=1))


def read_graph(folder: Path) -> Graph:
    """What `write_graph` wrote."""
    graph = GRAPH.validate_json((folder / "graph.json").read_bytes())
    return dataclasses.replace(graph, path=folder / graph.path)
