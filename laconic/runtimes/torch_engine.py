"""PyTorch on the CPU, by torch.compile: the graph of an artifact, translated and compiled on this machine.

What is compiled is kept in the cache folder, as machine code that this engine wrote there; an artifact brings none.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.arrays import Array, Arrays
from laconic.cache import Cache
from laconic.errors import LaconicError, RuntimeFailure
from laconic.hardware import this_machine
from laconic.hashing import hash_of
from laconic.runtimes.onnx_file import GraphInput, read_inputs
from laconic.runtimes.onnx_graph import read_graph
from laconic.runtimes.runtime import Compute, Kernel, Runtime, Session
from laconic.runtimes.torch_graph import GraphTranslator

# By default the compiler keeps its results in the shared folder for temporary files, where others may write. It finds
# them by the graph, and not by the processor's instructions (torch 2.13): a program for AVX-512 that was found by a
# processor with AVX2 alone, in a folder that both shared, read beyond its arrays and crashed.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    str(Cache().folder / "torch-compile" / hash_of(this_machine().features, os.environ.get("ATEN_CPU_CAPABILITY"))),
)

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BF16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Features of processors that multiply in BF16; without one it is several times slower than FP32."""
COMPILERS = ("g++", "clang++")
SHAPES = 64
"""Programs of one model, for shapes that no earlier program fits. Beyond, torch warns, and does not compile a run."""


class GraphProgram:
    """A translated graph with its compiled program, which several sessions may run at a time."""

    def __init__(self, model: Path, compute: Compute, *, compiled: bool) -> None:
        translator = GraphTranslator(read_graph(model), DTYPES[compute])
        self.module = translator.translate()
        self.inputs: Sequence[GraphInput] = read_inputs(model)
        self.outputs = translator.graph.outputs
        self.kernels: Sequence[Kernel] = translator.kernels
        # One program for all sizes of the dynamic axes, but for size 1, which gets one of its own. Constants, and with
        # them the packing of weights, are evaluated when it is compiled.
        self.run: Any = self.module
        if compiled:
            self.run = torch.compile(self.module, dynamic=True, options={"freezing": True})


class GraphProgramSession(Session):
    """A program with a number of threads, which belongs to the whole process in torch: it is set for each run."""

    def __init__(self, program: GraphProgram, threads: int) -> None:
        self._program = program
        self._threads = threads

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            check_inputs(self._program.inputs, inputs)
            tensors = [torch.tensor(inputs[each.name]) for each in self._program.inputs]
            with torch.inference_mode(), torch.compiler.config.patch(recompile_limit=SHAPES):  # type: ignore[attr-defined]
                answers = self._program.run(*tensors)
        except LaconicError:
            raise
        except Exception as error:  # the compiler's exceptions share no base class
            raise RuntimeFailure(f"torch failed: {type(error).__name__}: {first_line(error)}") from error
        finally:
            torch.set_num_threads(before)
        return {name: answer.numpy().copy() for name, answer in zip(self._program.outputs, answers, strict=True)}

    def kernels(self) -> list[Kernel]:
        return list(self._program.kernels)

    def close(self) -> None:
        del self._program


class Torch(Runtime):
    """PyTorch on the CPU, by torch.compile. The first run with one row, and the first with several, wait for the
    compiler: about a minute each for MiniLM, or some seconds where the cache has the result."""

    name = "torch"
    package = "torch"

    def version(self) -> str:
        return str(torch.__version__)

    def computes(self) -> tuple[Compute, ...]:
        return ("float32", "bfloat16") if BF16 & set(this_machine().features) else ("float32",)

    def open(self, model: Path, *, threads: int = 1, compute: Compute = "float32") -> GraphProgramSession:
        return self.open_many(model, 1, threads=threads, compute=compute)[0]

    def open_many(
        self, model: Path, count: int, *, threads: int = 1, compute: Compute = "float32"
    ) -> Sequence[GraphProgramSession]:
        if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), *COMPILERS) if name):
            raise RuntimeFailure(
                "torch compiles a model with a C++ compiler, and found none. Install g++, or try another engine "
                "(--runtime)"
            )
        program = self._load(model, compute, compiled=True)
        return [GraphProgramSession(program, threads) for _ in range(count)]

    def open_for_trial(self, model: Path, *, threads: int = 1, compute: Compute = "float32") -> GraphProgramSession:
        # The same operators and INT8 kernels, not fused.
        return GraphProgramSession(self._load(model, compute, compiled=False), threads)

    def _load(self, model: Path, compute: Compute, *, compiled: bool) -> GraphProgram:
        # On a processor without BF16 the model computes in FP32, which is never less exact than what was validated.
        compute = compute if compute in self.computes() else "float32"
        try:
            return GraphProgram(model, compute, compiled=compiled)
        except (OSError, ValueError) as error:
            raise RuntimeFailure(f"torch refused {model}: {error}") from error


def check_inputs(expected: Sequence[GraphInput], given: Mapping[str, Array]) -> None:
    """Raise RuntimeFailure for inputs that do not fit the graph, before anything is compiled for them."""
    if set(given) != {each.name for each in expected}:
        raise RuntimeFailure(
            f"torch: the inputs are {sorted(given)}, expected {sorted(each.name for each in expected)}"
        )
    for each in expected:
        shape = given[each.name].shape
        fits = len(shape) == len(each.shape) and all(
            isinstance(wanted, str) or wanted == size for wanted, size in zip(each.shape, shape, strict=True)
        )
        if not fits:
            raise RuntimeFailure(f"torch: input {each.name!r} has shape {list(shape)}, expected {list(each.shape)}")


def first_line(error: Exception) -> str:
    """The first line of a message."""
    return (str(error).strip().splitlines() or [""])[0][:300]
