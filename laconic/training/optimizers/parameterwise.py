"""Optimizers that step each parameter by itself, in FP32, whatever the precision of the weights."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from laconic.errors import UsageError
from laconic.training.optimizers.optimizer import Groups

State = dict[str, Any]


class ParameterWise(Optimizer):
    """Adds to a method its loop over parameters, its precision and its randomness.

    A parameter's state is plain tensors and its number of steps, an int: no other parameter counts, nothing is read
    back from the device, and imagined tensors can be stepped. Noise comes from the seed, the step and the size of the
    tensor alone: so the order of the parameters is no matter, and a resumed run draws the same.

    sharded: every element, or every row, is stepped by itself, so that each rank can step its shard.
    """

    sharded: ClassVar[bool] = False

    def __init__(self, groups: Groups, defaults: dict[str, Any], *, stochastic_rounding: bool = False) -> None:
        self.stochastic_rounding = stochastic_rounding
        super().__init__(groups, {"seed": torch.initial_seed()} | defaults)

    @abstractmethod
    def start(self, parameter: Tensor, group: State) -> State:
        """The state before the first step: zeros."""

    @abstractmethod
    def update(self, weight: Tensor, grad: Tensor, state: State, group: State) -> None:
        """Change the weight [as the parameter] float32 and the state in place. state["step"] counts from 1."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: State) -> None:
        if isinstance(parameter, DTensor) and not self.sharded:
            raise UsageError(
                f"{type(self).__name__} needs whole weights, and got one sharded over ranks. Use 'adamw' with FSDP"
            )
        kept = self.state[parameter]
        if not kept:
            kept.update({"step": 0}, **self.start(parameter, group))
        kept["step"] += 1
        state = {name: local(value) for name, value in kept.items()}
        weight = local(parameter)
        exact = weight.float()
        self.update(exact, local(parameter.grad).float(), state, group)
        if exact is weight:
            return
        if self.stochastic_rounding and weight.dtype is torch.bfloat16:
            exact = round_stochastically(exact, noise(group["seed"], kept["step"], weight))
        weight.copy_(exact)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, save that the state keeps its own precision where the weights have another."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(index, {}).items():
                    if isinstance(value, Tensor):
                        self.state[parameter][name] = value.to(parameter.device, copy=True)


def zeros(parameter: Tensor) -> Tensor:
    """FP32 zeros that lie in memory, and are sharded, as the parameter is."""
    return torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)


def local(value: Any) -> Any:
    """This rank's shard of a tensor; anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def noise(seed: int, step: int, like: Tensor) -> torch.Generator:
    """Random numbers on the tensor's device that depend on the seed, the step and the tensor's size.

    Tensors that are only imagined, on the device "meta", take those of the processor.
    """
    device = torch.device("cpu") if like.is_meta else like.device
    return torch.Generator(device).manual_seed(hash((seed, step, like.numel())) % 2**63)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """BF16 neighbours of finite float32 values, the nearer one the more often, so that the mean is the value.

    BF16 has 8 bits of mantissa: rounding to nearest drops every update below 1/512 of its weight, and training stands
    still. (Zamirai et al., Revisiting BFloat16 Training, arXiv 2010.06192.) Same shape as `values`.
    """
    bits = values.view(torch.int32)
    low = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return low.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()
