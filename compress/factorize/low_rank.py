"""Low-rank factorization of linear layers and convolutions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from compress.factorize.factorize_layers import (
    factorize_layers,
    find_factorizable,
    replay_factorization,
    select_layers,
)
from compress.factorize.factors import Factorization, count_multiplications, make_factors
from compress.factorize.fit_factors import input_metric, output_spectrum, spatial_matrix
from compress.statistics.layer_weights import weight_matrix
from compress.statistics.moments import Moments, collect_moments
from laconic.artifacts.record import Record
from laconic.errors import UsageError
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.stage import Property, TorchContext, TorchStage
from laconic.units import Share

ENERGY = 0.99


@dataclass(frozen=True)
class RankTradeoff:
    """The trade-off between size and output energy of one layer.

    losses: the share of the output's energy that is lost at each rank, from 0 on. parameters: of the layer as it is.
    per_rank: parameters that each rank adds. highest: the highest rank that saves work. step: ranks are multiples of
    it.
    """

    path: str
    losses: Sequence[float]
    parameters: int
    per_rank: int
    highest: int
    step: int

    @property
    def ranks(self) -> range:
        """The ranks that save work, in descending order."""
        return range(self.highest - self.highest % self.step, 0, -self.step)


class LowRank(TorchStage):
    """Replace linear layers by two smaller ones, and convolutions by two smaller ones, where that saves work.

    energy: the share of the energy of each layer's output that its rank keeps; 0.99 if `keep` is not given either.
    keep: the share of the parameters of the selected layers that is left, distributed at the lowest loss of energy.
    layers: by path or pattern; default: all that can be factorized. convolutions: channels, the same kernel to few
    channels and a 1 x 1 convolution; or spatial, a k x 1 convolution and a 1 x k one. data_aware: whether calibration
    inputs decide which directions are kept (as in DRONE: Chen et al., 2021); otherwise the weight alone does. round_to:
    ranks are multiples of this. samples: how many calibration samples to use.
    """

    lossy: ClassVar[bool] = True
    makes: ClassVar[frozenset[Property]] = frozenset({"factors"})
    breaks: ClassVar[frozenset[Property]] = frozenset({"zeros", "ranges"})
    renamed: ClassVar[Mapping[str, str]] = {"data": "data_aware", "multiple": "round_to"}

    energy: Share | None = Field(default=None, gt=0, lt=1)
    keep: Share | None = Field(default=None, gt=0, lt=1)
    layers: tuple[str, ...] = ("*",)
    convolutions: Literal["channels", "spatial"] = "channels"
    data_aware: bool = True
    round_to: int = Field(default=8, ge=1)
    samples: int = Field(default=256, ge=1)

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if self.energy is not None and self.keep is not None:
            raise ValueError("energy and keep are both given: ranks are derived from one of them. Leave one out")
        return self

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        chosen = select_layers(dict(find_factorizable(checkpoint.module)), self.layers)
        dataset = context.calibrate.take(self.samples, context.seed)
        moments = collect_moments(checkpoint.module, checkpoint.task, dataset, list(chosen)) if self.data_aware else {}
        factorizations = self.factorizations(chosen, moments)
        if not factorizations:
            measure = f"keep: {self.keep}" if self.keep else f"energy: {self.energy or ENERGY}"
            raise UsageError(
                f"factorize.low-rank: none of {len(chosen)} layers has a rank that saves work at {measure}, in "
                f"multiples of {self.round_to}. Ask for less, or name wider layers"
            )
        return factorize_layers(checkpoint, context, self, "factorize.low-rank", dataset, moments, factorizations)

    def factorizations(
        self, chosen: Mapping[str, nn.Module], moments: Mapping[str, Moments]
    ) -> dict[str, Factorization]:
        """Return the factorization of each layer that is factorized, by its path."""
        layers = [
            measure_tradeoff(
                path, layer, self.factorization(layer, 1), input_metric(moments.get(path), layer), self.round_to
            )
            for path, layer in chosen.items()
        ]
        energy = self.energy or ENERGY
        ranks = select_by_energy(layers, energy) if self.keep is None else select_by_budget(layers, self.keep)
        return {path: self.factorization(chosen[path], rank) for path, rank in ranks.items()}

    def factorization(self, layer: nn.Module, rank: int) -> Factorization:
        """Return the factorization of a layer at this rank. Kernels of height or width 1 have no spatial
        factorization."""
        flat = not isinstance(layer, nn.Conv2d) or 1 in layer.kernel_size
        return Factorization(kind="low-rank" if flat or self.convolutions == "channels" else "spatial", size=rank)

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Replace the same layers of an empty module."""
        replay_factorization(module, record)


def measure_tradeoff(path: str, layer: nn.Module, one: Factorization, metric: Tensor, step: int) -> RankTradeoff:
    """Return the trade-off between rank and output energy of one layer. one: its factorization at rank 1."""
    weight = weight_matrix(layer).detach().double()
    if one.kind == "spatial":
        assert isinstance(layer, nn.Conv2d)
        energies = torch.linalg.svdvals(spatial_matrix(weight, layer.kernel_size)).square()
    else:
        energies = output_spectrum(weight, metric)[0]
    factors = make_factors(layer, one)
    per_rank = sum(parameter.numel() for name, parameter in factors.named_parameters() if "weight" in name)
    highest = min(
        (count_multiplications(layer) - 1) // count_multiplications(layer, one),
        (weight.numel() - 1) // per_rank,
        len(energies),
    )
    return RankTradeoff(path, energy_losses(energies), weight.numel(), per_rank, highest, step)


def energy_losses(energies: Tensor) -> list[float]:
    """Return the share of the energy that is lost at each rank, from 0 on. energies: [out], descending."""
    total = energies.sum().clamp(min=1e-30)
    return [*(energies.flip(0).cumsum(0).flip(0) / total).tolist(), 0.0]


def select_by_energy(layers: Sequence[RankTradeoff], energy: float) -> dict[str, int]:
    """Return the lowest rank of each layer that keeps this share of its output's energy, where that saves work."""
    ranks = {}
    for layer in layers:
        enough = [rank for rank in layer.ranks if layer.losses[min(rank, len(layer.losses) - 1)] <= 1 - energy + 1e-12]
        if enough:
            ranks[layer.path] = enough[-1]
    return ranks


def select_by_budget(layers: Sequence[RankTradeoff], keep: float) -> dict[str, int]:
    """Return ranks with which the layers keep this share of their parameters, at the lowest loss of energy.

    Greedy: from whole layers on, the step with the lowest loss of a layer's energy per parameter saved is taken. Layers
    for which no step is taken stay whole.
    """
    budget = keep * sum(layer.parameters for layer in layers)
    left = float(sum(layer.parameters for layer in layers))
    ranks: dict[str, int] = {}
    while left > budget:
        best: tuple[float, str, int, float] | None = None
        for layer in layers:
            now = ranks.get(layer.path)
            size, lost = (layer.parameters, 0.0) if now is None else (now * layer.per_rank, layer.losses[now])
            for rank in layer.ranks:
                saved = size - rank * layer.per_rank
                if saved <= 0:
                    continue
                option = (layer.losses[rank] - lost) / saved, layer.path, rank, saved
                # Among equal steps the smaller one, so that no more is removed than was asked for.
                if best is None or option[0] < best[0] - 1e-18:
                    best = option
        if best is None:
            break
        left -= best[3]
        ranks[best[1]] = best[2]
    return ranks
