"""Names of nodes in graphs of other frameworks, which may have none, or one for several."""

from collections import Counter

import onnx_ir as ir


def name_nodes(graph: ir.Graph) -> None:
    """Give each node a name of its own, which normalization keeps. The optimizer would name it "node"."""
    names: Counter[str] = Counter()
    for node in graph.all_nodes():
        stem = node.name or node.op_type
        names[stem] += 1
        node.name = stem if names[stem] == 1 else f"{stem}_{names[stem] - 1}"
