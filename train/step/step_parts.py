"""The parts of a training step while it is put together, which techniques replace."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from train.offload.host_memory import HostMemory
from train.offload.weight_provider import ResidentWeights, WeightProvider
from train.optimizers.optimizer import Groups
from train.step.objective import LossModule, Objective
from train.step.parallel_strategy import ParallelStrategy
from train.step.train_state import TrainState
from train.step.trained_modules import TrainedModules

OptimizerFactory = Callable[[Groups], Optimizer]


class StepParts:
    """The parts of a training step, changed by techniques and objectives through the methods below.

    `assemble` makes of them the state that the steps train.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        make_optimizer: OptimizerFactory,
        group_parameters: Callable[[nn.Module], Groups],
        device: torch.device | None = None,
        host: HostMemory | None = None,
    ) -> None:
        """module: in training mode. make_optimizer: from parameter groups. group_parameters: from a module.

        device: the CPU by default. host: copies tensors between it and the host.
        """
        self.objective = objective
        self.device = device or torch.device("cpu")
        self.host = host or HostMemory()
        self.modules = TrainedModules(module, self.device)
        self.weight_provider: WeightProvider = ResidentWeights()
        self._make_optimizer = make_optimizer
        self._group_parameters = group_parameters
        self._forward_contexts: list[Callable[[], AbstractContextManager[Any]]] = []
        self._wrappers: list[Callable[[nn.Module], nn.Module]] = []
        self._scaler = torch.amp.GradScaler(enabled=False)
        self._strategy = ParallelStrategy()
        self._micro_batch_rows: int | None = None

    @property
    def module(self) -> nn.Module:
        """Trained model. Techniques may change how it computes, not what its parameters are called."""
        return self.modules.model

    @property
    def strategy(self) -> ParallelStrategy:
        """How the step cooperates with those of other devices."""
        return self._strategy

    @property
    def micro_batch_rows(self) -> int | None:
        """Rows of a micro-batch; None takes a batch as a whole."""
        return self._micro_batch_rows

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Call `undo` when training is over; the last change is undone first."""
        self.modules.on_restore(undo)

    def on_load(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` when weights were loaded from a snapshot: for copies of them in another place or dtype."""
        self.modules.on_load(refresh)

    def accumulate_gradients(self, rows: int) -> None:
        """Take each batch in micro-batches of at most so many rows."""
        self._micro_batch_rows = rows

    def add_forward_context(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter a context before every forward pass."""
        self._forward_contexts.append(make)

    def scale_loss(self, scaler: torch.amp.GradScaler) -> None:
        """Scale the loss before the backward pass."""
        self._scaler = scaler

    def wrap_optimizer(self, wrap: Callable[[OptimizerFactory, Groups], Optimizer]) -> None:
        """Make the optimizer by `wrap`, which is given the function that made it before."""
        make = self._make_optimizer
        self._make_optimizer = lambda groups: wrap(make, groups)

    def wrap_loss_module(self, wrap: Callable[[nn.Module], nn.Module], *, innermost: bool = False) -> None:
        """Wrap the module that computes the loss, outside the wrappers so far or inside all of them."""
        self._wrappers.insert(0 if innermost else len(self._wrappers), wrap)

    def provide_weights(self, provider: WeightProvider) -> None:
        """Get the weights of layers that run one by one from this provider."""
        self.weight_provider = provider

    def parallelize(self, strategy: ParallelStrategy) -> None:
        """Let the step cooperate with those of other devices."""
        self._strategy = strategy

    def keep_groups(self) -> list[list[str]]:
        """Keep the groups that the parameters are in now, also where some are removed or replaced afterwards; returns
        the names in each."""
        model, group_module = self.module, self._group_parameters
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = group_module(model)
        members = [[names[parameter] for parameter in group.pop("params")] for group in groups]

        def group_kept(module: nn.Module) -> Groups:
            if module is not model:
                return group_module(module)
            present = dict(model.named_parameters())
            kept = [[present[name] for name in group if name in present] for group in members]
            return [{"params": parameters, **group} for parameters, group in zip(kept, groups, strict=True)]

        self._group_parameters = group_kept
        return members

    def assemble(self) -> TrainState:
        """Put the parts together, when every technique has been applied."""
        self.objective.attach(self.modules)
        loss_module: nn.Module = LossModule(self.module, self.objective)
        for wrap in self._wrappers:
            loss_module = wrap(loss_module)
        return TrainState(
            self.objective,
            self.host,
            self._micro_batch_rows,
            tuple(self._forward_contexts),
            self.modules,
            loss_module,
            self._make_optimizer(self.modules.parameter_groups(self._group_parameters)),
            self._scaler,
            self._strategy,
        )
