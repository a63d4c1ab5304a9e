"""Stages of a pipeline: which of a model's layers and other weights each of them has, found by one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from laconic.errors import RecipeError
from laconic.models.flop_formulas import uncounted_kernels
from laconic.models.repeated_layers import find_layer_lists
from train.layerwise.layer_stack import hidden_of
from train.parallel.stage_layers import read_hidden, replace_hidden
from train.parallel.stage_weights import StagePlan
from train.step.objective import Batch, Objective


@dataclass(frozen=True)
class TracedModel:
    """What a forward pass of one row shows of a model. flops: before the first layer, of each layer, and after the last
    one. before, after, values: as of a `StagePlan`."""

    flops: tuple[float, ...]
    before: frozenset[str]
    after: frozenset[str]
    values: int

    def cut(self, stages: int) -> StagePlan:
        """Cut the layers so that the most expensive stage is as cheap as possible. The head and the loss are part of
        the last one."""
        before, *costs, after = self.flops
        ends = [before + costs[0], *costs[1:-1], costs[-1] + after] if len(costs) > 1 else costs
        ranges = cut_evenly(tuple(ends), stages)
        sums = [float(sum(costs[part.start : part.stop])) for part in ranges]
        sums[0] += before
        sums[-1] += after
        return StagePlan(ranges, tuple(sums), self.before, self.after, self.values)


def plan_stages(module: nn.Module, objective: Objective, batch: Batch, stages: int) -> StagePlan:
    """Plan the stages of a model: consecutive layers, as `TracedModel.cut` cuts them.

    batch: any, of which one row is run. Raises RecipeError for a model that cannot be cut so often.
    """
    layers = find_stage_layers(module)
    check_layers(module, len(layers), stages)
    return trace_model(module, objective, batch).cut(stages)


def check_layers(module: nn.Module, layers: int, stages: int) -> None:
    """Raise RecipeError where a model has fewer layers than there are stages."""
    if layers < stages:
        raise RecipeError(
            f"mesh: pipeline: {type(module).__name__} has {layers} layers, which are too few for {stages} stages. "
            f"Choose a smaller pipeline, or a schedule with one stage on each rank (gpipe, 1f1b)"
        )


def find_stage_layers(module: nn.Module) -> list[nn.Module]:
    """Find the layers that stages have some of each. Raises RecipeError unless a model has one list of them."""
    lists = find_layer_lists(module)
    if len(lists) != 1:
        raise RecipeError(
            f"mesh: pipeline: {type(module).__name__} has {len(lists) or 'no'} lists of repeated layers, and one is "
            f"cut into stages. Leave pipeline out"
        )
    return list(lists[0].children())


def trace_model(module: nn.Module, objective: Objective, batch: Batch) -> TracedModel:
    """Trace a forward pass of one row of a batch. Raises RecipeError for a model whose layers cannot be run apart."""
    trace = LayerTrace(module, find_stage_layers(module))
    trace.run(objective, objective.split(batch, 1)[0])
    return TracedModel(tuple(trace.flops), frozenset(trace.before), frozenset(trace.after), trace.values)


@lru_cache(maxsize=128)
def cut_evenly(costs: tuple[float, ...], parts: int) -> tuple[range, ...]:
    """Cut a row of costs into consecutive parts of one member at least, so that the largest sum is as small as it can
    be, and of such cuts the one with the smallest sum of squares."""
    sums = [0.0, *accumulate(costs)]
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for part in range(1, parts + 1):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for stop in range(part, len(costs) - parts + part + 1):
            for start in (start for start in best if start < stop):
                largest, squares, edges = best[start]
                cost = sums[stop] - sums[start]
                candidate = max(largest, cost), squares + cost**2, (*edges, stop)
                longer[stop] = min(longer.get(stop, candidate), candidate)
        best = longer
    return tuple(range(start, stop) for start, stop in pairwise(best[len(costs)][2]))


@dataclass(eq=False)
class LayerTrace:
    """One forward pass, in which each layer's input is cut off from autograd's graph: what the graph of a part reaches
    are the weights that the part uses. flops: before the first layer, of each layer, and after the last one."""

    module: nn.Module
    layers: Sequence[nn.Module]
    flops: list[float] = field(default_factory=list)
    before: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)
    values: int = 0
    _counted: float = 0.0
    _previous: Tensor | None = None

    def __post_init__(self) -> None:
        named = self.module.named_parameters(remove_duplicate=False)
        self._names: dict[Tensor, list[str]] = {}
        for name, parameter in named:
            self._names.setdefault(parameter, []).append(name)
        self._own = [set(layer.parameters()) for layer in self.layers]
        self._early: set[Any] = set()
        self._counter = FlopCounterMode(display=False, custom_mapping=uncounted_kernels())

    def run(self, objective: Objective, batch: Batch) -> None:
        """Run the pass. Raises RecipeError where a stage would need more than the hidden states of the one before."""
        was_training = self.module.training
        self.module.eval()
        handles: list[Any] = []
        for number, layer in enumerate(self.layers):
            enter = lambda _, args, kwargs, number=number: self._enter(number, args, kwargs)  # noqa: E731
            leave = lambda _, args, output, number=number: self._leave(number, output)  # noqa: E731
            handles += [layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave)]
        try:
            with torch.enable_grad(), self._counter:
                loss = objective.loss(self.module, batch)
        finally:
            for handle in handles:
                handle.remove()
            self.module.train(was_training)
        self._count()
        used, nodes = walk_graph(loss)
        if len(self.flops) != len(self.layers) + 2 or self._previous not in used:
            raise self._refuse("the model does not call each of its layers once, in order")
        if nodes & self._early:
            raise self._refuse("the part after the layers takes more than the hidden states of the last one")
        self.after = self._name(used - {self._previous}, "the part after the layers")
        owned = {name for own in self._own for parameter in own for name in self._names[parameter]}
        if shared := (self.before | self.after) & owned:
            raise self._refuse(f"{min(shared)} is used in a layer and outside of it")
        if sum(map(len, self._own)) != len(set().union(*self._own)):
            raise self._refuse("layers share weights")
        if any(getattr(part, "running_mean", None) is not None for part in self.module.modules()):
            raise self._refuse("batch normalization keeps statistics, which ranks with other layers would not have")
        if any(getattr(getattr(part, "config", None), "layerdrop", 0) for part in self.module.modules()):
            raise self._refuse("layers are dropped at random (layerdrop)")

    def _enter(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if number == 0:
            self._count()
        hidden = read_hidden(args, kwargs)
        if number != len(self.flops) - 1 or hidden is None:
            raise self._refuse("the model does not call each of its layers once, in order, with hidden states")
        if number == 0:
            leaves, self._early = walk_graph(hidden)
            self.before = self._name(leaves, "the part before the layers")
        elif hidden is not self._previous:
            raise self._refuse("between two layers the model does more than pass the hidden states on")
        self._entered = hidden.detach().requires_grad_()
        return replace_hidden(args, kwargs, self._entered)

    def _leave(self, number: int, output: Any) -> Any:
        self._count()
        self.values = len(output) if isinstance(output, tuple) else 0
        hidden, *others = output if isinstance(output, tuple) else (output,)
        foreign = walk_graph(hidden)[0] - self._own[number] - {self._entered}
        if foreign:
            raise self._refuse(f"a layer takes {min(self._name(foreign, 'a layer'))} from outside of it")
        self._previous = hidden_of(output).detach().requires_grad_()
        return (self._previous, *others) if self.values else self._previous

    def _count(self) -> None:
        total = float(self._counter.get_total_flops())
        self.flops.append(total - self._counted)
        self._counted = total

    def _name(self, leaves: set[Tensor], where: str) -> set[str]:
        """Name parameters. Raises RecipeError for other leaves: hidden states of an earlier part."""
        if any(leaf not in self._names for leaf in leaves):
            raise self._refuse(f"{where} takes hidden states of an earlier layer")
        return {name for leaf in leaves for name in self._names[leaf]}

    def _refuse(self, reason: str) -> RecipeError:
        return RecipeError(
            f"mesh: pipeline: {type(self.module).__name__} cannot be cut into stages: {reason}. Leave pipeline out"
        )


def walk_graph(tensor: Tensor) -> tuple[set[Tensor], set[Any]]:
    """Return the leaves that the graph of a tensor reaches, and its other nodes."""
    leaves = {tensor} if tensor.is_leaf and tensor.requires_grad else set()
    waiting, nodes = [tensor.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        elif node is not None and node not in nodes:
            nodes.add(node)
            waiting += [following for following, _ in node.next_functions]
    return leaves, nodes
