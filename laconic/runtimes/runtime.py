"""The interface of an engine, and of a model that it has loaded."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Self

from laconic import registry
from laconic.tensor import Array, Arrays

Compute = Literal["float32", "bfloat16"]
"""The arithmetic of whatever is not quantized."""


@dataclass(frozen=True)
class Kernel:
    """What the engine really runs for a node of the graph.

    node: name of the node in the ONNX graph. kind: the engine's own name of the kernel. precision: the arithmetic,
    as int8, bfloat16, float32.
    """

    node: str
    kind: str
    precision: str


CONSTANT = "unknown"
"""What OpenVINO calls the kernel of a constant."""


def find_kernel(node: str, kernels: Sequence[Kernel]) -> Kernel | None:
    """The kernel that does the multiplications of a layer, given by its node, `module/MatMul`.

    Engines split a layer into several, call the parts by its name and a suffix, and merge it with others, a float layer
    into the sum with its bias. Where one of the parts works in INT8, that is the one; the others add or rescale.
    """
    module, _, _ = node.rpartition("/")
    whole, parts = {node, f"{module}/Add"}, (f"{node}/", f"{node}_token_")
    own = [
        kernel
        for kernel in kernels
        if (kernel.node in whole or kernel.node.startswith(parts)) and not kernel.kind.startswith(CONSTANT)
    ]
    return next((kernel for kernel in own if kernel.precision == "int8"), own[0] if own else None)


class Session(ABC):
    """A loaded model. One caller at a time; open several to run several."""

    @abstractmethod
    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """The outputs, by name, in arrays of their own. Raises RuntimeFailure where the engine refuses."""

    def kernels(self) -> list[Kernel]:
        """What runs for the nodes that have weights; empty where the engine does not tell."""
        return []

    def close(self) -> None:  # noqa: B027 - an engine without anything to give back need not override it
        """Give the memory back. The session is of no use afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Runtime(ABC):
    """An engine."""

    name: ClassVar[str]

    package: ClassVar[str]
    """The Python package that brings the engine; a manifest records its version."""

    @abstractmethod
    def version(self) -> str:
        """The engine's version."""

    @abstractmethod
    def computes(self) -> tuple[Compute, ...]:
        """The arithmetic this machine has kernels for."""

    @abstractmethod
    def open(self, model: Path, *, threads: int = 1, compute: Compute = "float32") -> Session:
        """Load a model file. Raises RuntimeFailure where the engine refuses it."""

    def open_many(
        self, model: Path, count: int, *, threads: int = 1, compute: Compute = "float32"
    ) -> Sequence[Session]:
        """Sessions that run at the same time, each with its own threads.

        An engine that can keep the weights once for all of them does so here; otherwise each session holds its own.
        """
        return [self.open(model, threads=threads, compute=compute) for _ in range(count)]


def make_runtime(name: str) -> Runtime:
    """The engine registered under `name`."""
    runtime: Runtime = registry.resolve("runtime", name)()
    return runtime
