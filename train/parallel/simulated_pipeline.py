"""One stage of a pipeline whose other ranks do not exist, for the simulation of a step."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.pipelining.stage import (  # type: ignore[attr-defined]  # as its stages call them
    stage_backward_input,
    stage_backward_weight,
)

from train.offload.memory_accounting import account_as
from train.parallel.mesh import Mesh
from train.parallel.observed_stage import StepInputs
from train.parallel.pipeline import Pipeline
from train.parallel.ranks import Ranks
from train.step.gradient_norm import to_shard
from train.step.objective import Batch
from train.step.parallel_strategy import SteppedModel
from train.step.step_parts import StepParts

PASSES = 2
"""Micro-batches that are simulated: the first allocates the gradients that all others add to."""


INPUTS, WEIGHTS = "backward for inputs", "backward for weights"
"""The phases of a backward pass in two parts, as zero-bubble schedules have it."""


class SimulatedPipeline(Pipeline):
    """Takes the memory of one stage: micro-batches pass it forward, and after that backward, with the buffers that
    torch's schedules have for hidden states and their gradients. Then one passes it with its backward pass in two
    parts; but not the first stage, where torch leaves all of it to the second part."""

    def distribute(self, parts: StepParts, ranks: Ranks, batch_size: int, mesh: Mesh) -> None:
        parts.accumulate_gradients(batch_size // PASSES)
        super().distribute(parts, ranks, batch_size, mesh)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of a micro-batch between two stages, after a step."""
        return self._hidden.nbytes

    def accumulate_gradients(self, state: SteppedModel, parts: Sequence[Batch], total: float) -> Tensor:
        self._inputs = StepInputs(parts, total, state)
        self._hidden = self._find_hidden(parts[0])
        (stage,) = self._own
        with account_as(category="activations"):
            received = [self._make_buffer().requires_grad_() if stage else None for _ in parts]
            arriving = [self._make_buffer() if stage < len(self._places) - 1 else None for _ in parts]
        outputs = deque(
            self._run_stage(state.loss_module, stage, hidden, number) for number, hidden in enumerate(received)
        )
        for gradient, hidden in zip(arriving, received, strict=True):
            with state.phase("backward"):
                torch.autograd.backward([outputs.popleft()], [gradient])
                if hidden is not None:
                    hidden.grad = None
        del outputs, gradient
        if stage:
            self._pass_in_parts(state, stage, received.pop(), arriving.pop())
        with state.phase("backward"):
            for weight in self._tied:
                parameter = weight.part._parameters[weight.name]
                if parameter is not None and parameter.grad is not None:
                    torch.empty_like(to_shard(parameter.grad))  # that of the other end
        return torch.zeros((), device=self._device)

    def _pass_in_parts(self, state: SteppedModel, stage: int, hidden: Tensor | None, gradient: Tensor | None) -> None:
        """Pass a stage with a micro-batch, and back: the gradients of its inputs first, those of its weights after."""
        output = self._run_stage(state.loss_module, stage, hidden, PASSES - 1)
        weights = self.stages[stage]
        with state.phase(INPUTS):
            gradients = None if gradient is None else [gradient]
            _, groups = stage_backward_input([output], gradients, [hidden], weights.parameters())
            assert hidden is not None
            hidden.grad = _ = None
        with state.phase(WEIGHTS):
            stage_backward_weight(weights.parameters(), groups)

    def _make_buffer(self) -> Tensor:
        return torch.empty(self._hidden.shape, dtype=self._hidden.dtype, device=self._device)
