"""Pipeline parallelism: consecutive layers of a model on each rank, through which micro-batches pass one after another,
by the schedules of torch.distributed.pipelining."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import ceil
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad

from laconic.errors import LaconicError, RecipeError
from laconic.models.repeated_layers import find_layer_lists
from train.layerwise.layer_stack import mix_into
from train.parallel.fully_sharded import check_shards, gather_root, shard_modules
from train.parallel.mesh import Mesh, ScheduleName
from train.parallel.observed_stage import ObservedStage, StepInputs
from train.parallel.pipeline_schedules import (
    SCHEDULES,
    check_rows,
    check_tied,
    choose_rows,
    list_actions,
    measure_bubble,
)
from train.parallel.ranks import Ranks, RanksStrategy
from train.parallel.stage_layers import (
    LayerRouter,
    RelayPass,
    SharedModule,
    StagedLayers,
    StageEnd,
    StageModule,
    StagePass,
    read_hidden,
)
from train.parallel.stage_plan import plan_stages
from train.parallel.stage_weights import (
    StagePlan,
    copy_skeleton,
    drop_other_weights,
    hide_weights,
    place_weights,
    sum_gradients,
)
from train.step.objective import Batch, LossModule, Objective
from train.step.parallel_strategy import SteppedModel
from train.step.step_parts import StepParts

T = TypeVar("T")

# Where another rank has ended, they print their whole schedule; what happened stands in that rank's own message.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class PipelineSettings:
    """How a model is cut into stages. group: of the `size` ranks that have some each, of which this is number `rank`.
    example: any batch, which shows what the parts of the model need of each other. plan: where it is made already.
    strategy: makes what runs the stages; `Pipeline` by default."""

    group: dist.ProcessGroup
    size: int
    rank: int
    schedule: ScheduleName
    example: Batch
    plan: StagePlan | None = None
    strategy: "type[Pipeline] | None" = None

    def make_plan(self, module: nn.Module, objective: Objective) -> StagePlan:
        """Make the plan of the first rank for all of them: examples may differ in length. Raises RecipeError."""
        if self.plan is not None:
            return self.plan
        if not objective.splittable:
            raise RecipeError(
                "mesh: pipeline: this task compares the rows of a batch with one another, so that a batch cannot be "
                "split into micro-batches. Leave pipeline out"
            )
        stages = self.size * SCHEDULES[self.schedule].stages
        plans = [plan_stages(module, objective, self.example, stages)]
        dist.broadcast_object_list(plans, src=0, device=torch.device("cpu"))
        return plans[0]

    def build(self, parts: StepParts, plan: StagePlan) -> "Pipeline":
        """Build what runs the stages of this rank."""
        return (self.strategy or Pipeline)(parts, plan, self)


def make_pipeline(mesh: Mesh, ranks: Ranks, example: Batch) -> PipelineSettings | None:
    """Make the settings of the pipeline that a rank is part of; None where there is none."""
    axis = ranks.select_axes("pipeline")
    if axis is None:
        return None
    return PipelineSettings(axis.get_group(), axis.size(), axis.get_local_rank(), mesh.schedule, example)


class Pipeline(RanksStrategy):
    """Pipeline parallelism (GPipe: Huang et al., arXiv 1811.06965; 1F1B and interleaved: Narayanan et al., arXiv
    2104.04473; ZB-V: Qi et al., arXiv 2401.10241). A rank has the weights of its stages alone.
    """

    def __init__(self, parts: StepParts, plan: StagePlan, settings: PipelineSettings) -> None:
        super().__init__(Ranks())
        self.plan, self.kind = plan, SCHEDULES[settings.schedule]
        self.stages: dict[int, StageModule] = {}
        self._group, self._device, self._here = settings.group, parts.device, settings.rank
        self._places = self.kind.place_stages(settings.size)
        self._own = [stage for stage, rank in enumerate(self._places) if rank == self._here]
        self._layout = parts.keep_groups()
        self._router, self._probe = LayerRouter(plan.values), LayerRouter(plan.values)
        self._inputs: StepInputs | None = None
        self._dtype: torch.dtype | None = None
        self._schedule: Any = None
        self._schedule_key: Any = None
        self._shapes: dict[Any, Tensor] = {}
        self._cut(parts)

    def _cut(self, parts: StepParts) -> None:
        """Drop the weights of other stages."""
        module = parts.module
        for buffer in module.buffers():
            buffer.data = buffer.to(parts.device)
        skeleton = copy_skeleton(module, parts.device)
        self._skeleton = LossModule(skeleton, parts.objective)
        (copies,) = find_layer_lists(skeleton)
        mix_into(copies, StagedLayers, router=self._probe)
        weights = place_weights(module, self.plan)
        restore = drop_other_weights(weights, self._own, parts.device)
        parts.on_restore(lambda: restore(self._group, self._places))
        (layers,) = find_layer_lists(module)
        parts.on_restore(mix_into(layers, StagedLayers, router=self._router))
        members = list(layers.children())
        self._layers = {stage: [members[number] for number in self.plan.layers[stage]] for stage in self._own}
        self._outer = [weight for weight in weights if not weight.in_layer]
        self._outside: dict[int, list[nn.Module]] = {
            stage: list({weight.part: None for weight in self._outer if stage in weight.stages}) for stage in self._own
        }
        twice = {weight.parameter: weight for weight in weights if len({self._places[s] for s in weight.stages}) > 1}
        self._tied = [weight for weight in twice.values() if not set(self._own).isdisjoint(weight.stages)]

    def distribute(self, parts: StepParts, ranks: Ranks, batch_size: int, mesh: Mesh) -> None:
        """Run the stages, when every technique is applied; their weights may be in shards, too. Raises RecipeError
        where the rows of a step make no micro-batches that the schedule takes."""
        rows, size = ceil(batch_size / ranks.data_world), ranks.sizes.pipeline
        if parts.micro_batch_rows is None:
            parts.accumulate_gradients(choose_rows(rows, size, mesh.schedule))
        assert parts.micro_batch_rows is not None
        check_rows(rows, parts.micro_batch_rows, size, mesh.schedule)
        self.ranks, self.micro_batches = ranks, ceil(rows / parts.micro_batch_rows)
        self._dtype = torch.bfloat16 if mesh.precision else None
        axes = ranks.select_axes("replicate", "shard")
        if axes is not None:
            check_tied(self.plan.before & self.plan.after, mesh.schedule)
            check_shards(parts, mesh)

        def wrap(loss_module: nn.Module) -> nn.Module:
            self._build_stages(loss_module)
            if axes is not None:
                layers = [layer for stage in self._own for layer in self._layers[stage]]
                # A micro-batch's backward pass follows its forward pass after those of others.
                shard_modules(parts, layers, list(self.stages.values()), axes, mesh, reshard=False)
            return loss_module

        parts.wrap_loss_module(wrap, innermost=True)

    def _build_stages(self, loss_module: nn.Module) -> None:
        """Build the stages of this rank, which run a loss module in part."""
        for stage in self._own:
            run = partial(self._run_stage, loss_module, stage)
            self.stages[stage] = StageModule([*self._layers[stage], *self._outside[stage]], run)

    def accumulate_gradients(self, state: SteppedModel, parts: Sequence[Batch], total: float) -> Tensor:
        self._inputs = StepInputs(parts, total, state)
        numbers, losses = torch.arange(len(parts)), list[Tensor]()
        schedule = self._make_schedule()
        try:
            with state.phase("pipeline"):
                schedule.step(number=numbers, target=numbers, losses=losses, return_outputs=False)
        except RuntimeError as error:  # torch puts its own around what a stage raises
            if isinstance(error.__cause__, (LaconicError, torch.OutOfMemoryError)):
                raise error.__cause__ from None
            raise
        finally:
            self._inputs = None
        sum_gradients(self._tied, self._group, self._places[-1 if self._here == self._places[0] else 0])
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self._device)

    def average(self, loss: Tensor) -> Tensor:
        """Average a loss, [] float32, over all ranks with rows of their own. It is 0 but on the ranks of the last
        stage."""
        return self.ranks.average(loss) * self.ranks.sizes.pipeline

    def measure_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        # Tied weights have one gradient, which two ranks hold.
        again = {weight.part._parameters[weight.name] for weight in self._tied if self._here == self._places[-1]}
        square = super().measure_norm([parameter for parameter in parameters if parameter not in again]).square()
        square = square.to(self._device)
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    @contextmanager
    def gather_weights(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stage in self.stages.values():
                if isinstance(stage, FSDPModule):
                    stack.enter_context(gather_root(stage))
            yield

    def compute(self, function: Callable[[], T]) -> T:
        """Return what a function computes with the model, which it calls once: each rank runs its layers, and the one
        that has the last shares the result."""
        layers = {stage: self.plan.layers[stage] for stage in self._own}
        result: list[Any] = [None]
        relay = RelayPass(self._router, layers, self._places, self._group, self._dtype)
        with self._router.route(relay), suppress(StageEnd):
            result = [function()]
        dist.broadcast_object_list(result, group=self._group, group_src=self._places[-1], device=torch.device("cpu"))
        value: T = result[0]
        return value

    @property
    def bubble(self) -> float:
        """The share of time that ranks wait for others by the costs of the stages, 0 to 1, if sending takes none."""
        schedule = self._build_schedule(torch.empty(1, device="meta", requires_grad=True), self.micro_batches)
        return measure_bubble(list_actions(schedule, max(self._places) + 1, self.micro_batches), self.plan.costs)

    def describe(self) -> str:
        sizes = ", ".join(str(len(layers)) for layers in self.plan.layers)
        return (
            f"stages of {sizes} layers, {self.micro_batches} micro-batches, bubble {self.bubble:.0%} of the time by "
            f"the stages' FLOPs"
        )

    def share_module(self, module: nn.Module) -> nn.Module:
        return SharedModule(module, self.compute)

    def number_globally(self, optimizer_state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        present = {name for name, _ in module.named_parameters()}
        numbers = dict(zip((name for group in self._layout for name in group), count()))
        local = [numbers[name] for group in self._layout for name in group if name in present]
        groups = zip(optimizer_state["param_groups"], self._layout, strict=True)
        content = {
            "state": {local[number]: values for number, values in optimizer_state["state"].items()},
            "param_groups": [group | {"params": [numbers[name] for name in names]} for group, names in groups],
        }
        return content if local else {"param_groups": content["param_groups"]}

    def _run_stage(self, loss_module: nn.Module, stage: int, received: Tensor | None, number: int) -> Tensor:
        """Run a stage on a micro-batch. What is passed on has the rows of the largest one."""
        assert self._inputs is not None
        batch = self._inputs.batches[number]
        hidden = None if received is None else received[: max(1, count_rows(batch))]
        stage_pass = StagePass(self._router, self.plan.layers[stage], hidden)
        others = hide_weights((weight for weight in self._outer if stage not in weight.stages), self._device)
        with self._inputs.enter_forward(), self._router.route(stage_pass), others:
            try:
                loss: Tensor = loss_module(batch) / self._inputs.total
                stage_pass.check()
                return loss
            except StageEnd as end:
                hidden = end.hidden
        missing = len(self._hidden) - len(hidden)
        hidden = pad(hidden.to(self._hidden.dtype), (0, 0) * (hidden.ndim - 1) + (0, missing)).contiguous()
        return hidden if hidden.requires_grad else hidden.detach().requires_grad_()

    def _make_schedule(self) -> Any:
        """Make the schedule of a step; that of the step before serves again where the hidden states have its shape."""
        assert self._inputs is not None
        self._hidden, number = self._find_hidden(self._inputs.batches[0]), len(self._inputs.batches)
        key = number, self._hidden.shape, self._hidden.dtype
        if key != self._schedule_key:
            self._schedule = None  # its buffers are freed before others are made
            self._schedule = self._build_schedule(self._hidden, number)
            self._schedule_key = key
        return self._schedule

    def _build_schedule(self, hidden: Tensor, micro_batches: int) -> Any:
        """Build the schedule of this rank for hidden states of a shape."""
        loss, last = torch.empty((), device="meta", requires_grad=True), len(self._places) - 1
        stages = [
            ObservedStage(
                module,
                stage,
                len(self._places),
                self._device,
                input_args=(hidden,) if stage else (),
                output_args=(hidden if stage < last else loss,),
                group=self._group,
                phase=self._enter_phase,
            )
            for stage, module in self.stages.items()
        ]
        return self.kind.make_schedule(stages, micro_batches)

    def _enter_phase(self, name: str) -> AbstractContextManager[Any]:
        """Enter a phase of the step that is under way."""
        assert self._inputs is not None
        return self._inputs.state.phase(name)

    def _find_hidden(self, batch: Batch) -> Tensor:
        """Find the shape of the hidden states of a micro-batch, as a tensor without values."""
        shapes = tuple((name, tensor.shape) for name, tensor in batch.items())
        if shapes not in self._shapes:

            def stop(number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                hidden = read_hidden(args, kwargs)
                assert hidden is not None
                raise StageEnd(hidden)

            with torch.no_grad(), self._probe.route(stop):
                try:
                    self._skeleton(batch)
                except StageEnd as end:
                    dtype = self._dtype or end.hidden.dtype
                    self._shapes[shapes] = torch.empty_like(
                        end.hidden, dtype=dtype, device="meta", memory_format=torch.contiguous_format
                    ).requires_grad_()
        return self._shapes[shapes]


def count_rows(batch: Batch) -> int:
    """Count the rows of a batch."""
    return next(iter(batch.values())).shape[0]
