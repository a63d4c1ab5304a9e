"""Dropout under tensor parallelism: one mask where all ranks have the same tensors, others where each has its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""What configurations of transformers call the dropout of attention weights, which need not be a module."""


class RegionRandomness:
    """Random numbers in the regions where each rank computes its own heads, units or positions: others on each rank.
    Outside of them all ranks draw the same, since all have the same tensors there."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._region: nn.Module | None = None
        self._outside: Tensor | None = None

    def watch(self, first: Sequence[nn.Module], last: nn.Module) -> None:
        """Draw other numbers on each rank from the end of any of `first` to the beginning of `last`."""
        for module in first:
            module.register_forward_hook(lambda *_: self._enter(last))
        last.register_forward_pre_hook(lambda *_: self._leave(last))

    def span(self, first: nn.Module, last: nn.Module) -> None:
        """Draw other numbers on each rank from the beginning of `first` to the end of `last`."""
        first.register_forward_pre_hook(lambda *_: self._enter(last))
        last.register_forward_hook(lambda *_: self._leave(last))

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Begin a forward pass, outside of all regions."""
        self._region = self._outside = None
        yield

    def _enter(self, region: nn.Module) -> None:
        # Another region may never have been left: recomputation stops where it has all that it needs.
        if self._region is not region and region.training:
            self._region = region
            seed = int(torch.randint(2**62, (), device=self._device))
            self._outside = self._generator.get_state()
            self._generator.manual_seed((seed + self._rank) % 2**62)

    def _leave(self, region: nn.Module) -> None:
        if self._region is region and self._outside is not None:
            self._generator.set_state(self._outside)
        self._region = self._outside = None

    @property
    def _generator(self) -> torch.Generator:
        is_cuda = self._device.type == "cuda"
        return torch.cuda.default_generators[self._device.index] if is_cuda else torch.default_generator


def has_dropout(module: nn.Module) -> bool:
    """Return whether a model draws dropout masks in training: by modules, or by settings of its attention."""
    rates = [part.p for part in module.modules() if isinstance(part, nn.modules.dropout._DropoutNd)]
    for part in module.modules():
        config = getattr(part, "config", None)
        rates += [getattr(config, name, None) or 0.0 for name in ATTENTION_DROPOUT]
    return any(rate > 0 for rate in rates)
