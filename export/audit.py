"""Kernel audit: checks layer by layer that the engine runs the requested precision."""

from collections.abc import Sequence

from laconic.errors import UnsupportedPrecision
from laconic.quantization.graph import Graph
from laconic.quantization.plan import INTEGER, Plan
from laconic.runtimes.runtime import Kernel, find_kernel


def audit(graph: Graph, plan: Plan, kernels: Sequence[Kernel], engine: str) -> dict[str, float]:
    """Check the kernels against the plan; returns the share of the weights that each arithmetic is used for.

    kernels: of a session that has run. Raises UnsupportedPrecision, naming the layers, where INT8 was planned and
    something else runs. For an engine that does not report its kernels nothing is checked, and the result is empty.
    """
    if not kernels:
        return {}
    layers = [layer for layer in graph.layers if layer.kind != "Gather"]
    run = {layer.node: kernel for layer in layers for kernel in [find_kernel(layer.node, kernels)] if kernel}
    fallen = [
        f"{layer.module} (runs as {run[layer.node].precision}, {run[layer.node].kind})"
        for layer in layers
        if plan.precision[layer.node] in INTEGER and layer.node in run and run[layer.node].precision != "int8"
    ]
    if fallen:
        raise UnsupportedPrecision(
            f"{len(fallen)} of {len(layers)} layers were to run in INT8, and {engine} does not do so: "
            f"{'; '.join(fallen[:3])}. Try another engine (runtimes), or keep them in float (quantize.static: keep)"
        )
    total = sum(layer.parameters for layer in layers)
    shares: dict[str, float] = {}
    for layer in layers:
        precision = run[layer.node].precision if layer.node in run else "not told"
        shares[precision] = shares.get(precision, 0.0) + layer.parameters / total
    return dict(sorted(shares.items()))
