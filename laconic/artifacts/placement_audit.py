"""The kernel audit of an artifact's placement on this machine, and how it is reported."""

from collections.abc import Sequence
from typing import Any

from laconic.artifacts.manifest import MODEL, Manifest
from laconic.artifacts.placement import Placement
from laconic.runtimes.kernel_audit import audit_products
from laconic.runtimes.product import Product, find_arithmetic, group_fallbacks, share_multiply_adds
from laconic.runtimes.runtime import Kernel


def audit_placement(
    products: Sequence[Product], manifest: Manifest, placement: Placement, engine: str, kernels: Sequence[Kernel]
) -> tuple[Product, ...]:
    """Audit the products of an artifact in one of its placements.

    products: as planned for the preferred placement. For another one the plan of attention is not known: what runs
    counts as planned. kernels: of the engine that has loaded the placement.
    """
    audited = audit_products(products, kernels, engine)
    if placement.model == MODEL:
        return audited
    planned = {
        node: find_arithmetic(precision, placement.compute) for node, precision in placement.precision.items()
    } | {each.node: each.runs or each.planned for each in audited if each.kind == "attention"}
    asked = {each.node: each.asked for each in products}
    asked |= {node: placement.compute for node, each in asked.items() if each == manifest.compute}
    plans = [
        each.model_copy(
            update={
                "asked": asked[each.node],
                "planned": planned.get(each.node, find_arithmetic(None, placement.compute)),
            }
        )
        for each in products
    ]
    return audit_products(plans, kernels, engine)


def report_audit(products: Sequence[Product], machine: str, missing: str) -> dict[str, Any] | None:
    """Report an audit, JSON-ready: the processor, the multiply-adds of one sample, their shares by arithmetic, those
    that the placed graph asks for, the products that fell back, in groups, and all of them.

    missing: says why no kernel is known; under "state" where none is. None for an artifact of an earlier version, which
    has no products.
    """
    if not products:
        return None
    shares = share_multiply_adds(products)
    return {
        "machine": machine,
        "state": "audited" if shares else missing,
        "multiply_adds": sum(each.multiply_adds for each in products),
        "shares": shares,
        "planned": share_multiply_adds(products, planned=True),
        "fallbacks": [group.model_dump() for group in group_fallbacks(products)],
        "products": [each.model_dump(exclude={"names"}) for each in products],
    }
