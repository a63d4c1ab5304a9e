"""The opset of a graph: raised to the first one that has a type."""

from onnx import ModelProto, helper

from laconic.errors import UnsupportedPrecision

REDEFINED = {"GroupNormalization": 21}
"""Operators that mean something else from an opset on. Others of captured graphs only gained types up to 22."""


def raise_opset(model: ModelProto, version: int, what: str) -> None:
    """Raise the opset of a model to at least `version`. what: what needs it, for the message.

    Raises UnsupportedPrecision where that would change what an operator of the graph means.
    """
    before = require_opset(model, "", version)
    for node in model.graph.node:
        if before < REDEFINED.get(node.op_type, 0) <= version:
            raise UnsupportedPrecision(
                f"{what} needs ONNX opset {version}, in which {node.op_type}, which this graph holds, means something "
                f"else than in {before}. Try 8 bits or FP16, or another engine (runtimes)"
            )


def require_opset(model: ModelProto, domain: str, version: int) -> int:
    """Raise the opset of a domain to at least this version; returns the version before, 0 for none."""
    for opset in model.opset_import:
        if opset.domain == domain:
            before, opset.version = opset.version, max(opset.version, version)
            return int(before)
    model.opset_import.append(helper.make_opsetid(domain, version))
    return 0
