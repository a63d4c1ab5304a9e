"""Convolutions of efficient architectures in the place of full ones, each trained to imitate the one it replaces."""

from math import ceil
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from torch import nn

from compress.factorize.parts import Shape, work
from compress.factorize.replace import named, replaced, replay, separate
from compress.statistics.gram import moments
from laconic.artifacts.record import Record
from laconic.errors import UsageError
from laconic.recipes.stage import Property, TorchContext, TorchStage
from laconic.units import Share

if TYPE_CHECKING:
    from laconic.models.checkpoint import Checkpoint


class Convolution(TorchStage):
    """Full convolutions become depthwise separable ones, grouped ones with a 1 x 1 convolution behind, or bottlenecks.

    into: what they become. filters: of a separable convolution, for each channel. groups: of a grouped one. width: of a
    bottleneck, as a share of the narrower of the layer's sides, in multiples of `multiple`. layers: by name or pattern;
    all that save work by it. loss: a layer that cannot be imitated to within this share of its answers' square stays as
    it is. samples: how many to look at.
    """

    lossy: ClassVar[bool] = True
    breaks: ClassVar[frozenset[Property]] = frozenset({"zeros", "ranges"})

    into: Literal["separable", "grouped", "bottleneck"] = "separable"
    filters: int = Field(default=2, ge=1)
    groups: int = Field(default=4, ge=2)
    width: Share = Field(default=0.5, gt=0, lt=1)
    multiple: int = Field(default=8, ge=1)
    layers: tuple[str, ...] = ("*",)
    loss: Share = Field(default=0.2, gt=0, le=1)
    samples: int = Field(default=256, ge=1)

    def apply(self, checkpoint: "Checkpoint", context: TorchContext) -> "Checkpoint":
        found = {path: layer for path, layer in separate(checkpoint.module) if isinstance(layer, nn.Conv2d)}
        chosen = named(found, self.layers)
        shapes = {path: shape for path in chosen if (shape := self.shape(found[path]))}
        if not shapes:
            raise UsageError(
                f"factorize.convolution: none of the convolutions {sorted(found)} saves work when it is made "
                f"{self.into}. Name layers with a kernel larger than 1 x 1 and more channels"
            )
        dataset = context.calibrate.take(self.samples, context.seed)
        seen = moments(checkpoint.module, checkpoint.task, dataset, list(shapes))
        return replaced(checkpoint, context, self, "factorize.convolution", dataset, seen, shapes, most=self.loss)

    def shape(self, layer: nn.Conv2d) -> Shape | None:
        """What a convolution becomes; None where that saves no work, or cannot be."""
        out, into, area = layer.out_channels, layer.in_channels, layer.kernel_size[0] * layer.kernel_size[1]
        match self.into:
            case "separable":
                size, possible = self.filters, self.filters <= min(out, area)
            case "grouped":
                size, possible = self.groups, not (into % self.groups or out % self.groups)
            case "bottleneck":
                size = ceil(self.width * min(into, out) / self.multiple) * self.multiple
                possible = size < min(into, out)
        shape = Shape(kind=self.into, size=size)
        return shape if possible and area > 1 and work(layer, shape) < work(layer) else None

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        replay(module, record)
