"""The layers that an engine runs in another precision than the graph that was placed for it."""

from collections.abc import Mapping, Sequence

from laconic.artifacts.parity_ledger import Divergence
from laconic.quantization.plan import INTEGER
from laconic.runtimes.runtime import Kernel, find_kernel

SHOWN = 3
"""Layers that are named."""


def find_engine_divergence(precision: Mapping[str, str], kernels: Sequence[Kernel]) -> Divergence:
    """Name the layers whose kernel computes in another precision than the placed graph, run node by node.

    An engine fuses and reorders, so its intermediate tensors have no counterpart to be compared with. precision: of the
    placed graph's layers, by node. kernels: of a session that has run.
    """
    if not kernels:
        return Divergence(says="the outputs differ; the engine does not report its kernels, so no layer can be named")
    differing: dict[str, list[str]] = {}
    layers = [node for node in precision if not node.rpartition("/")[2].startswith("Gather")]
    for node in layers:
        planned = "int8" if precision[node] in INTEGER else "float32"
        kernel = find_kernel(node, kernels)
        if kernel is not None and kernel.precision != planned:
            differing.setdefault(f"{kernel.precision} in place of {planned}", []).append(
                node.rpartition("/")[0] or node
            )
    if not differing:
        return Divergence(says="the outputs differ, though each layer runs in the precision of the placed graph")
    parts = [
        f"{len(found)} of {len(layers)} layers run in {what} ({', '.join(found[:SHOWN])}"
        f"{', ...' if len(found) > SHOWN else ''})"
        for what, found in differing.items()
    ]
    return Divergence(says=f"the outputs differ; {'; '.join(parts)}")
