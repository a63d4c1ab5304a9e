"""A module as a session: PyTorch on the CPU runs the original model, which everything else is compared with."""

from collections.abc import Mapping

import torch
from torch import nn

from laconic.arrays import Array, Arrays
from laconic.errors import RuntimeFailure
from laconic.models.signature import call
from laconic.runtimes.runtime import Session
from laconic.tensor import TensorSpec


class TorchSession(Session):
    """A module, run without gradients.

    The number of threads belongs to the whole process in torch: it is set for each run, and set back after it.
    """

    def __init__(
        self, module: nn.Module, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], threads: int = 1
    ) -> None:
        self.module = module
        self.inputs = inputs
        self.outputs = outputs
        self.threads = threads

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with torch.inference_mode():
                # Copies, both ways: a module may work in place on what it is given, and answer with a part of itself.
                tensors = {spec.name: torch.tensor(inputs[spec.name]) for spec in self.inputs}
                answers = list(call(self.module, tensors).values())
        except Exception as error:
            raise RuntimeFailure(f"torch failed: {error}") from error
        finally:
            torch.set_num_threads(before)
        return {spec.name: answer.numpy().copy() for spec, answer in zip(self.outputs, answers, strict=True)}
