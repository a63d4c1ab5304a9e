"""The forward and backward pass through a stack in which one layer at a time holds more than its input."""

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from train.layerwise.layer_call import AutocastState, LayerCall, RngState, preserve_rng_state
from train.layerwise.revolve import make_schedule
from train.offload.chunked_loops import micro_batches, split_range
from train.offload.host_memory import HostMemory
from train.offload.memory_accounting import account_as
from train.offload.weight_provider import GradientAccumulator, WeightProvider, register_gradient_hook


@dataclass(frozen=True, eq=False)
class PassConfig:
    """How passes run.

    rows: of a micro-batch; None takes the batch whole. snapshots: the largest number of layer inputs that are stored at
    a time; None stores them all. snapshots_on: where they are stored.
    """

    provider: WeightProvider
    host: HostMemory
    device: torch.device
    rows: int | None = None
    snapshots: int | None = None
    snapshots_on: Literal["device", "host"] = "device"


class SnapshotStore:
    """Inputs of layers that are stored for the backward pass, by step, on the device or on the host."""

    def __init__(self, config: PassConfig) -> None:
        self._host = config.host if config.snapshots_on == "host" else None
        self._stored: dict[int, Tensor] = {}
        self._prefetched: dict[int, Tensor] = {}

    def store(self, step: int, state: Tensor) -> None:
        """Store the input of a step."""
        with account_as(category="activations"):
            self._stored[step] = self._host.copy_to_host(state) if self._host else state

    def prefetch(self, step: int) -> None:
        """Start to copy a snapshot to the device."""
        if self._host and step not in self._prefetched:
            self._prefetched[step] = self._host.copy_to_device(self._stored[step], category="activations")

    def load(self, step: int) -> Tensor:
        """Load a snapshot onto the device; it stays stored."""
        if not self._host:
            return self._stored[step]
        self.prefetch(step)
        self._host.wait()
        return self._prefetched.pop(step)

    def free(self, step: int) -> None:
        """Drop a snapshot."""
        del self._stored[step]


class LayerwisePass:
    """One forward and backward pass.

    Layers run forward without a graph. In the backward pass each is recomputed, a micro-batch at a time, with the same
    random numbers and the same autocast. Activation checkpointing (Chen et al., "Training Deep Nets with Sublinear
    Memory Cost", arXiv 1604.06174) on the schedule of `revolve`.
    """

    def __init__(self, config: PassConfig, steps: int) -> None:
        self.config = config
        self._autocast = AutocastState.capture(config.device)
        actions = list(make_schedule(steps, min(config.snapshots or steps, steps)))
        turning = next(at for at, action in enumerate(actions) if action.kind in ("free", "reverse"))
        self._stored_steps = {action.step for action in actions[:turning] if action.kind == "store"}
        self._backward_actions = actions[turning:]
        self._calls: list[LayerCall] = []
        self._snapshots = SnapshotStore(config)
        self._last_input: Tensor | None = None

    def forward_layer(self, call: LayerCall, hidden: Tensor, upcoming: nn.Module | None) -> tuple[Tensor, object]:
        """Run a layer in the forward pass. Returns the hidden states after it, and its whole output.

        upcoming: the layer that runs next; None for the last one.
        """
        step = len(self._calls)
        self._calls.append(call)
        if step in self._stored_steps:
            self._snapshots.store(step, hidden.detach())
        if upcoming is None:
            self._last_input = hidden.detach()
        # Detached, so that hooks on modules that count operations find no graph that ends here.
        return run_layer(self.config, call, hidden.detach(), upcoming, self._autocast)

    def backward(self, gradient: Tensor, input_needs_grad: bool) -> Tensor | None:
        """Return the gradient of the first layer's input, if it is needed.

        gradient: of the last layer's output; it is overwritten.
        """
        snapshots, order = self._snapshots, self._backward_order()
        state, self._last_input = self._last_input, None
        at = len(self._calls) - 1
        with preserve_rng_state(self.config.device):
            for number, (kind, step) in enumerate(self._backward_actions, 1):
                if kind == "restore":
                    state, at = snapshots.load(step), step
                    continue
                assert state is not None, "every schedule restores a state after one was consumed"
                if kind == "store":
                    snapshots.store(step, state)
                elif kind == "free":
                    snapshots.free(step)
                elif kind == "advance":
                    for call in self._calls[at:step]:
                        state = run_layer(self.config, call, state, self._advance(order), self._autocast)[0]
                    at = step
                else:
                    for following in self._backward_actions[number : number + 1]:
                        if following.kind == "restore":
                            snapshots.prefetch(following.step)
                    needs_grad, upcoming = input_needs_grad or step > 0, self._advance(order)
                    gradient = self._reverse_layer(self._calls[step], state, gradient, needs_grad, upcoming)
                    state = None
        self.config.provider.end_pass()
        return gradient if input_needs_grad else None

    def _backward_order(self) -> deque[nn.Module]:
        """List the layers in the order in which the backward pass runs them."""
        order: deque[nn.Module] = deque()
        at = len(self._calls) - 1
        for kind, step in self._backward_actions:
            if kind == "advance":
                order.extend(call.layer for call in self._calls[at:step])
            elif kind == "reverse":
                order.append(self._calls[step].layer)
            if kind in ("advance", "restore"):
                at = step
        return order

    @staticmethod
    def _advance(order: deque[nn.Module]) -> nn.Module | None:
        """Remove the layer that runs now from the order; returns the one that runs next."""
        order.popleft()
        return order[0] if order else None

    def _reverse_layer(
        self, call: LayerCall, state: Tensor, gradient: Tensor, needs_grad: bool, upcoming: nn.Module | None
    ) -> Tensor:
        """Recompute a layer and run it backward, a micro-batch at a time. Returns the gradient of its input.

        needs_grad: whether that gradient is needed; else what is returned holds no values of use.
        """
        weights = self.config.provider.fetch(call.layer, upcoming)
        parameters = dict(call.layer.named_parameters())
        parts = split_rows(state, self.config.rows)
        accumulator = GradientAccumulator(
            lambda name, complete: self.config.provider.return_gradient(parameters[name], complete),
            in_float32=len(parts) > 1,
        )
        leaves = {}
        for name, weight in weights.items():
            leaves[name] = weight
            if parameters[name].requires_grad:
                leaves[name] = weight.detach().requires_grad_()
                register_gradient_hook(leaves[name], partial(accumulator.add, name))
        result = gradient if (gradient.shape, gradient.dtype) == (state.shape, state.dtype) else torch.empty_like(state)
        for part in micro_batches(parts):
            accumulator.begin(is_last=part is parts[-1])
            call.rng_states[first_row(part)].restore(self.config.device)
            self._reverse_part(call, leaves, state, gradient, result if needs_grad else None, part)
        accumulator.close()
        return result

    def _reverse_part(
        self,
        call: LayerCall,
        leaves: dict[str, Tensor],
        state: Tensor,
        gradient: Tensor,
        result: Tensor | None,
        part: slice | None,
    ) -> None:
        """Recompute and reverse a micro-batch; its gradient is written into `result`, which may be `gradient`."""
        rows = slice(None) if part is None else part
        hidden = state[rows].detach().requires_grad_(result is not None)
        with torch.enable_grad(), self._autocast.restore():
            output, _ = call(leaves, hidden, part)
        if output.requires_grad:
            torch.autograd.backward([output], [gradient[rows]])
        if result is not None:
            assert hidden.grad is not None
            result[rows] = hidden.grad


def run_layer(
    config: PassConfig, call: LayerCall, hidden: Tensor, upcoming: nn.Module | None, autocast: AutocastState
) -> tuple[Tensor, object]:
    """Run a layer forward without a graph, a micro-batch at a time. Returns its hidden states, and its whole output.

    The first run of a call records the state of the random number generators; later runs restore it.
    """
    weights = config.provider.fetch(call.layer, upcoming)
    whole: Tensor | None = None
    for part in micro_batches(split_rows(hidden, config.rows)):
        known = call.rng_states.get(first_row(part))
        if known is not None:
            known.restore(config.device)
        else:
            call.rng_states[first_row(part)] = RngState.capture(config.device)
        with torch.no_grad(), autocast.restore():
            value, output = call(weights, hidden if part is None else hidden[part], part)
            if part is None:
                return value, output
            if whole is None:
                whole = value.new_empty((hidden.shape[0], *value.shape[1:]))
            whole[part] = value
    assert whole is not None
    return whole, (whole, *output[1:]) if isinstance(output, tuple) else whole


def split_rows(hidden: Tensor, rows: int | None) -> list[slice | None]:
    """Split the rows into micro-batches of at most `rows`; a single None stands for the whole batch.

    A batch of as many rows as tokens stays whole: nothing tells then which axis of a mask is which.
    """
    count = hidden.shape[0]
    if rows is None or rows >= count or (hidden.ndim > 1 and hidden.shape[1] == count):
        return [None]
    return [*split_range(count, rows)]


def first_row(part: slice | None) -> int:
    """Return the first row of a micro-batch."""
    return 0 if part is None else part.start
