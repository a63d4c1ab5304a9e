"""Factorization of convolutions into those of efficient architectures, each fitted to the one that it replaces."""

from collections.abc import Mapping
from math import ceil
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from compress.factorize.factorize_layers import (
    factorize_layers,
    find_factorizable,
    replay_factorization,
    select_layers,
)
from compress.factorize.factors import Factorization, count_multiplications
from compress.statistics.moments import collect_moments
from laconic.artifacts.record import Record
from laconic.errors import UsageError
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.stage import Property, TorchContext, TorchStage
from laconic.units import Share


class Convolution(TorchStage):
    """Replace convolutions by depthwise separable ones, grouped ones with a 1 x 1 convolution, or bottlenecks.

    into: what they become. depth_multiplier: of a separable convolution, filters for each channel. groups: of a grouped
    one. width: of a bottleneck, as a share of the smaller number of channels, rounded up to a multiple of `round_to`.
    layers: by path or pattern; default: all that save work by it. max_error: a layer with a larger squared output
    error, as a share of the squared output, stays as it is. samples: how many calibration samples to use.

    Depthwise separable: Howard et al., MobileNets, 2017; bottleneck: He et al., Deep Residual Learning, 2016.
    """

    lossy: ClassVar[bool] = True
    breaks: ClassVar[frozenset[Property]] = frozenset({"zeros", "ranges"})
    renamed: ClassVar[Mapping[str, str]] = {
        "filters": "depth_multiplier",
        "loss": "max_error",
        "multiple": "round_to",
    }

    into: Literal["separable", "grouped", "bottleneck"] = "separable"
    depth_multiplier: int = Field(default=2, ge=1)
    groups: int = Field(default=4, ge=2)
    width: Share = Field(default=0.5, gt=0, lt=1)
    round_to: int = Field(default=8, ge=1)
    layers: tuple[str, ...] = ("*",)
    max_error: Share = Field(default=0.2, gt=0, le=1)
    samples: int = Field(default=256, ge=1)

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        layers = find_factorizable(checkpoint.module)
        convolutions = {path: layer for path, layer in layers if isinstance(layer, nn.Conv2d)}
        chosen = select_layers(convolutions, self.layers)
        factorizations = {path: made for path in chosen if (made := self.factorization(convolutions[path]))}
        if not factorizations:
            raise UsageError(
                f"factorize.convolution: none of the convolutions {sorted(convolutions)} saves work when it is made "
                f"{self.into}. Name layers with a kernel larger than 1 x 1 and more channels"
            )
        dataset = context.calibrate.take(self.samples, context.seed)
        moments = collect_moments(checkpoint.module, checkpoint.task, dataset, list(factorizations))
        name, limit = "factorize.convolution", self.max_error
        return factorize_layers(checkpoint, context, self, name, dataset, moments, factorizations, max_error=limit)

    def factorization(self, layer: nn.Conv2d) -> Factorization | None:
        """Return what a convolution becomes; None if that saves no work or is not possible."""
        out, into, area = layer.out_channels, layer.in_channels, layer.kernel_size[0] * layer.kernel_size[1]
        match self.into:
            case "separable":
                size, possible = self.depth_multiplier, self.depth_multiplier <= min(out, area)
            case "grouped":
                size, possible = self.groups, not (into % self.groups or out % self.groups)
            case "bottleneck":
                size = ceil(self.width * min(into, out) / self.round_to) * self.round_to
                possible = size < min(into, out)
        made = Factorization(kind=self.into, size=size)
        if not possible or area == 1 or count_multiplications(layer, made) >= count_multiplications(layer):
            return None
        return made

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Replace the same convolutions of an empty module."""
        replay_factorization(module, record)
