"""The audit of an engine's kernels: which arithmetic multiplies in each product of a model, and why it is not the one
that was asked for."""

from collections.abc import Sequence

from laconic.runtimes.fallbacks import find_reason
from laconic.runtimes.product import ARITHMETIC, Product
from laconic.runtimes.runtime import Kernel, find_kernel


def audit_products(products: Sequence[Product], kernels: Sequence[Kernel], engine: str) -> tuple[Product, ...]:
    """Find the kernel of each product, and the reason where it is not what was asked for.

    kernels: of a session that has run; none where the engine reports none, or is not on this machine. Then `runs` stays
    empty, and the reasons are those of the plan.
    """
    quantized = any(each.planned in ARITHMETIC.values() for each in products)
    audited = []
    for each in products:
        # Beside attention's products stands the addition of a mask, which may run in another arithmetic.
        fused = each.names if each.kind == "attention" else (*each.names, f"{each.node.rpartition('/')[0]}/Add")
        kernel = find_kernel(each.node, kernels, fused)
        runs = kernel.precision if kernel else ""
        reason = find_reason(engine, each.kind, each.asked, each.planned, runs, quantized=quantized)
        update = {"runs": runs, "kernel": kernel.kind if kernel else "", "reason": reason}
        audited.append(each.model_copy(update=update))
    return tuple(audited)
