"""The rank of each layer, selected by the output energy that it keeps, or by a parameter budget over all layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


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


def energy_losses(energies: Tensor) -> list[float]:
    """The share of the energy that is lost at each rank, from 0 on. energies: [out], descending."""
    total = energies.sum().clamp(min=1e-30)
    return [*(energies.flip(0).cumsum(0).flip(0) / total).tolist(), 0.0]


def select_by_energy(layers: Sequence[RankTradeoff], energy: float) -> dict[str, int]:
    """The lowest rank of each layer that keeps this share of its output's energy, where that saves work."""
    found = {}
    for layer in layers:
        enough = [rank for rank in layer.ranks if layer.losses[min(rank, len(layer.losses) - 1)] <= 1 - energy + 1e-12]
        if enough:
            found[layer.path] = enough[-1]
    return found


def select_by_budget(layers: Sequence[RankTradeoff], keep: float) -> dict[str, int]:
    """Ranks with which the layers keep this share of their parameters, at the lowest loss of energy.

    Greedy: from whole layers on, the step with the lowest loss of a layer's energy per parameter saved is taken. Layers
    for which no step is taken stay whole.
    """
    budget = keep * sum(layer.parameters for layer in layers)
    left = float(sum(layer.parameters for layer in layers))
    found: dict[str, int] = {}
    while left > budget:
        best: tuple[float, str, int, float] | None = None
        for layer in layers:
            now = found.get(layer.path)
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
        found[best[1]] = best[2]
    return found
