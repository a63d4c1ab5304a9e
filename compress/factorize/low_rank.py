"""Layers as products of two, of low rank."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from compress.factorize.fit import spectrum, spread, turned
from compress.factorize.parts import Shape, split, work
from compress.factorize.rank_selection import Candidate, by_budget, by_energy, losses
from compress.factorize.replace import named, replaced, replay, separate
from compress.statistics.gram import Moments, matrix, moments
from laconic.artifacts.record import Record
from laconic.errors import UsageError
from laconic.recipes.stage import Property, TorchContext, TorchStage
from laconic.units import Share

if TYPE_CHECKING:
    from laconic.models.checkpoint import Checkpoint

ENERGY = 0.99


class LowRank(TorchStage):
    """Linear layers become two, and convolutions two smaller ones, where that saves work.

    energy: the share of each layer's output that its rank is to hold; 0.99 where `keep` is not given either. keep: the
    share of the numbers in the chosen layers that is to be left, spread over them at the least loss. layers: by name or
    pattern; all that can be. convolutions: channels, the same kernel to few channels and a 1 x 1 convolution; or
    spatial, a k x 1 convolution and a 1 x k one. data: whether what flows into a layer decides which directions count;
    else the weight alone does. multiple: what ranks are multiples of. samples: how many to look at.
    """

    lossy: ClassVar[bool] = True
    makes: ClassVar[frozenset[Property]] = frozenset({"factors"})
    breaks: ClassVar[frozenset[Property]] = frozenset({"zeros", "ranges"})

    energy: Share | None = Field(default=None, gt=0, lt=1)
    keep: Share | None = Field(default=None, gt=0, lt=1)
    layers: tuple[str, ...] = ("*",)
    convolutions: Literal["channels", "spatial"] = "channels"
    data: bool = True
    multiple: int = Field(default=8, ge=1)
    samples: int = Field(default=256, ge=1)

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if self.energy is not None and self.keep is not None:
            raise ValueError("energy and keep are both given: ranks follow from one of them. Leave one out")
        return self

    def apply(self, checkpoint: "Checkpoint", context: TorchContext) -> "Checkpoint":
        chosen = named(dict(separate(checkpoint.module)), self.layers)
        dataset = context.calibrate.take(self.samples, context.seed)
        seen = moments(checkpoint.module, checkpoint.task, dataset, list(chosen)) if self.data else {}
        shapes = self.shapes(chosen, seen)
        if not shapes:
            measure = f"keep: {self.keep}" if self.keep else f"energy: {self.energy or ENERGY}"
            raise UsageError(
                f"factorize.low-rank: none of {len(chosen)} layers has a rank that saves work at {measure}, in "
                f"multiples of {self.multiple}. Ask for less, or name wider layers"
            )
        return replaced(checkpoint, context, self, "factorize.low-rank", dataset, seen, shapes)

    def shapes(self, chosen: Mapping[str, nn.Module], seen: Mapping[str, Moments]) -> dict[str, Shape]:
        """The rank of each layer that gets one."""
        candidates = [
            candidate(path, layer, self.shape(layer, 1), spread(seen.get(path), layer), self.multiple)
            for path, layer in chosen.items()
        ]
        energy = self.energy or ENERGY
        ranks = by_energy(candidates, energy) if self.keep is None else by_budget(candidates, self.keep)
        return {path: self.shape(chosen[path], rank) for path, rank in ranks.items()}

    def shape(self, layer: nn.Module, rank: int) -> Shape:
        """How a layer is taken apart: what has no height has nothing to separate from the width."""
        flat = not isinstance(layer, nn.Conv2d) or 1 in layer.kernel_size
        return Shape(kind="low-rank" if flat or self.convolutions == "channels" else "spatial", size=rank)

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        replay(module, record)


def candidate(path: str, layer: nn.Module, one: Shape, metric: Tensor, step: int) -> Candidate:
    """What the ranks of a layer cost. one: its shape at rank 1."""
    weight = matrix(layer).detach().double()
    if one.kind == "spatial":
        assert isinstance(layer, nn.Conv2d)
        energies = torch.linalg.svdvals(turned(weight, layer.kernel_size)).square()
    else:
        energies = spectrum(weight, metric)[0]
    each = sum(parameter.numel() for name, parameter in split(layer, one).named_parameters() if "weight" in name)
    most = min((work(layer) - 1) // work(layer, one), (weight.numel() - 1) // each, len(energies))
    return Candidate(path, losses(energies), weight.numel(), each, most, step)
