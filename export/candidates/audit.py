"""Kernel audit: checks layer by layer that the engine runs the requested precision."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from export.candidates.candidate import EngineCandidate
from export.candidates.multiply_adds import plan_products
from laconic.errors import UnsupportedPrecision
from laconic.quantization.graph import Graph
from laconic.quantization.plan import INTEGER, Plan
from laconic.runtimes.kernel_audit import audit_products
from laconic.runtimes.product import Product
from laconic.runtimes.runtime import Kernel, find_kernel
from laconic.tasks.task import Task


@dataclass(frozen=True)
class KernelAudit:
    """The audit of all candidates of one graph.

    products: the graph's, with the multiply-adds of a typical sample. asked: the plan that the recipe would like best.
    """

    graph: Graph
    task: Task
    products: tuple[Product, ...]
    asked: Plan

    def check(self, candidate: EngineCandidate, samples: Sequence[Any]) -> EngineCandidate:
        """Return the candidate with its kernels, those that run for `samples`; without, where its engine is not on this
        machine. Raises UnsupportedPrecision where INT8 was planned and something else runs."""
        option = candidate.option
        kernels: Sequence[Kernel] = ()
        if not option.reference:
            with option.open(candidate.model, 1) as session:
                session.run(self.task.encode(samples))
                kernels = session.kernels()
        products = plan_products(
            self.products, self.asked, candidate.plan, candidate.model, option.compute, explicit=option.on_gpu
        )
        products = audit_products(products, kernels, option.runtime)
        shares = audit(self.graph, candidate.plan, kernels, option.runtime, products)
        return replace(candidate, arithmetic=shares, products=products)


def audit(
    graph: Graph, plan: Plan, kernels: Sequence[Kernel], engine: str, products: Sequence[Product] = ()
) -> dict[str, float]:
    """Check the kernels against the plan; returns the share of the weights that each arithmetic is used for.

    kernels: of a session that has run. products: with the reasons that are known. Raises UnsupportedPrecision, naming
    the layers, where INT8 was planned and something else runs. For an engine that does not report its kernels nothing
    is checked, and the result is empty.
    """
    if not kernels:
        return {}
    layers = [layer for layer in graph.layers if layer.kind != "Gather"]
    run = {layer.node: kernel for layer in layers for kernel in [find_kernel(layer.node, kernels)] if kernel}
    fallen = [
        layer
        for layer in layers
        if plan.precision[layer.node] in INTEGER and layer.node in run and run[layer.node].precision != "int8"
    ]
    if fallen:
        reasons = {each.node: each.reason for each in products}
        named = [(layer.module, run[layer.node], reasons.get(layer.node, "")) for layer in fallen[:3]]
        raise UnsupportedPrecision(
            f"{len(fallen)} of {len(layers)} layers were to run in INT8, and {engine} does not do so: "
            + "; ".join(f"{name} (runs as {found.precision}, {found.kind})" for name, found, _ in named)
            + "".join(f". {reason}" for reason in dict.fromkeys(reason for *_, reason in named if reason))
            + ". Try another engine (runtimes), or keep them in float (quantize.static: keep)",
            [layer.node for layer in fallen] if len(fallen) < len(run) else (),
        )
    total = sum(layer.parameters for layer in layers)
    shares: dict[str, float] = {}
    for layer in layers:
        precision = run[layer.node].precision if layer.node in run else "not told"
        shares[precision] = shares.get(precision, 0.0) + layer.parameters / total
    return dict(sorted(shares.items()))
