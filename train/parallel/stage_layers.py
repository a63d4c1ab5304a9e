"""The list of a model's layers, of which the stages of a pipeline run some each while the model's own code loops over
all of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.errors import TrainingFailure
from train.layerwise.layer_call import HIDDEN
from train.layerwise.layer_stack import LayerProxy, hidden_of

Run = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""From the number of a layer, the layer and the arguments that the model calls it with to its output."""


class StageEnd(Exception):
    """The last layer of a stage has run: the model goes on in the next stage. hidden: between both."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the stage ends here")
        self.hidden = hidden


class LayerRouter:
    """What happens when the model calls its layers; nothing unusual outside of `route`."""

    def __init__(self, values: int) -> None:
        """values: how many values a layer returns in a tuple; 0 for the hidden states alone."""
        self.run: Run | None = None
        self.values = values

    @contextmanager
    def route(self, run: Run) -> Iterator[None]:
        """Hand the calls of layers over to `run` in the body."""
        self.run = run
        try:
            yield
        finally:
            self.run = None

    def pass_on(self, hidden: Tensor) -> Any:
        """Return hidden states in the form of a layer's output."""
        return (hidden, *[None] * (self.values - 1)) if self.values else hidden


class StagedLayers(nn.Module):
    """Mixed into the class of a list of layers. Only the list's class changes, so parameters keep their names."""

    router: LayerRouter

    def __iter__(self) -> Iterator[Any]:
        layers = list(self.children())
        run = self.router.run
        return iter(layers) if run is None else iter(make_proxies(layers, run))

    def __getitem__(self, index: int | slice) -> Any:
        if (run := self.router.run) is None:
            return nn.ModuleList(self.children())[index]
        return make_proxies(list(self.children()), run)[index]


def make_proxies(layers: list[nn.Module], run: Run) -> list[LayerProxy]:
    """Make a proxy of each layer, whose calls `run` answers."""
    return [LayerProxy(layer, partial(call_layer, run, number)) for number, layer in enumerate(layers)]


def call_layer(run: Run, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hand the call of a layer over to `run`."""
    return run(number, layer, args, kwargs)


class StagePass:
    """One forward pass through a stage. received: the hidden states of the stage before; None in the first stage."""

    def __init__(self, router: LayerRouter, layers: range, received: Tensor | None) -> None:
        self._router, self._layers, self._received = router, layers, received
        self._done = 0

    def __call__(self, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = read_hidden(args, kwargs)
        assert hidden is not None
        if number < self._layers.start:
            return self._router.pass_on(hidden)
        if number >= self._layers.stop:
            self.check()
            raise StageEnd(hidden)
        if number == self._layers.start and self._received is not None:
            args, kwargs = replace_hidden(args, kwargs, self._received)
        self._done += 1
        return layer(*args, **kwargs)

    def check(self) -> None:
        """Raise TrainingFailure unless each layer of the stage has run."""
        if self._done != len(self._layers):
            raise TrainingFailure(
                f"{self._done} of the {len(self._layers)} layers of a stage were called. A model that skips layers, or "
                f"calls them twice, cannot be trained with mesh.pipeline"
            )


class RelayPass:
    """One forward pass through all stages, one after the other, as for evaluation: each rank runs its layers, and sends
    the hidden states to the rank of the next stage."""

    def __init__(
        self,
        router: LayerRouter,
        layers: Mapping[int, range],
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        dtype: torch.dtype | None,
    ) -> None:
        """layers: of the stages of this rank. ranks: for each stage, its rank in the group. dtype: in which hidden
        states are sent; None for theirs before the first layer."""
        self._router, self._layers, self._ranks, self._group, self._dtype = router, layers, ranks, group, dtype
        self._here: Tensor | None = None

    def __call__(self, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = read_hidden(args, kwargs)
        assert hidden is not None
        self._dtype = self._dtype or hidden.dtype
        stage = next((stage for stage, layers in self._layers.items() if number in layers), None)
        if stage is None:
            if all(number >= layers.stop for layers in self._layers.values()):
                raise StageEnd(hidden)
            return self._router.pass_on(hidden)
        layers = self._layers[stage]
        if number == layers.start and stage:
            args, kwargs = replace_hidden(args, kwargs, self._receive(stage, hidden))
        output = layer(*args, **kwargs)
        if number == layers.stop - 1 and stage < len(self._ranks) - 1:
            self._send(stage, hidden_of(output))
        return output

    def _receive(self, stage: int, like: Tensor) -> Tensor:
        source = self._ranks[stage - 1]
        if source == self._ranks[stage]:
            assert self._here is not None
            return self._here
        received = torch.empty_like(like, dtype=self._dtype, memory_format=torch.contiguous_format)
        dist.recv(received, group=self._group, group_src=source)
        return received

    def _send(self, stage: int, hidden: Tensor) -> None:
        hidden, target = hidden.to(self._dtype or hidden.dtype).contiguous(), self._ranks[stage + 1]
        if target == self._ranks[stage]:
            self._here = hidden
        else:
            dist.send(hidden, group=self._group, group_dst=target)


class StageModule(nn.Module):
    """One stage of a model, which the model's own code runs: from the hidden states of the stage before to those of the
    next, or to the loss."""

    def __init__(self, members: Sequence[nn.Module], run: Callable[[Tensor | None, int], Tensor]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self._run = run

    def forward(self, received: Tensor | None = None, *, number: Tensor) -> Tensor:
        return self._run(received, int(number))


class SharedModule(nn.Module):
    """A model that several ranks run together, and whose output each of them gets, on the host. compute: as of a
    `ParallelStrategy`."""

    def __init__(self, module: nn.Module, compute: Callable[[Callable[[], Tensor]], Tensor]) -> None:
        super().__init__()
        self.module, self._compute = module, compute

    def forward(self, *args: Tensor) -> Tensor:
        return self._compute(lambda: self.module(*args).cpu())


def read_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the hidden states among a layer's arguments; None without any."""
    hidden = args[0] if args else kwargs.get(HIDDEN)
    return hidden if isinstance(hidden, Tensor) and hidden.is_floating_point() else None


def replace_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, HIDDEN: hidden})
