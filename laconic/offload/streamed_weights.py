"""Weights that live on the host and come to the device when it is their turn."""

from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from laconic.offload.host import Host
from laconic.offload.memory_accounting import accounted
from laconic.offload.weight_provider import on_gradient


class Streamed:
    """The supply of layers whose float32 weights and gradients stay on the host.

    The device holds the weights of the layer under way, and of the one that runs next, which are copied meanwhile. In
    another dtype than float32 the host keeps them in that dtype too, so that only those bytes travel. Gradients travel
    back as they become whole, and are added in float32 while the next layer runs. Ren et al., "ZeRO-Offload" (2021).
    """

    def __init__(self, host: Host, dtype: torch.dtype) -> None:
        self.host, self.dtype = host, dtype
        self._sources: dict[nn.Parameter, Tensor] = {}
        self._held: dict[nn.Module, dict[str, Tensor]] = {}
        self._given: list[tuple[nn.Parameter, Tensor]] = []
        self._turned = False

    def hold(self, layer: nn.Module) -> None:
        """Be the supply of a layer, whose parameters are on the host."""
        for parameter in layer.parameters():
            narrow = parameter.is_floating_point() and parameter.dtype != self.dtype
            with accounted(category="parameters"):
                self._sources[parameter] = self.host.empty(parameter, self.dtype) if narrow else parameter.data

    @torch.no_grad()
    def refresh(self) -> None:
        """The weights have changed."""
        for parameter, source in self._sources.items():
            if source.dtype != parameter.dtype:
                source.copy_(parameter)

    def take(self, layer: nn.Module, then: nn.Module | None) -> dict[str, Tensor]:
        self._turned = True
        self._held = {each: weights for each, weights in self._held.items() if each is layer}
        if layer not in self._held:
            self._fetch(layer)
        self.host.wait()
        if then is not None and then is not layer:
            self._fetch(then)
        return self._held[layer]

    def give(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if self._turned:
            # By now the device has work for a while: time to add what the layer before has sent.
            self.flush()
        with accounted(category="gradients"):
            self._given.append((parameter, self.host.put(gradient)))

    def flush(self) -> None:
        """Hand the gradients that have arrived on the host to their parameters."""
        self._turned = False
        if self._given:
            self.host.settle()
        while self._given:
            parameter, gradient = self._given.pop(0)
            with accounted("host", "gradients"):
                torch.autograd.backward([parameter], [gradient.to(parameter.dtype)])

    def close(self) -> None:
        self.flush()
        self._held = {}

    def _fetch(self, layer: nn.Module) -> None:
        self._held[layer] = {
            name: self.host.get(self._sources[parameter], category="parameters")
            for name, parameter in layer.named_parameters()
        }


class Doubles:
    """Copies, on the device and in the dtype of the computation, of the parameters outside the layers.

    Every place of a shared one has a leaf of its own, over the same memory: so a tied head's gradient travels at once,
    and does not wait for the embedding's.
    """

    def __init__(self, module: nn.Module, inside: Set[nn.Parameter], supply: Streamed) -> None:
        self._copies: dict[nn.Parameter, Tensor] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for owner in module.modules():
            for name, master in owner.named_parameters(recurse=False):
                if master not in inside:
                    dtype = supply.dtype if narrowed(owner) and master.is_floating_point() else master.dtype
                    self._places.append((owner, name, master, self._leaf(master, supply, dtype)))
        supply.host.wait()

    def _leaf(self, master: nn.Parameter, supply: Streamed, dtype: torch.dtype) -> nn.Parameter:
        if master not in self._copies:
            self._copies[master] = supply.host.get(master.data, dtype=dtype, category="parameters")
        leaf = nn.Parameter(self._copies[master], requires_grad=master.requires_grad)
        if leaf.requires_grad:
            on_gradient(leaf, partial(send, supply, master))
        return leaf

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The copies in the place of the parameters."""
        for owner, name, _, copy in self._places:
            setattr(owner, name, copy)
        try:
            yield
        finally:
            for owner, name, master, _ in self._places:
                setattr(owner, name, master)

    @torch.no_grad()
    def refresh(self) -> None:
        """The parameters have changed."""
        with accounted(copying=True):
            for master, copy in self._copies.items():
                copy.copy_(master)


def narrowed(part: nn.Module) -> bool:
    """Whether the weights that are a module's own may be taken in 16 bits: not beside statistics in float32."""
    own = any(True for _ in part.parameters(recurse=False))
    return own and getattr(part, "running_mean", None) is None


def send(supply: Streamed, master: nn.Parameter, leaf: Tensor) -> None:
    """A leaf's gradient goes to its parameter on the host."""
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    supply.give(master, gradient)
    supply.flush()
