"""Optimizers that step each parameter by itself, in FP32, whatever the precision of the weights."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from laconic.errors import UsageError
from train.optimizers.optimizer import Groups
from train.optimizers.optimizer import Optimizer as OptimizerSettings

State = dict[str, Any]


class ParameterWise(Optimizer):
    """Adds to a method its loop over parameters, its precision and its randomness.

    The state of a parameter is plain tensors and its number of steps, an int. It does not depend on other parameters,
    nothing is copied back from the device, and fake tensors can be stepped. Random numbers depend on the seed of the
    run, the number of the parameter, the shard and the step alone. So parameters may be stepped in any order, a resumed
    run draws the same numbers, and replicas of a weight stay equal.

    sharded: whether each rank can step its shard, since the update of an element, or of a row, uses no other.
    """

    sharded: ClassVar[bool] = False

    def __init__(self, groups: Groups, defaults: dict[str, Any], *, stochastic_rounding: bool = False) -> None:
        self.stochastic_rounding = stochastic_rounding
        self._numbers: dict[Tensor, int] = {}
        super().__init__(groups, {"seed": torch.initial_seed()} | defaults)

    def add_param_group(self, param_group: State) -> None:
        """Add a group as torch does, and number its parameters in the order in which they are added."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self._numbers[parameter] = len(self._numbers)

    @abstractmethod
    def start(self, parameter: Tensor, group: State) -> State:
        """Make the state before the first step: zeros."""

    @abstractmethod
    def update(self, weight: Tensor, grad: Tensor, state: State, group: State) -> None:
        """Change the weight [as the parameter] float32 and the state in place. state["step"] counts from 1;
        state["seed"] is of the random numbers of this parameter alone."""

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
        seed = derive_seed(group["seed"], self._numbers[parameter], *shard_of(parameter))
        state = {name: local(value) for name, value in kept.items()} | {"seed": seed}
        weight = local(parameter)
        exact = weight.float()
        self.update(exact, local(parameter.grad).float(), state, group)
        if exact is weight:
            return
        if self.stochastic_rounding and weight.dtype is torch.bfloat16:
            exact = round_stochastically(exact, make_generator(derive_seed(seed, kept["step"]), weight))
        weight.copy_(exact)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, save that the state keeps its own precision where the weights have another."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(index, {}).items():
                    if isinstance(value, Tensor):
                        self.state[parameter][name] = value.to(parameter.device, copy=True)


class ParameterWiseSettings(OptimizerSettings):
    """The settings of a `method` that steps each parameter by itself: all but the rounding are those of its groups."""

    method: ClassVar[type[ParameterWise]]

    stochastic_rounding: bool = False

    def build(self, groups: Groups) -> Optimizer:
        settings = self.model_dump(exclude={"stochastic_rounding"})
        return self.method(groups, settings, stochastic_rounding=self.stochastic_rounding)


def zeros(parameter: Tensor) -> Tensor:
    """Make FP32 zeros that lie in memory, and are sharded, as the parameter is."""
    return torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)


def local(value: Any) -> Any:
    """Return this rank's shard of a tensor; anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def shard_of(parameter: Tensor) -> tuple[int, ...]:
    """Return which shard of a parameter this rank holds, alike for all replicas of it; empty for a whole one."""
    coordinate = parameter.device_mesh.get_coordinate() if isinstance(parameter, DTensor) else None
    if coordinate is None:
        return ()
    placements = cast(DTensor, parameter).placements
    return tuple(place for place, kind in zip(coordinate, placements, strict=True) if kind.is_shard())


def derive_seed(*parts: int) -> int:
    """Derive the seed of independent random numbers from whole numbers of 64 bits, in this order."""
    digest = hashlib.blake2b(b"".join(part.to_bytes(8, "little") for part in parts), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def make_generator(seed: int, like: Tensor) -> torch.Generator:
    """Make a random generator on a tensor's device; on the CPU for a tensor without values, on the device "meta"."""
    return torch.Generator(torch.device("cpu") if like.is_meta else like.device).manual_seed(seed)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round finite float32 values to a BF16 neighbour, the nearer one the more often, so that the mean is the value.

    BF16 has 8 bits of mantissa: rounding to nearest drops every update below 1/512 of its weight, and training stands
    still. (Zamirai et al., Revisiting BFloat16 Training, arXiv 2010.06192.) Same shape as `values`.
    """
    bits = values.view(torch.int32)
    low = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return low.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()
