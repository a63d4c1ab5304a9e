"""A recorded call of a layer, which can be repeated for recomputation, on all rows of the batch or on some, and what
recomputation must restore to give the same result: random number generators and autocast."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from laconic.errors import RecipeError
from train.offload.memory_accounting import account_as

HIDDEN = "hidden_states"
"""The name that transformers gives to what flows from layer to layer."""


@dataclass(frozen=True)
class RngState:
    """The state of torch's random number generators, on the CPU and on one GPU."""

    cpu: Tensor
    gpu: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> "RngState":
        """Capture the present state. It lies on the host, a GPU's as well: 5 KB for each layer and micro-batch."""
        with account_as("host"):
            return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        """Draw from here on the numbers that were drawn after `capture`."""
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, device)


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the state of the generators after the body."""
    before = RngState.capture(device)
    try:
        yield
    finally:
        before.restore(device)


@dataclass(frozen=True)
class AutocastState:
    """Whether autocast is enabled, and to which dtype."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def capture(cls, device: torch.device) -> "AutocastState":
        """Capture the present state."""
        kind = device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def restore(self) -> torch.autocast:
        """Make a context with this state, but without autocast's cache, which would be a second copy of the model."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


@dataclass(eq=False)
class LayerCall:
    """The arguments of a layer's call.

    rows: of the batch. args, kwargs: the arguments beside the hidden states. by_name: whether the hidden states were
    passed by name, and not first. rng_states: the generators' state before each micro-batch, by its first row.
    """

    layer: nn.Module
    rows: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: bool
    rng_states: dict[int, RngState] = field(default_factory=dict)

    def __call__(self, weights: dict[str, Tensor], hidden: Tensor, part: slice | None) -> tuple[Tensor, Any]:
        """Return the hidden states after the layer, [rows of the part, ...], and the layer's whole output.

        part: the rows of the batch that `hidden` holds; None means all of them. Raises RecipeError.
        """
        args, kwargs = self.args, self.kwargs
        if part is not None:
            args, kwargs = self.slice_rows(args, part), self.slice_rows(kwargs, part)
        named = {**kwargs, HIDDEN: hidden} if self.by_name else kwargs
        output = functional_call(self.layer, weights, args if self.by_name else (hidden, *args), named)
        value, *others = output if isinstance(output, tuple) else (output,)
        if any(True for _ in iterate_tensors(others)):
            raise RecipeError(
                f"layerwise: a layer of class {type(self.layer).__name__} returns more tensors than its hidden states, "
                f"and their gradients would be lost. Do not output attentions, or use gradient-checkpointing instead"
            )
        return value, output

    def slice_rows(self, value: Any, part: slice) -> Any:
        """Select rows of every tensor of `value` that has the rows of the batch. Raises RecipeError for others."""

        def select(tensor: Tensor) -> Tensor:
            if tensor.ndim == 0 or tensor.shape[0] == 1:
                return tensor
            if tensor.shape[0] != self.rows:
                raise RecipeError(
                    f"layerwise: layers of class {type(self.layer).__name__} take a tensor of shape "
                    f"{list(tensor.shape)} whose first axis is not the {self.rows} rows of the batch, so the batch "
                    f"cannot be split into micro-batches. Set rows: null"
                )
            return tensor[part]

        return map_tensors(select, value)


def record_call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[LayerCall, Tensor]:
    """Record the call of a layer with these arguments, and return it with its hidden states.

    Raises RecipeError if the call cannot be repeated: no hidden states, a gradient through another argument, a cache.
    """
    by_name = not args
    hidden = kwargs.get(HIDDEN) if by_name else args[0]
    name = type(layer).__name__
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or hidden.ndim == 0:
        raise RecipeError(
            f"layerwise: a layer of class {name} was called without hidden states as its first argument or as "
            f"{HIDDEN}. Use gradient-checkpointing instead"
        )
    others = {key: value for key, value in kwargs.items() if key != HIDDEN} if by_name else kwargs
    call = LayerCall(layer, hidden.shape[0], args[1:], others, by_name)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in iterate_tensors((call.args, call.kwargs))):
        raise RecipeError(
            f"layerwise: layers of class {name} take a tensor beside their hidden states through which a gradient "
            f"flows (an encoder's output, a learned bias). Use gradient-checkpointing instead"
        )
    if torch.is_grad_enabled() and any(hasattr(value, "get_seq_length") for value in (*call.args, *others.values())):
        raise RecipeError(
            f"layerwise: layers of class {name} were called with a key-value cache, which recomputation would fill "
            f"twice. Call the model with use_cache=False"
        )
    return call, hidden


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Copy a nest of tuples, lists and dicts, with `function` applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a nest of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iterate_tensors(item)
