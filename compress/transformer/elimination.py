"""Which units of a layer's input to cut, and what weights the others then need: least squares on calibration data.

The layer's output is to stay as it is, or to become what the original's was where the cuts before it have moved it.
Both have a closed form in the second moments of the inputs and of what the output should be.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.statistics.gram import Moments, matrix

DAMPINGS = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""How strongly weights may be held where they were, as shares of the mean of the moments' diagonal."""
DAMPING = 1e-1
"""While it is not settled which units stay."""
TINY = 1e-300
ROUNDS = 64
"""Units that are cut between two updates of what is left are so many that a layer takes at most about so many."""


@dataclass
class Sums:
    """Over tokens, from which a layer's weights are found. inputs: moments of the layer's inputs x. cross: of t xT,
    [out, in] float32, where t is what should come out. target: of t, [out]. energy: of the squares of t."""

    inputs: Moments
    cross: Tensor
    target: Tensor
    energy: float = 0.0

    @classmethod
    def empty(cls, layer: nn.Module) -> "Sums":
        """Nothing seen yet of a layer."""
        out, into = matrix(layer).shape
        return cls(Moments(torch.zeros(into, into), torch.zeros(into), 0), torch.zeros(out, into), torch.zeros(out))

    def add(self, x: Tensor, target: Tensor) -> None:
        """Count tokens: x [tokens, in], target [tokens, out]."""
        self.inputs.gram.addmm_(x.T, x)
        self.inputs.total += x.sum(dim=0)
        self.inputs.count += len(x)
        self.cross.addmm_(target.T, x)
        self.target += target.sum(dim=0)
        self.energy += float(target.double().square().sum())

    def __add__(self, other: "Sums") -> "Sums":
        mine, theirs = self.inputs, other.inputs
        inputs = Moments(mine.gram + theirs.gram, mine.total + theirs.total, mine.count + theirs.count)
        return Sums(inputs, self.cross + other.cross, self.target + other.target, self.energy + other.energy)


class Normal:
    """The normal equations of one layer, centred where it has a bias to take the means; float64.

    Their solution minimises |t - W x - b|^2 + damping |W - W0|^2, with W0 the weights as they are.
    """

    def __init__(self, weight: Tensor, biased: bool, sums: Sums, damping: float = DAMPING) -> None:
        self.weight, self.biased = weight.detach().double(), biased
        gram, cross = sums.inputs.gram.double(), sums.cross.double()
        count = max(sums.inputs.count, 1)
        self.mean, self.centre = sums.inputs.total.double() / count, sums.target.double() / count
        self.energy = sums.energy
        if biased:
            gram = gram - count * torch.outer(self.mean, self.mean)
            cross = cross - count * torch.outer(self.centre, self.mean)
            self.energy -= float(count * self.centre.square().sum())
        held = damping * float(gram.diagonal().mean()) + 1e-12
        self.hessian = gram + held * torch.eye(len(gram), dtype=gram.dtype)
        self.cross = cross + held * self.weight
        self.energy += held * float(self.weight.square().sum())

    def definite(self, kept: Tensor) -> bool:
        """Whether these columns have a solution: sums in float32 of few samples may have none without damping."""
        return not int(torch.linalg.cholesky_ex(self.hessian[kept][:, kept]).info)

    def solve(self, kept: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights of these columns, [out, kept], and the bias, [out], that do best without the others; float64."""
        root = torch.linalg.cholesky(self.hessian[kept][:, kept])
        weight = torch.cholesky_solve(self.cross[:, kept].T, root).T
        return weight, self.centre - weight @ self.mean[kept] if self.biased else None

    def error(self, weight: Tensor, kept: Tensor) -> float:
        """What these weights of these columns leave of the sum of squares, their best bias given."""
        explained = 2 * float((weight * self.cross[:, kept]).sum())
        return self.energy - explained + float(((weight @ self.hessian[kept][:, kept]) * weight).sum())


def refit(weight: Tensor, biased: bool, halves: tuple[Sums, Sums], kept: Tensor) -> tuple[Tensor, Tensor | None]:
    """The weights of these columns and the bias, as `Normal.solve`; damped as does best for the half of the samples
    that it is not found from."""
    plain = [Normal(weight, biased, half, 0.0) for half in halves]
    errors = {
        damping: sum(
            test.error(Normal(weight, biased, half, damping).solve(kept)[0], kept)
            for half, test in zip(halves, reversed(plain), strict=True)
        )
        for damping in DAMPINGS
        if damping == max(DAMPINGS) or all(Normal(weight, biased, half, damping).definite(kept) for half in halves)
    }
    best = min(errors, key=lambda damping: errors[damping])
    return Normal(weight, biased, halves[0] + halves[1], best).solve(kept)


@dataclass(frozen=True)
class Elimination:
    """order: the units, those to be cut first in front. errors: what is left of the sum of squares when the first n are
    cut and the others make up for it, n from 0 to one less than the units."""

    order: tuple[int, ...]
    errors: tuple[float, ...]

    def kept(self, count: int) -> list[int]:
        """The units that stay when so many do, in their order."""
        return sorted(self.order[len(self.order) - count :])

    def error(self, count: int) -> float:
        """When so many stay."""
        return self.errors[len(self.order) - count]


def eliminate(normal: Normal, units: int, *, protected: int = 1) -> Elimination:
    """Cut units one after another, each time those that the others can stand in for best, down to `protected`.

    The optimal brain surgeon for groups of weights (Hassibi and Stork 1993; Kurtic et al., ZipLM, 2023): to cut unit b
    costs tr(W_b ([H^-1]_bb)^-1 W_bT), and changes the other weights and H^-1 in closed form.
    """
    width = len(normal.hessian) // units
    inverse = torch.linalg.inv(normal.hessian)
    weight = normal.cross @ inverse
    error = max(normal.energy - float((weight * normal.cross).sum()), 0.0)
    alive = torch.arange(units)
    order: list[int] = []
    errors = [error]
    stride = max(1, units // ROUNDS)
    while len(alive) > protected:
        costs = unit_costs(weight, inverse, width)
        chosen, left = costs.argsort(stable=True).split_with_sizes(
            (gone := min(stride, len(alive) - protected), len(alive) - gone)
        )
        left = left.sort().values
        out, stay = rows(chosen, width), rows(left, width)
        into = inverse[out]
        block = into[:, out]
        cut = weight[:, out]
        # The units of one round are cut together; each is told its share of what that costs.
        total = float((cut * torch.linalg.solve(block, cut.T).T).sum())
        for share in (costs[chosen] / costs[chosen].sum().clamp(min=TINY)).tolist():
            error += max(share * total, 0.0)
            errors.append(error)
        solved = torch.linalg.solve(block, into[:, stay])
        weight = weight[:, stay] - cut @ solved
        inverse = inverse[stay][:, stay].addmm_(into[:, stay].T, solved, alpha=-1)
        order += alive[chosen].tolist()
        alive = alive[left]
    return Elimination((*order, *alive.tolist()), tuple(errors))


def unit_costs(weight: Tensor, inverse: Tensor, width: int) -> Tensor:
    """What the sum of squares grows by when a unit is cut and the others make up for it, [units]."""
    if width == 1:
        return weight.square().sum(dim=0) / inverse.diagonal().clamp(min=TINY)
    units = len(inverse) // width
    blocks = inverse.view(units, width, units, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    columns = weight.view(len(weight), units, width).permute(1, 2, 0)
    costs: Tensor = (columns * torch.linalg.solve(blocks, columns)).sum(dim=(1, 2))
    return costs


def rows(units: Tensor, width: int) -> Tensor:
    """The places of units that lie `width` apart, in their order."""
    return (units[:, None] * width + torch.arange(width)).flatten()


def by_score(scores: Tensor, units: int) -> tuple[int, ...]:
    """The units, those of the lowest score first. scores: [out, in], of the consumer's weights."""
    return tuple(scores.sum(dim=0).view(units, -1).sum(dim=1).argsort(stable=True).tolist())


def bias_of(layer: nn.Module) -> Tensor | None:
    """A layer's bias, if it has one."""
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    return None if bias is None else bias.detach()


def put(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Give a layer other weights, [out, in], in place; without a bias, its own stays."""
    matrix(layer).detach().copy_(weight)
    own = bias_of(layer)
    if own is not None and bias is not None:
        own.copy_(bias)
