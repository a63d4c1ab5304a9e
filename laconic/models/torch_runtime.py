"""PyTorch on the CPU as an engine."""

from pathlib import Path

import torch

from laconic.models.checkpoint import Checkpoint
from laconic.models.torch_session import TorchSession
from laconic.runtimes.runtime import Compute, Runtime


class Torch(Runtime):
    """PyTorch on the CPU. Its model file is the folder that `Checkpoint.save` writes."""

    name = "torch"
    package = "torch"

    def version(self) -> str:
        return str(torch.__version__)

    def computes(self) -> tuple[Compute, ...]:
        return ("float32",)

    def open(self, model: Path, *, threads: int = 1, compute: Compute = "float32") -> TorchSession:
        checkpoint = Checkpoint.load(model)
        return TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs, threads=threads)
