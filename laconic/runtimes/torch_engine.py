"""PyTorch on the CPU, by torch.compile: the graph of an artifact, translated and compiled on this machine.

What is compiled is kept in the cache folder, as machine code that this engine wrote there; an artifact brings none.
"""

import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._inductor.config as inductor

from laconic.arrays import Array, Arrays
from laconic.errors import LaconicError, RuntimeFailure
from laconic.hardware import this_machine
from laconic.runtimes.compiled_programs import keep_compiled_programs
from laconic.runtimes.engine_spec import AXIS_BOUNDS, read_axis_bounds
from laconic.runtimes.inductor_kernels import find_kernels, record_programs
from laconic.runtimes.onnx_file import GraphInput, read_inputs, read_properties
from laconic.runtimes.onnx_graph import ELEMENTS, read_graph
from laconic.runtimes.runtime import Compute, Kernel, Runtime, Session
from laconic.runtimes.torch_graph import GraphTranslator
from laconic.tensor import BATCH

log = logging.getLogger("laconic.torch")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BF16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Features of processors that multiply in BF16; without one it is several times slower than FP32."""
COMPILERS = ("g++", "clang++")
SHAPES = 64
"""Programs of one model, for shapes that no earlier program fits. Beyond, torch warns, and does not compile a run."""


ROWS = (1, 2)
"""Batch sizes that are compiled when a model is opened: a program for one row, and one for any other number."""
LENGTHS = (AXIS_BOUNDS.usual, 16)
"""Sizes of other dynamic axes with which a model is compiled, the first that it takes."""


class FrozenWeights:
    """While a run is within it, weights are constants for the compiler, which packs them for the processor.

    The compiler's option `freezing` does not do (torch 2.13): the weights are told from inputs before options hold.
    Set for the process, it would also freeze the weights of models that are being trained.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._before = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Freeze the weights of what is compiled in the body."""
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._before, inductor.freezing = inductor.freezing, True
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if not self._runs:
                    inductor.freezing = self._before


FROZEN = FrozenWeights()


class GraphProgram:
    """A translated graph with its compiled program, which several sessions may run at a time.

    typed: whether the graph says the type of each tensor itself. kernels: of its products, as they were asked for until
    `compile` has read those that run.
    """

    def __init__(self, model: Path, compute: Compute, *, typed: bool = False) -> None:
        self._translator = GraphTranslator(read_graph(model), DTYPES[compute], typed=typed)
        self.module = self._translator.translate()
        self.inputs: Sequence[GraphInput] = read_inputs(model)
        self.outputs = self._translator.graph.outputs
        self.kernels: Sequence[Kernel] = self._translator.kernels
        self._bounds = read_axis_bounds(read_properties(model), self.inputs)
        self._program: Any = self.module

    def run(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The outputs, in order."""
        with (
            torch.inference_mode(),
            FROZEN.hold(),
            torch.compiler.config.patch(recompile_limit=SHAPES),  # type: ignore[attr-defined]
        ):
            found: Sequence[torch.Tensor] = self._program(*tensors)
        return found

    def compile(self, device: str = "cpu") -> None:
        """Compile for one row and for several, so that the first request need not wait, and read the kernels.

        One program serves all sizes of the dynamic axes, but for size 1, which gets one of its own. A model that takes
        none of the sizes that are tried is compiled by its first run.
        """
        keep_compiled_programs()
        self._program = torch.compile(self.module, dynamic=True)
        for length in LENGTHS:
            try:
                for rows in ROWS:
                    with record_programs() as programs:
                        self.run([torch.from_numpy(each).to(device) for each in self.make_example(rows, length)])
                    for program in programs:
                        self.kernels = find_kernels(self._translator.kernels, self._translator.names, program)
                return
            except Exception as error:  # the compiler's exceptions share no base class
                log.debug("not compiled for axes of size %d: %s", length, first_line(error))

    def make_example(self, rows: int, length: int) -> list[Array]:
        """Inputs of ones. length: of a dynamic axis for which the graph has no bounds."""

        def size(axis: int | str) -> int:
            if isinstance(axis, int):
                return axis
            return rows if axis == BATCH else self._bounds[axis].usual if axis in self._bounds else length

        return [np.ones([size(axis) for axis in each.shape], ELEMENTS[each.element]) for each in self.inputs]


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
            answers = self._program.run(tensors)
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
    """PyTorch on the CPU, by torch.compile. Opening a model waits for the compiler: for one row, and for several."""

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
        program = self._load(model, compute)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)  # the compiler's choices depend on it
        try:
            program.compile()
        finally:
            torch.set_num_threads(before)
        return [GraphProgramSession(program, threads) for _ in range(count)]

    def open_for_trial(self, model: Path, *, threads: int = 1, compute: Compute = "float32") -> GraphProgramSession:
        # The same operators and INT8 kernels, not fused.
        return GraphProgramSession(self._load(model, compute), threads)

    def _load(self, model: Path, compute: Compute) -> GraphProgram:
        # On a processor without BF16 the model computes in FP32, which is never less exact than what was validated.
        compute = compute if compute in self.computes() else "float32"
        try:
            return GraphProgram(model, compute)
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
