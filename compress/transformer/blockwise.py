"""A pass through a transformer block by block, over all calibration samples: each block sees the inputs that the
already changed blocks before it produce, at the cost of one pass over the model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.statistics.layer_inputs import find_tokens, select_tokens
from laconic.errors import SourceError
from laconic.models.anatomy import Anatomy, Site
from laconic.models.hooks import forward_hooks
from laconic.models.signature import call, replace_forward

HIDDEN = "hidden_states"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a block, without the hidden states."""


@dataclass(frozen=True)
class ConsumerActivations:
    """Activations of one batch around a site's consumer, padding left out.

    x: input of the consumer, [tokens, in]. residual: the residual stream that its output is added to, [tokens, out].
    total: the sum of both, [tokens, out].
    """

    x: Tensor
    total: Tensor
    residual: Tensor


class BlockwisePass:
    """The hidden states of all samples before one block, advanced block by block.

    Blocks are in one run as long as each takes what the one before it gave. At the first block of another run, as of
    Swin's next stage, the model runs anew up to there. Memory: one hidden state for each token of the samples, or two.
    changes: whether the module is changed on the way;
    if not, a block that was observed is not run again to advance over it.
    """

    def __init__(
        self, module: nn.Module, anatomy: Anatomy, batches: Sequence[Mapping[str, Tensor]], *, changes: bool
    ) -> None:
        self._module = module
        self._anatomy = anatomy
        self._batches = batches
        self._changes = changes
        self._states: list[Tensor] = []
        self._after: dict[int, Tensor] = {}
        self._calls: list[dict[int, Arguments]] = []
        self._masks = [find_tokens(batch) for batch in batches]
        self._end = 0
        self._start_run(0)

    def _start_run(self, first: int) -> None:
        """Find the hidden states before the first block of a run, and the arguments of the run's blocks."""
        self._states.clear()
        self._after.clear()
        self._calls = [self._record_calls(batch, first) for batch in self._batches]
        if not all(self._calls):
            raise SourceError(f"the block {self._anatomy.block(first)} does not run, so that nothing in it can be cut")
        self._end = first + min(len(calls) for calls in self._calls)

    def _record_calls(self, batch: Mapping[str, Tensor], first: int) -> dict[int, Arguments]:
        """Record the arguments of each block of a run. Only the first block computes; the others return its output,
        since no argument but the hidden states depends on it."""
        calls: dict[int, Arguments] = {}
        outputs: list[Any] = []
        blocks = [self._module.get_submodule(path) for path in self._anatomy.blocks]
        ended = False

        def record(index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal ended
            state = args[0] if args else kwargs[HIDDEN]
            if not outputs:
                self._states.append(state)
                outputs.append(forward(*args, **kwargs))
            elif index not in calls and (
                ended or type(blocks[index]) is not type(blocks[first]) or not is_same(state, get_hidden(outputs[0]))
            ):
                ended = True
                return forward(*args, **kwargs)
            # A block that is called again, as ALBERT's, is one block.
            calls.setdefault(index, (args[1:], {name: value for name, value in kwargs.items() if name != HIDDEN}))
            return outputs[0]

        with ExitStack() as stack:
            for index in range(first, len(blocks)):
                stack.callback(replace_forward(blocks[index], partial(record, index, blocks[index].forward)))
            call(self._module, batch)
        return calls

    def _run_block(self, number: int, index: int) -> Tensor:
        args, kwargs = self._calls[number][index]
        return get_hidden(self._module.get_submodule(self._anatomy.block(index))(self._states[number], *args, **kwargs))

    def observe(self, site: Site) -> Iterator[ConsumerActivations]:
        """Yield the activations at a site of the present block, batch by batch."""
        seen: dict[str, Tensor] = {}
        followers: list[tuple[Tensor, Any]] = []
        root = self._anatomy.block(site.block)
        block = self._module.get_submodule(root)
        leaves = [f"{root}.{path}" for path, part in block.named_modules() if path and not list(part.children())]

        def observe_source(path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen["source"] = args[0]

        def observe_consumer(
            path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
        ) -> None:
            seen["x"], seen["y"] = args[0], out

        def observe_follower(
            path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
        ) -> None:
            if "y" in seen and path != site.consumer and args and isinstance(args[0], Tensor):
                followers.append((args[0], out))

        for number, state in enumerate(self._states):
            seen.clear()
            followers.clear()
            with (
                forward_hooks(self._module, [site.sources[0].layer], before=observe_source),
                forward_hooks(self._module, [site.consumer], after=observe_consumer),
                forward_hooks(self._module, leaves, after=observe_follower),
            ):
                after = self._run_block(number, site.block)
            if not self._changes:
                self._after[number] = after
            for name, value in seen.items():  # OPT's feed-forward network sees the tokens of all texts in one row
                if value.ndim == 2 < after.ndim and len(value) == after[..., 0].numel():
                    seen[name] = value.reshape(*after.shape[:-1], -1)
            residual = find_residual(site, state, after, seen, followers)
            mask = self._masks[number]
            x, y, residual = (select_tokens(activations, mask) for activations in (seen["x"], seen["y"], residual))
            yield ConsumerActivations(x, residual + y, residual)

    def advance(self, index: int) -> None:
        """Replace the hidden states by the inputs of the block behind the one with this index."""
        if index + 1 >= self._end:
            if index + 1 < len(self._anatomy.blocks):
                self._start_run(index + 1)
            return
        numbers = range(len(self._states))
        self._states = [
            self._after[number] if number in self._after else self._run_block(number, index) for number in numbers
        ]
        self._after.clear()


def get_hidden(output: Any) -> Tensor:
    """Return the hidden states that a block gives, which may come first in a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def is_same(state: Tensor, other: Tensor) -> bool:
    """Whether two hidden states are the same."""
    return state is other or (state.shape == other.shape and torch.equal(state, other))


def find_residual(
    site: Site, state: Tensor, after: Tensor, seen: Mapping[str, Tensor], followers: Iterable[tuple[Tensor, Any]]
) -> Tensor:
    """Return the residual stream that the output of a site's consumer is added to.

    state, after: hidden states before and after the block. seen: the inputs of the source, unless it is not called, and
    of the consumer, and its output y. followers: input and output of each layer that ran after the consumer. Zeros
    where y is scaled or normalized before it is added, or its tokens are in another order: its own values are then the
    target.
    """
    y = seen["y"]
    elsewhere = y.shape != (state if site.kind == "heads" else after).shape  # the windows of Swin's attention
    if elsewhere or any(read is y and written is not y for read, written in followers):
        return torch.zeros_like(y)
    if site.kind == "heads":
        return state
    source = seen.get("source")  # a module may read the weight of a layer without calling it, as EVA's attention does
    if source is not None and source.shape == y.shape:
        total = source + y
        # A block that ends with a normalization of the sum (post-LN) begins this half with the residual stream.
        if any(read.shape == total.shape and torch.equal(read, total) for read, _ in followers):
            return source
    return after - y
