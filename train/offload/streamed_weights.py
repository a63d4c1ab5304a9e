"""Weights that are kept on the host and streamed to the device layer by layer."""

from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from train.offload.host_memory import HostMemory
from train.offload.memory_accounting import account_as
from train.offload.weight_provider import register_gradient_hook


class StreamedWeights:
    """Provides the weights of layers whose FP32 master weights and gradients stay on the host.

    Double buffering: the device holds the weights of the layer that runs and those of the next one, which are copied
    meanwhile. If the device computes in another dtype than FP32, the host keeps a copy in that dtype too, so that only
    those bytes are transferred. Gradients are copied back as they are completed, and accumulated in FP32 while the next
    layer runs. Ren et al., "ZeRO-Offload", arXiv 2101.06840.
    """

    def __init__(self, host: HostMemory, dtype: torch.dtype) -> None:
        self.host, self.dtype = host, dtype
        self._sources: dict[nn.Parameter, Tensor] = {}
        self._on_device: dict[nn.Module, dict[str, Tensor]] = {}
        self._pending: list[tuple[nn.Parameter, Tensor]] = []
        self._has_fetched = False

    def add_layer(self, layer: nn.Module) -> None:
        """Provide the weights of a layer, whose parameters are on the host."""
        for parameter in layer.parameters():
            narrow = parameter.is_floating_point() and parameter.dtype != self.dtype
            with account_as(category="parameters"):
                self._sources[parameter] = self.host.empty_like(parameter, self.dtype) if narrow else parameter.data

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the copies on the host after the master weights have changed."""
        for parameter, source in self._sources.items():
            if source.dtype != parameter.dtype:
                source.copy_(parameter)

    def fetch(self, layer: nn.Module, upcoming: nn.Module | None) -> dict[str, Tensor]:
        self._has_fetched = True
        self._on_device = {kept: weights for kept, weights in self._on_device.items() if kept is layer}
        if layer not in self._on_device:
            self._copy_to_device(layer)
        self.host.wait()
        if upcoming is not None and upcoming is not layer:
            self._copy_to_device(upcoming)
        return self._on_device[layer]

    def return_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if self._has_fetched:
            # The device has work queued by now: time to accumulate the gradients of the layer before.
            self.flush()
        with account_as(category="gradients"):
            self._pending.append((parameter, self.host.copy_to_host(gradient)))

    def flush(self) -> None:
        """Accumulate the gradients that have arrived on the host into their parameters."""
        self._has_fetched = False
        if self._pending:
            self.host.synchronize()
        while self._pending:
            parameter, gradient = self._pending.pop(0)
            with account_as("host", "gradients"):
                torch.autograd.backward([parameter], [gradient.to(parameter.dtype)])

    def end_pass(self) -> None:
        self.flush()
        self._on_device = {}

    def _copy_to_device(self, layer: nn.Module) -> None:
        self._on_device[layer] = {
            name: self.host.copy_to_device(self._sources[parameter], category="parameters")
            for name, parameter in layer.named_parameters()
        }


class ResidentCopies:
    """Copies of the parameters outside the streamed layers, on the device and in the dtype of the computation.

    Each place in which a shared parameter is used has a leaf tensor of its own over the same memory, so the gradient of
    a tied head is sent to the host at once and does not wait for the embedding's.
    """

    def __init__(self, module: nn.Module, streamed: Set[nn.Parameter], provider: StreamedWeights) -> None:
        """streamed: the parameters that `provider` streams; all others of the module are copied here."""
        self._copies: dict[nn.Parameter, Tensor] = {}
        self._leaves: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for owner in module.modules():
            for name, master in owner.named_parameters(recurse=False):
                if master not in streamed:
                    narrow = may_compute_in_16_bits(owner) and master.is_floating_point()
                    leaf = self._make_leaf(master, provider, provider.dtype if narrow else master.dtype)
                    self._leaves.append((owner, name, master, leaf))
        provider.host.wait()

    def _make_leaf(self, master: nn.Parameter, provider: StreamedWeights, dtype: torch.dtype) -> nn.Parameter:
        if master not in self._copies:
            self._copies[master] = provider.host.copy_to_device(master.data, dtype=dtype, category="parameters")
        leaf = nn.Parameter(self._copies[master], requires_grad=master.requires_grad)
        if leaf.requires_grad:
            register_gradient_hook(leaf, partial(send_gradient, provider, master))
        return leaf

    @contextmanager
    def substitute(self) -> Iterator[None]:
        """Put the copies in the place of the parameters for the body."""
        for owner, name, _, leaf in self._leaves:
            setattr(owner, name, leaf)
        try:
            yield
        finally:
            for owner, name, master, _ in self._leaves:
                setattr(owner, name, master)

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the copies after the parameters have changed."""
        with account_as(copying=True):
            for master, copy in self._copies.items():
                copy.copy_(master)


def may_compute_in_16_bits(part: nn.Module) -> bool:
    """Return whether a module has weights of its own that may be cast: beside running statistics they stay in FP32."""
    has_weights = any(True for _ in part.parameters(recurse=False))
    return has_weights and getattr(part, "running_mean", None) is None


def send_gradient(provider: StreamedWeights, master: nn.Parameter, leaf: Tensor) -> None:
    """Move the gradient of a leaf on the device to its master parameter on the host."""
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    provider.return_gradient(master, gradient)
    provider.flush()
