"""The state of a model in training: the settings of its step, and what changes from step to step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from train.offload.host_memory import HostMemory
from train.optimizers.schedule import Scheduler
from train.optimizers.weight_average import drop_averages, exchange_weights
from train.step.objective import Batch, LossModule, Objective
from train.step.parallel_strategy import ParallelStrategy
from train.step.trained_modules import TrainedModules

PhaseContext = Callable[[str], AbstractContextManager[Any]]
"""A context for a phase of a run by its name: "data", "snapshot", "evaluation", and "step", in which are "forward",
"backward" and "optimizer". With a pipeline, "forward" and "backward" are in "stage 0" and so on, and these in
"pipeline"."""


def ignore_phase(name: str) -> AbstractContextManager[None]:
    """Enter no context: the phase is not observed."""
    return nullcontext()


class Interrupted(KeyboardInterrupt):
    """The run is asked to stop, between two steps."""


@dataclass(eq=False)
class TrainState:
    """A model in training, with its optimizer.

    host: copies tensors between the device and it. micro_batch_rows: rows of a micro-batch; None takes a batch as a
    whole. forward_contexts: entered, in order, before every forward pass. loss_module: the model and its objective,
    wrapped for compilation and data parallelism. scaler: of the loss, for FP16; a disabled one passes everything
    through. scheduler: of the learning rate; set before the first step of a training loop. gradient_norm: of the last
    step's gradient before it was clipped; None without clipping. is_stopping: whether this rank is asked to stop.
    """

    objective: Objective
    host: HostMemory
    micro_batch_rows: int | None
    forward_contexts: tuple[Callable[[], AbstractContextManager[Any]], ...]
    modules: TrainedModules
    loss_module: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    strategy: ParallelStrategy
    scheduler: Scheduler = field(init=False)
    gradient_norm: Tensor | None = None
    phase: PhaseContext = ignore_phase
    is_stopping: Callable[[], bool] = lambda: False

    @property
    def module(self) -> nn.Module:
        """Trained model."""
        return self.modules.model

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.modules.device

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Enter the contexts of a forward pass: autocast, offloading of activations and the like."""
        with ExitStack() as stack:
            for context in self.forward_contexts:
                stack.enter_context(context())
            yield

    @contextmanager
    def observe_phases(self, phase: PhaseContext) -> Iterator[None]:
        """Enter `phase` around every phase of the steps in the body."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def watch_for_stop(self, is_stopping: Callable[[], bool]) -> Iterator[None]:
        """Have `stop_if_asked` look at a flag in the body."""
        before, self.is_stopping = self.is_stopping, is_stopping
        try:
            yield
        finally:
            self.is_stopping = before

    def stop_if_asked(self) -> None:
        """Raise Interrupted, on all ranks alike, where any of them is asked to stop: in what takes long between two
        steps."""
        if self.strategy.any(self.is_stopping()):
            raise Interrupted

    @contextmanager
    def disable_loss_scaling(self) -> Iterator[None]:
        """Step without scaling of the loss in the body."""
        before, self.scaler = self.scaler, torch.amp.GradScaler(enabled=False)
        try:
            yield
        finally:
            self.scaler = before

    def split(self, batch: Batch) -> list[Batch]:
        """Split a batch into micro-batches; some have no rows, where this rank has fewer than another."""
        parts = self.objective.split(batch, self.micro_batch_rows)
        empty = {name: tensor[:0] if tensor.ndim else tensor for name, tensor in parts[0].items()}
        return parts + [empty] * (self.strategy.micro_batches - len(parts))

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters and buffers by name, as snapshots keep them."""
        return self.modules.weights()

    def merged_weights(self) -> dict[str, Tensor]:
        """Return the weights by name, as the model has them without techniques such as low-rank adapters."""
        return self.modules.merged_weights()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Have the averages of the weights in their place in the body, where there are any."""
        self._exchange_weights()
        try:
            yield
        finally:
            self._exchange_weights()

    def keep_averages(self) -> None:
        """Put the averages of the weights in their place for good, where there are any: training is over."""
        self._exchange_weights()
        drop_averages(self.optimizer)

    def _exchange_weights(self) -> None:
        if exchange_weights(self.optimizer):
            self.modules.refresh_copies()

    def finish(self) -> nn.Module:
        """Take the techniques off, and return the model with its trained weights."""
        module = self.modules.restore()
        self.loss_module = LossModule(module, self.objective)
        return module


StepCallback = Callable[[int], bool | None]
"""Called after each step with the number of steps done: a pruning schedule, a mask of zeros, a progress bar. True ends
the run as if it had been no longer."""

StepCallbackFactory = Callable[[TrainState], StepCallback]
"""Makes a callback before the first step."""
