"""The model as it came: what the artifact is compared with, in its outputs and in speed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from laconic.hashing import digest_own_code, hash_of
from laconic.models.checkpoint import Checkpoint
from laconic.models.pretrained import WritingModel
from laconic.models.torch_session import TorchSession, WritingSession
from laconic.quantization.graph import EXACTNESS, Graph
from laconic.runtimes.model_session import open_model
from laconic.runtimes.runtime import Session, make_runtime
from laconic.tasks.task import Task


@dataclass(frozen=True)
class Source(ABC):
    """A trained model, opened.

    key: digest of its structure, weights and code. size: bytes of its weights, as they came. description: how to open
    it again, JSON-ready.
    """

    task: Task
    key: str
    size: int
    licence: str | None
    description: dict[str, Any]

    @property
    def exactness(self) -> float:
        """1 minus the largest error that its captured graph may have, relative to the largest output."""
        return EXACTNESS

    @abstractmethod
    def open(self, threads: int) -> Session:
        """Open the model in full precision, in the engine that everything else is compared with."""


@dataclass(frozen=True)
class CheckpointSource(Source):
    """A source whose module stages can change, run by PyTorch."""

    checkpoint: Checkpoint

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "CheckpointSource":
        """Return the source that a checkpoint is."""
        return cls(
            task=checkpoint.task,
            key=make_key(checkpoint),
            size=checkpoint.size,
            licence=checkpoint.licence,
            description=checkpoint.source,
            checkpoint=checkpoint,
        )

    def open(self, threads: int) -> Session:
        module, inputs, outputs = self.checkpoint.module, self.checkpoint.inputs, self.checkpoint.outputs
        kind = WritingSession if isinstance(module, WritingModel) else TorchSession
        return kind(module, inputs, outputs, threads)

    def with_checkpoint(self, checkpoint: Checkpoint) -> "CheckpointSource":
        """Return the same source after a stage has changed its checkpoint."""
        return replace(self, checkpoint=checkpoint, task=checkpoint.task, key=make_key(checkpoint))


def make_key(checkpoint: Checkpoint) -> str:
    """Return the digest of everything that a checkpoint's outputs depend on: of the checkpoint, and of code of the
    user's own that its module is made of."""
    return hash_of(checkpoint.key, digest_own_code(type(part).__module__ for part in checkpoint.module.modules()))


@dataclass(frozen=True)
class GraphSource(Source):
    """A source that another framework wrote as ONNX: the file as it came, run by ONNX Runtime.

    graph: what it was normalized to. file: as it came, or the same nodes between inputs and outputs with the batch
    first; None where the graph itself is the source. decoder: of a model that writes, the decoder that the graph was
    split into, beside its encoder if it has one: run in the graph's place, since the graph cannot write.
    least_exactness: see `exactness`. notes: what is different from the file about inputs and outputs.
    """

    graph: Graph
    file: Path | None = None
    decoder: Path | None = None
    least_exactness: float = EXACTNESS
    notes: tuple[str, ...] = ()

    @property
    def exactness(self) -> float:
        return self.least_exactness

    def open(self, threads: int) -> Session:
        engine = make_runtime("onnxruntime")
        model = self.decoder or self.file or self.graph.path
        return open_model(model, partial(engine.open, threads=threads))
