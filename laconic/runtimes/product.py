"""The products of a model, each with its multiply-adds and the arithmetic that they run in."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

NOT_TOLD = "not told"
"""The arithmetic of a product whose kernel the engine does not report."""
NOT_AUDITED = "planned, not audited: the engine was not on the machine"
NOT_REPORTED = "not audited: the engine does not report its kernels"
NOT_COUNTED = "not counted: a shape in the graph depends on the values of the inputs"

ARITHMETIC = {"int8": "int8", "int8-dynamic": "int8", "float8": "float8"}
"""The arithmetic of each precision that quantizes activations; the others multiply in float, unless that is
int8-dynamic."""
WEIGHT_ONLY = frozenset({"int4-weight", "int8-weight"})
"""Precisions whose weights are stored in fewer bits, and multiplied in the arithmetic of the layers that are not
quantized."""


def find_arithmetic(precision: str | None, compute: str) -> str:
    """Return the arithmetic that a product with weights is planned in; without a precision, one without weights.
    compute: the arithmetic of the layers that are not quantized."""
    if compute == "int8-dynamic":
        compute = "int8" if precision in WEIGHT_ONLY else "float32"
    return ARITHMETIC.get(precision or "", compute)


ProductKind = Literal["linear", "convolution", "attention", "recurrent"]
"""A matrix product with weights; a convolution; a product of two activations, as in attention; a recurrent layer."""

KINDS: dict[ProductKind, str] = {
    "linear": "linear layers",
    "convolution": "convolutions",
    "attention": "products of attention",
    "recurrent": "recurrent layers",
}
"""The kinds as people call several of them."""


class Product(BaseModel):
    """A node of the float graph that multiplies and adds.

    node: its name. names: those that an engine may give to its kernel, the node's own first. multiply_adds: of one
    typical sample, multiplications by zero included. asked: what the recipe asks for: int8, int8-dynamic, float8, or
    the arithmetic of the layers that are not quantized. planned: the arithmetic that the placed graph asks the engine
    for. runs: the arithmetic of the kernel that runs; empty where it is not known. kernel: the engine's own name of it.
    reason: why `runs`, or else `planned`, is not what was asked for; empty where it is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: str
    names: tuple[str, ...] = ()
    kind: ProductKind
    multiply_adds: int
    asked: str = ""
    planned: str = ""
    runs: str = ""
    kernel: str = ""
    reason: str = ""


class FallbackGroup(BaseModel):
    """Products of one kind that fell back for one reason. share: of all multiply-adds, 0 to 1. kernels: the engine's
    own names of those that run; the rest as in Product."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ProductKind
    asked: str
    runs: str
    kernels: tuple[str, ...]
    reason: str
    nodes: tuple[str, ...]
    share: float


def share_multiply_adds(products: Sequence[Product], *, planned: bool = False) -> dict[str, float]:
    """Return the share of the multiply-adds in each arithmetic, the largest first; empty where no kernel is known.

    planned: as the placed graph asks for, and not as the engine reports.
    """
    shares: defaultdict[str, float] = defaultdict(float)
    total = sum(each.multiply_adds for each in products)
    for each in products:
        shares[(each.planned if planned else each.runs) or NOT_TOLD] += each.multiply_adds / max(total, 1)
    if not total or shares.keys() == {NOT_TOLD}:
        return {}
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


def group_fallbacks(products: Sequence[Product]) -> list[FallbackGroup]:
    """Group the products that fell back by what they fell back to and why, the largest share first."""
    total = sum(each.multiply_adds for each in products)
    groups: defaultdict[tuple[ProductKind, str, str, str], list[Product]] = defaultdict(list)
    for each in products:
        if each.reason:
            groups[each.kind, each.asked, each.runs or each.planned, each.reason].append(each)
    fallbacks = [
        FallbackGroup(
            kind=kind,
            asked=asked,
            runs=runs,
            kernels=tuple(sorted({each.kernel for each in group if each.kernel})),
            reason=reason,
            nodes=tuple(each.node for each in group),
            share=sum(each.multiply_adds for each in group) / max(total, 1),
        )
        for (kind, asked, runs, reason), group in groups.items()
    ]
    return sorted(fallbacks, key=lambda group: -group.share)


def describe_shares(shares: Mapping[str, float]) -> str:
    """Format shares: `62.1 % int8, 37.9 % float32`."""
    return ", ".join(f"{100 * share:.1f} % {name}" for name, share in shares.items())
