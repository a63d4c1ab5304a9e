"""How many directions of a layer's output are kept: by their energy, or by a budget over all layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Candidate:
    """A layer, and what each rank of it would cost.

    losses: the share of the output's energy that is lost with each rank, from 0 on. whole: numbers that the layer has
    now. each: numbers that one rank has. most: the highest rank that saves work. step: ranks are multiples of it.
    """

    path: str
    losses: Sequence[float]
    whole: int
    each: int
    most: int
    step: int

    @property
    def ranks(self) -> range:
        """Those that save work, highest first."""
        return range(self.most - self.most % self.step, 0, -self.step)


def losses(energies: Tensor) -> list[float]:
    """The share of the energy that is lost with each rank. energies: [out], greatest first."""
    total = energies.sum().clamp(min=1e-30)
    return [*(energies.flip(0).cumsum(0).flip(0) / total).tolist(), 0.0]


def by_energy(candidates: Sequence[Candidate], energy: float) -> dict[str, int]:
    """The lowest rank of each layer that holds so much of its output's energy, where that saves work."""
    found = {}
    for each in candidates:
        enough = [rank for rank in each.ranks if each.losses[min(rank, len(each.losses) - 1)] <= 1 - energy + 1e-12]
        if enough:
            found[each.path] = enough[-1]
    return found


def by_budget(candidates: Sequence[Candidate], keep: float) -> dict[str, int]:
    """Ranks with which the layers have this share of their numbers, at the least error.

    From whole layers on, the step is taken again and again that loses the least of a layer's energy for each number
    saved. Layers are left whole where that comes out so.
    """
    budget = keep * sum(each.whole for each in candidates)
    left = float(sum(each.whole for each in candidates))
    found: dict[str, int] = {}
    while left > budget:
        best: tuple[float, str, int, float] | None = None
        for each in candidates:
            now = found.get(each.path)
            size, lost = (each.whole, 0.0) if now is None else (now * each.each, each.losses[now])
            for rank in each.ranks:
                saved = size - rank * each.each
                if saved <= 0:
                    continue
                option = (each.losses[rank] - lost) / saved, each.path, rank, saved
                # The nearer step first, so that no more is given than is asked for.
                if best is None or option[0] < best[0] - 1e-18:
                    best = option
        if best is None:
            break
        left -= best[3]
        found[best[1]] = best[2]
    return found
