"""PyTorch on an NVIDIA GPU, by torch.compile and CUDA graphs: the graph of an artifact, translated and compiled there.

Written against the interface of PyTorch 2.13, without a GPU: what is done on the device has not run yet.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from laconic.arrays import Array, Arrays
from laconic.errors import LaconicError, MissingPackage, RuntimeFailure
from laconic.runtimes.device_policy import ReplayCache
from laconic.runtimes.runtime import Compute, Kernel, Runtime, Session
from laconic.runtimes.torch_engine import GraphProgram, check_inputs, first_line

log = logging.getLogger("laconic.torch")

DEVICE = "cuda"


@dataclass(frozen=True)
class CapturedProgram:
    """A run that was recorded for fixed shapes. inputs, outputs: the tensors that it reads and writes, on the device.
    replay: queues it again. release: gives its memory back."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    replay: Callable[[], object]
    release: Callable[[], object]


class CudaProgramSession(Session):
    """A program with a stream of its own; the weights are shared between sessions.

    Shapes that come three times are recorded as CUDA graphs and replayed, for the four that were used last. The
    compiler's own graphs (`mode="reduce-overhead"`) would be kept for every shape that comes.
    """

    def __init__(self, program: GraphProgram) -> None:
        self._program = program
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._replays: ReplayCache[CapturedProgram] = ReplayCache()
        self._captures = True

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        try:
            check_inputs(self._program.inputs, inputs)
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                return self._run([torch.tensor(inputs[each.name]) for each in self._program.inputs])
        except LaconicError:
            raise
        except Exception as error:  # the compiler's exceptions share no base class
            raise RuntimeFailure(f"torch failed: {type(error).__name__}: {first_line(error)}") from error

    def kernels(self) -> list[Kernel]:
        return list(self._program.kernels)

    def close(self) -> None:
        self._release(self._replays.clear())
        del self._program

    def _run(self, given: Sequence[Tensor]) -> Arrays:
        key = tuple(tensor.shape for tensor in given)
        captured = self._replays.find(key)
        if captured is None:
            tensors = [tensor.to(DEVICE, copy=True) for tensor in given]
            found = self._program.run(tensors)
            if self._captures and self._replays.count(key):
                self._capture(key, tensors)
        else:
            for held, tensor in zip(captured.inputs, given, strict=True):
                held.copy_(tensor)
            captured.replay()
            found = captured.outputs
        # Copying to the host waits for this stream alone.
        return {
            name: each.to("cpu", copy=True).numpy() for name, each in zip(self._program.outputs, found, strict=True)
        }

    def _capture(self, key: tuple[torch.Size, ...], inputs: Sequence[Tensor]) -> None:
        """Record a run on tensors that stay where they are."""
        try:
            captured = record(self._program, inputs, self._stream)
        except Exception as error:  # torch's exceptions share no base class
            log.warning("runs are not replayed as CUDA graphs: %s", first_line(error))
            self._captures = False
            return
        self._release(self._replays.put(key, captured))

    @staticmethod
    def _release(runs: Sequence[CapturedProgram]) -> None:
        for run in runs:
            run.release()


def record(program: GraphProgram, inputs: Sequence[Tensor], stream: torch.cuda.Stream) -> CapturedProgram:
    """Record a run as a CUDA graph. Other threads may work on the device meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        outputs = program.run(inputs)
    return CapturedProgram(inputs, outputs, graph.replay, graph.reset)


class TorchCuda(Runtime):
    """PyTorch on the first GPU, by torch.compile. The precision of every tensor is that in the graph.

    Opening a model waits for the compiler: for one row, and for several. Raises MissingPackage for a build of PyTorch
    without CUDA.
    """

    name = "torch-cuda"
    package = "torch"

    def __init__(self) -> None:
        if DEVICE == "cuda" and torch.version.cuda is None:
            raise MissingPackage(
                "the installed PyTorch is the one for CPUs. Install its build for CUDA, as pytorch.org says"
            )

    def version(self) -> str:
        return str(torch.__version__)

    def computes(self) -> tuple[Compute, ...]:
        return ("float16", "bfloat16")

    def open(self, model: Path, *, threads: int = 1, compute: Compute = "float16") -> CudaProgramSession:
        return self.open_many(model, 1, threads=threads, compute=compute)[0]

    def open_many(
        self, model: Path, count: int, *, threads: int = 1, compute: Compute = "float16"
    ) -> Sequence[CudaProgramSession]:
        program = self._load(model, compute)
        program.compile(DEVICE)
        return [CudaProgramSession(program) for _ in range(count)]

    def open_for_trial(self, model: Path, *, threads: int = 1, compute: Compute = "float16") -> CudaProgramSession:
        return CudaProgramSession(self._load(model, compute))

    def _load(self, model: Path, compute: Compute) -> GraphProgram:
        if DEVICE == "cuda" and not torch.cuda.is_available():
            raise RuntimeFailure(
                "torch found no GPU that it can use. Look at nvidia-smi, and at the CUDA version that this build of "
                "torch needs; or try --target cpu"
            )
        try:
            program = GraphProgram(model, compute, typed=True)
            program.module.to(DEVICE)
        except (OSError, ValueError) as error:
            raise RuntimeFailure(f"torch refused {model}: {error}") from error
        return program
