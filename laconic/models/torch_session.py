"""A module as a session: PyTorch on the CPU runs the original model, which everything else is compared with."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from laconic.arrays import Array, Arrays
from laconic.errors import RuntimeFailure
from laconic.models.pretrained import WritingModel
from laconic.models.signature import call
from laconic.runtimes.runtime import Session
from laconic.tasks.decoder_tensors import NEW_TOKENS, SEQUENCES
from laconic.tasks.generation_settings import GenerationSettings
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
        try:
            with use_threads(self.threads), torch.inference_mode():
                # Copies, both ways: a module may work in place on what it is given, and answer with a part of itself.
                # A language model may be asked without the past, which its pruned form has no inputs for.
                tensors = {each.name: torch.tensor(inputs[each.name]) for each in self.inputs if each.name in inputs}
                answers = list(call(self.module, tensors).values())
        except Exception as error:
            raise RuntimeFailure(f"torch failed: {error}") from error
        return {spec.name: answer.numpy().copy() for spec, answer in zip(self.outputs, answers, strict=True)}


class WritingSession(TorchSession):
    """Runs targets as every module; where `new_tokens` is among the inputs, so many tokens are written instead."""

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        if NEW_TOKENS not in inputs:
            return super().run(inputs)
        source = {name: torch.from_numpy(array) for name, array in inputs.items() if name != NEW_TOKENS}
        assert isinstance(self.module, WritingModel)
        with use_threads(self.threads):
            written = self.module.generate(source, GenerationSettings.of_length(int(inputs[NEW_TOKENS])))
        return {SEQUENCES: written.numpy()}


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch use this number of threads in the body."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
