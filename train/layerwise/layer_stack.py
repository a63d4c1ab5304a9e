"""A list of layers that runs layerwise when the model's own forward loop iterates over it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from laconic.errors import RecipeError
from train.layerwise.layer_call import AutocastState, record_call
from train.layerwise.layerwise_pass import LayerwisePass, PassConfig, run_layer
from train.offload.weight_provider import ResidentWeights


@dataclass(eq=False)
class StackState:
    """State that the stacks of a model share.

    active: whether a forward pass of training is under way. started, completed: the runs through stacks in this pass.
    """

    config: PassConfig
    active: bool = False
    started: int = 0
    completed: int = 0

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Run layers layerwise in the body. Raises RecipeError if the model did not call them all, in order."""
        self.active, self.started, self.completed = True, 0, 0
        try:
            yield
        finally:
            self.active = False
        if torch.is_grad_enabled() and (self.completed == 0 or self.completed != self.started):
            raise RecipeError(
                "layerwise: the model does not call each of its layers once, in order, in a loop over their list. Use "
                "gradient-checkpointing instead"
            )


class LayerStack(nn.Module):
    """Mixed into the class of a list of layers. Only the list's class changes, so parameters keep their names."""

    stack_state: StackState

    def __iter__(self) -> Iterator[Any]:
        layers, state = list(self.children()), self.stack_state
        needs_pass = torch.is_grad_enabled() or not isinstance(state.config.provider, ResidentWeights)
        return iterate_proxies(state, layers) if state.active and needs_pass else iter(layers)

    def __getitem__(self, index: int | slice) -> Any:
        part = super().__getitem__(index)  # type: ignore[misc]
        if isinstance(index, slice):
            part.stack_state = self.stack_state
        return part


def mix_into(layers: nn.Module, mixin: type[nn.Module], **attributes: object) -> Callable[[], None]:
    """Mix a class into that of a list of layers in place, with the attributes that it needs. Returns a function that
    takes both out again."""
    plain = type(layers)
    layers.__class__ = type(f"{plain.__name__}{mixin.__name__}", (mixin, plain), {})
    for name, value in attributes.items():
        setattr(layers, name, value)

    def undo() -> None:
        layers.__class__ = plain
        for name in attributes:
            delattr(layers, name)

    return undo


def iterate_proxies(state: StackState, layers: list[nn.Module]) -> Iterator["LayerProxy"]:
    """Yield a proxy for each layer, in order, all of one run through the stack. Stops if the model skips a call."""
    state.started += 1
    run = StackRun(state, layers)
    for number, layer in enumerate(layers):
        yield LayerProxy(layer, run)
        if run.count != number + 1:
            return


class LayerProxy:
    """Has the attributes of a layer, and hands its call over to the run through the stack."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._layer, self._call = layer, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._layer, args, kwargs)


class StackRun:
    """One run through the layers of a stack, between which the model must pass the hidden states on as they are:
    operations between two layers would have no backward pass."""

    def __init__(self, state: StackState, layers: list[nn.Module]) -> None:
        self.state, self.layers, self.count = state, layers, 0
        self._pass = LayerwisePass(state.config, len(layers)) if torch.is_grad_enabled() else None
        self._input: Tensor | None = None
        self._previous: Tensor | None = None

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer; the output of the last one is connected to autograd's graph. Raises RecipeError."""
        call, hidden = record_call(layer, args, kwargs)
        if self.count and hidden is not self._previous:
            raise RecipeError(
                f"layerwise: between two layers of class {type(layer).__name__} the model does more than pass the "
                f"hidden states on, and no gradient would flow through that. Use gradient-checkpointing instead"
            )
        self._input = hidden if self._input is None else self._input
        self.count += 1
        is_last = self.count == len(self.layers)
        upcoming = None if is_last else self.layers[self.count]
        config = self.state.config
        if self._pass is None:
            _, output = run_layer(config, call, hidden, upcoming, AutocastState.capture(config.device))
        else:
            _, output = self._pass.forward_layer(call, hidden, upcoming)
        self._previous = hidden_of(output)
        if is_last:
            if self._pass is not None:
                output = self._connect(self._pass, output)
            config.provider.end_pass()
            self.state.completed += 1
            self._input = self._previous = None
        return output

    def _connect(self, layerwise_pass: LayerwisePass, output: Any) -> Any:
        """Connect the last layer's output to the first one's input in autograd's graph."""
        anchor = torch.zeros((), device=self.state.config.device, requires_grad=True)
        apply: Any = LayerwiseFunction.apply
        connected = apply(layerwise_pass, [hidden_of(output)], self._input, anchor)
        # The gradient that arrives may be shared with other nodes; a copy may be overwritten.
        connected.register_hook(lambda gradient: gradient.clone(memory_format=torch.contiguous_format))
        return (connected, *output[1:]) if isinstance(output, tuple) else connected


class LayerwiseFunction(torch.autograd.Function):
    """A layerwise pass as a single node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, layerwise_pass: LayerwisePass, output: list[Tensor], first: Tensor, anchor: Tensor) -> Tensor:
        """Return the output of the stack. first: the first layer's input. anchor: a leaf that puts the node into the
        graph where `first` needs no gradient."""
        ctx.layerwise_pass = layerwise_pass
        return output.pop()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None, None]:
        layerwise_pass, ctx.layerwise_pass = ctx.layerwise_pass, None
        return None, None, layerwise_pass.backward(gradient, ctx.needs_input_grad[2]), None


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states in a layer's output."""
    value: Tensor = output if isinstance(output, Tensor) else output[0]
    return value
