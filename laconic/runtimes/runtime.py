"""The interface of an inference engine (runtime), and of a model that it has loaded (session)."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Self

import numpy as np

from laconic import registry
from laconic.arrays import Array, Arrays

Compute = Literal["float32", "bfloat16", "float16", "int8-dynamic"]
"""The arithmetic of the layers that are not quantized. int8-dynamic: FP32, but for products with weights that are
stored in 4 or 8 bits, whose inputs are rounded to INT8 as they come, 32 numbers with one scale (dynamic
quantization)."""


@dataclass(frozen=True)
class Kernel:
    """The kernel that an engine runs for a node of the graph.

    node: name of the node in the ONNX graph. kind: the engine's own name of the kernel. precision: its arithmetic:
    int8, float8, float16, bfloat16, float32.
    """

    node: str
    kind: str
    precision: str


JOINED = "+"
"""Stands between the names of the nodes that one operator of a placed graph computes."""
CONSTANT = "unknown"
"""The kind that OpenVINO reports for the kernel of a constant."""


def find_kernel(node: str, kernels: Sequence[Kernel], fused: Collection[str] | None = None) -> Kernel | None:
    """Find the kernel that does the multiplications of a layer, given its node, `module/MatMul`.

    Engines split a layer into several kernels, named after it with a suffix, or fuse it with other nodes, such as the
    addition of its bias. If one of the parts computes in INT8, it is returned: the others add or rescale. Else the one
    with the name that a dynamically quantized product has, or the first. fused: the names of nodes that an engine may
    fuse the layer with; by default that of the bias.
    """
    module, _, _ = node.rpartition("/")
    whole = {node, *((f"{module}/Add",) if fused is None else fused)}
    parts = (f"{node}/", f"{node}_token_")
    candidates = [
        kernel
        for kernel in kernels
        if (kernel.node in whole or kernel.node.startswith(parts)) and not kernel.kind.startswith(CONSTANT)
    ]
    candidates.sort(key=lambda kernel: (kernel.precision != "int8", kernel.node != f"{node}/integer"))
    return candidates[0] if candidates else None


class Session(ABC):
    """A loaded model. Not thread-safe: open one session per concurrent caller."""

    @abstractmethod
    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Run the model. Returns the outputs by name, as newly allocated arrays. Raises RuntimeFailure if it fails."""

    def kernels(self) -> list[Kernel]:
        """Return the kernels that run for the nodes with weights; empty if the engine does not report them."""
        return []

    def close(self) -> None:  # noqa: B027 - an engine without resources to release need not override it
        """Release the memory. The session cannot be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Runtime(ABC):
    """An inference engine."""

    name: ClassVar[str]

    package: ClassVar[str]
    """The Python package that provides the engine; its version is recorded in the manifest."""

    @abstractmethod
    def version(self) -> str:
        """Return the engine's version."""

    @abstractmethod
    def computes(self) -> tuple[Compute, ...]:
        """Return the arithmetics that the engine has kernels for on this machine, for layers that are not quantized."""

    def has_int8_dynamic(self) -> bool:
        """Return whether the engine has kernels for int8-dynamic on this machine, too."""
        return False

    @abstractmethod
    def open(self, model: Path, *, threads: int = 1, compute: Compute = "float32") -> Session:
        """Load a model file. Raises RuntimeFailure if the engine refuses it."""

    def open_for_trial(self, model: Path, *, threads: int = 1, compute: Compute = "float32") -> Session:
        """Load a model file to measure its fidelity alone. By default as `open`; an engine that compiles for long, and
        computes the same without, overrides this."""
        return self.open(model, threads=threads, compute=compute)

    def open_many(
        self, model: Path, count: int, *, threads: int = 1, compute: Compute = "float32"
    ) -> Sequence[Session]:
        """Open `count` sessions that run concurrently, each with its own `threads` threads.

        An engine that can share the weights between sessions overrides this; by default each session has its own copy.
        """
        return [self.open(model, threads=threads, compute=compute) for _ in range(count)]


def make_runtime(name: str) -> Runtime:
    """Make the engine registered under `name`."""
    runtime: Runtime = registry.resolve("runtime", name)()
    return runtime


class RowByRowSession(Session):
    """A session that runs a batch row by row, for a model that takes a single row."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        rows = len(next(iter(inputs.values())))
        answers = [self.session.run({name: array[[row]] for name, array in inputs.items()}) for row in range(rows)]
        if rows == 1:
            return answers[0]
        return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}

    def kernels(self) -> list[Kernel]:
        return self.session.kernels()

    def close(self) -> None:
        self.session.close()


def open_row_by_row(session: Session, shapes: Iterable[Sequence[object]]) -> Session:
    """Return the session, or one that runs batches row by row where the model takes a single row.

    shapes: of the model's inputs; an integer is a fixed size.
    """
    firsts = [shape[0] if len(shape) else None for shape in shapes]
    return RowByRowSession(session) if firsts and all(first == 1 for first in firsts) else session
