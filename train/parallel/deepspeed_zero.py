"""ZeRO by DeepSpeed: its engine reduces gradients, clips them and steps, where the ranks share the optimizer's state
(stage 1), gradients too (2) and weights too (3)."""

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.errors import RecipeError, TrainingFailure
from laconic.registry import missing_package
from train.optimizers.optimizer import Groups
from train.parallel.original_module import OriginalModule
from train.parallel.ranks import Ranks, RanksStrategy
from train.snapshots.tensor_shards import FlatFragment
from train.step.objective import Batch
from train.step.parallel_strategy import SteppedModel, T
from train.step.step_parts import OptimizerFactory, StepParts
from train.step.trained_modules import trainable_parameters

BUCKET = 500_000_000
"""Elements of gradients that are reduced together at most: DeepSpeed's own default, whose buffer it allocates."""
DEPRECATED = r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"


class DeepSpeedZero(RanksStrategy):
    """Training by the engine of DeepSpeed (ZeRO: Rajbhandari et al., arXiv 1910.02054)."""

    def __init__(self, ranks: Ranks, micro_batches: int, stage: int, clip: float | None) -> None:
        """stage: of ZeRO. clip: the norm that gradients are clipped to; None does not clip."""
        super().__init__(ranks, micro_batches)
        self._stage, self._clip = stage, clip
        self._engine: Any = None
        self._optimizer: EngineOptimizer | None = None

    def start(self, parts: StepParts, loss_module: nn.Module, make: OptimizerFactory, groups: Groups) -> Optimizer:
        """Start the engine, and return the optimizer that steps through it."""
        deepspeed = import_deepspeed(parts.device)
        members = [list(group["params"]) for group in groups]
        before, linear = ModuleBefore.of(parts.module), nn.functional.linear
        warnings.filterwarnings("ignore", DEPRECATED, FutureWarning)
        optimizer = make(groups)
        self._engine, *_ = deepspeed.initialize(
            model=Passes(loss_module), optimizer=optimizer, config=self._make_config(parts.module)
        )
        if self._stage == 3:
            parts.module.register_state_dict_post_hook(fragment_weights)  # type: ignore[no-untyped-call]
        parts.on_load(self._refresh_partitions)

        def undo() -> None:
            weights = gather_weights(deepspeed, list(parts.module.parameters()))
            self._engine.destroy()
            before.restore(weights)
            nn.functional.linear = linear  # stage 3 puts one of its own in the place of torch's
            # A later run in this process has other groups of ranks.
            deepspeed.utils.groups._release_process_group_references()

        parts.on_restore(undo)
        self._optimizer = EngineOptimizer(self._engine, optimizer, members)
        return self._optimizer

    def accumulate_gradients(self, state: SteppedModel, parts: Sequence[Batch], total: float) -> Tensor:
        """Let the engine accumulate the gradients, and reduce them after the last micro-batch."""
        loss = torch.zeros((), device=state.device)
        for number, part in enumerate(parts, 1):
            self._engine.set_gradient_accumulation_boundary(number == len(parts))
            with state.phase("forward"):
                value = self._engine(partial(self._compute_loss, state, part)) / total
            with state.phase("backward"):
                self._engine.backward(value, scale_wrt_gas=False)
            loss += value.detach()
            del value
        return loss

    def compute(self, function: Callable[[], T]) -> T:
        """Return what a function computes with the model, by all ranks alike."""
        results: list[T] = []
        self._engine.module(lambda: results.append(function()))
        return results[0]

    def _compute_loss(self, state: SteppedModel, part: Batch) -> Tensor:
        # Within the engine, which would disable autocast.
        with state.forward_context():
            loss: Tensor = state.loss_module(part)
            return loss

    def measure_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return a tensor that has the norm when the optimizer has stepped: the engine measures it then, and clips."""
        assert self._optimizer is not None
        return self._optimizer.promise_norm()

    def _make_config(self, module: nn.Module) -> dict[str, Any]:
        """Make the configuration of the engine."""
        count = sum(parameter.numel() for parameter in trainable_parameters(module))
        return {
            "train_micro_batch_size_per_gpu": 1,  # which nothing depends on: losses are divided by their terms
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": self._clip or 0.0,
            "zero_optimization": {"stage": self._stage, "reduce_bucket_size": min(BUCKET, count)},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }

    def _refresh_partitions(self) -> None:
        """Copy weights that were loaded to where the engine steps them, and to all ranks."""
        zero = self._engine.optimizer
        zero.refresh_fp32_params()
        if self._stage == 3 and (kept := zero.persistent_parameters):
            kept[0].partition(kept, has_been_updated=False)
            kept[0].all_gather(kept)


class Passes(nn.Module):
    """The module of the engine, whose forward pass is any use of the modules in it. Within it alone stage 3 gathers
    weights that are read outside of the module that has them, as a loss reads a head's."""

    def __init__(self, loss_module: nn.Module) -> None:
        super().__init__()
        self.loss_module = loss_module

    def forward(self, function: Callable[[], T]) -> T:
        """Return what a function computes."""
        return function()


class EngineOptimizer(Optimizer):
    """An optimizer whose steps DeepSpeed's engine takes. The optimizer within steps flat partitions of all parameters
    of a group; `state_dict` has their state by parameter, as where no rank has a part."""

    def __init__(self, engine: Any, inner: Optimizer, members: Sequence[Sequence[nn.Parameter]]) -> None:
        """members: the parameters of each group."""
        super().__init__(inner.param_groups, inner.defaults)
        self.state = inner.state
        self._engine, self._members = engine, members
        self._norm: Tensor | None = None

    def promise_norm(self) -> Tensor:
        """Return a tensor, [] float32, that the next step sets to the norm of its gradient before it was clipped."""
        self._norm = torch.zeros((), device=self._engine.device)
        return self._norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step by the gradients that the engine has. Raises TrainingFailure where they are not finite: the engine would
        leave the step out."""
        self._engine.step()
        if not self._engine.was_step_applied():
            raise TrainingFailure(
                "the gradient is not finite; expected numbers. Try a lower learning rate, or gradient clipping "
                "(max_grad_norm)"
            )
        if self._norm is not None:
            self._norm.copy_(torch.as_tensor(self._engine.get_global_grad_norm()))
            self._norm = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine does it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the groups, and of each parameter's state the fragments that this rank has."""
        state: dict[int, dict[str, Any]] = {}
        groups = []
        for group, members in zip(self.param_groups, self._members, strict=True):
            numbers = range(len(state), len(state) + len(members))
            groups.append(group | {"params": list(numbers)})
            state |= {number: self._find_state(member) for number, member in zip(numbers, members, strict=True)}
        return {"state": {number: part for number, part in state.items() if part}, "param_groups": groups}

    def _find_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        place = find_place(self._engine.optimizer, parameter)
        if place is None:
            return {}
        state: dict[str, Any] = {}
        for name, value in self.state.get(place.flat, {}).items():
            is_flat = value.shape == place.flat.shape
            state[name] = FlatFragment(place.shape, place.start, value[place.window]) if is_flat else value
        return state


@dataclass(frozen=True, eq=False)
class Place:
    """Where this rank has a part of a parameter. shape: of the parameter. start: of the part in it. flat: the partition
    that is stepped. window: of the part in the partition."""

    shape: torch.Size
    start: int
    flat: Tensor
    window: slice


def find_place(zero: Any, parameter: Any) -> Place | None:
    """Find where this rank has a part of a parameter; None where it has none. zero: the optimizer of the engine."""
    if hasattr(parameter, "ds_tensor"):
        group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
        start, count = measure_partition(parameter)
        window = slice(offset, offset + count)
        return Place(parameter.ds_shape, start, zero.fp32_partitioned_groups_flat[group], window) if count else None
    if (mapping := parameter._hp_mapping) is None:
        return None
    address = mapping.hp_fragment_address
    flat = zero.single_partition_of_fp32_groups[mapping.param_group_index]
    window = slice(address.start, address.start + address.numel)
    return Place(parameter.shape, mapping.lp_fragment_address.start, flat, window)


def measure_partition(parameter: Any) -> tuple[int, int]:
    """Return where the part of a parameter that this rank has in stage 3 starts, and how many elements it has; the last
    ones of the tensor that holds it may be padding."""
    held = parameter.ds_tensor.ds_numel
    start = parameter.ds_zero_partition_rank * held
    return start, max(0, min(held, parameter.ds_numel - start))


def fragment_weights(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    """Replace the weights of a state dict by the fragments that this rank has in stage 3."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        whole: Any = parameter
        start, count = measure_partition(whole)
        state[prefix + name] = FlatFragment(whole.ds_shape, start, whole.ds_tensor.data[:count])


def gather_weights(deepspeed: Any, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Copy the whole values of parameters, on all ranks."""
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_tensor")]
    with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
        return [parameter.data.clone() for parameter in parameters]


@dataclass(frozen=True, eq=False)
class ModuleBefore:
    """A module before DeepSpeed has it: all modules in it, and the attributes of its parameters by name."""

    modules: Sequence[OriginalModule]
    parameters: Sequence[tuple[nn.Parameter, frozenset[str]]]

    @classmethod
    def of(cls, module: nn.Module) -> "ModuleBefore":
        """Record a module as it is now."""
        parameters = [(parameter, frozenset(vars(parameter))) for parameter in module.parameters()]
        return cls([OriginalModule.of(part) for part in module.modules()], parameters)

    def restore(self, weights: Sequence[Tensor]) -> None:
        """Take off what DeepSpeed has put on the module and its parameters. weights: the whole parameters, in order."""
        for (parameter, names), weight in zip(self.parameters, weights, strict=True):
            for name in set(vars(parameter)) - names:
                delattr(parameter, name)
            parameter.data, parameter.grad = weight, None
        for original in self.modules:
            original.module._parameters = dict(original.module._parameters)
            original.restore(set(vars(original.module)) - original.names)


def shard_by_deepspeed(parts: StepParts, ranks: Ranks, micro_batches: int, stage: int, clip: float | None) -> None:
    """Let DeepSpeed shard a model over the ranks, and step it.

    stage: of ZeRO. clip: the norm that gradients are clipped to; None does not clip. Raises RecipeError for weights
    that are not float32.
    """
    for name, parameter in parts.module.named_parameters():
        if parameter.dtype != torch.float32:
            raise RecipeError(
                f"mesh: zero: {name} is {str(parameter.dtype).removeprefix('torch.')}, and DeepSpeed takes float32 "
                f"weights. Set shard: null alone"
            )
    strategy = DeepSpeedZero(ranks, micro_batches, stage, clip)
    loss_modules: list[nn.Module] = []

    def keep(loss_module: nn.Module) -> nn.Module:
        loss_modules.append(loss_module)
        return loss_module

    parts.wrap_loss_module(keep)
    parts.wrap_optimizer(lambda make, groups: strategy.start(parts, loss_modules.pop(), make, groups))
    parts.parallelize(strategy)


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a kind of device. Raises MissingPackage where it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")  # which it reads where there is one rank, too
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        raise missing_package("deepspeed") from error
    # Its own collectives for processors would be compiled on the first run, by g++, where gloo does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").addFilter(lambda record: "untested optimizer" not in record.getMessage())
    return deepspeed
