"""The first module whose output differs between a torch module and the graph that was captured from it."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from torch import Tensor, nn

from export.capture.parity import PARITY, relative_difference
from export.passes.rewrite import read_tensors
from laconic.arrays import Array, Arrays
from laconic.artifacts.parity_ledger import Divergence
from laconic.errors import CaptureError
from laconic.hardware import cores
from laconic.models.checkpoint import Checkpoint
from laconic.models.hooks import forward_hooks
from laconic.models.torch_session import TorchSession
from laconic.quantization.graph import Graph
from laconic.runtimes.onnxruntime import OnnxRuntime


@dataclass
class ModuleDifference:
    """The largest difference of a module's output in the graph, relative to its largest value; and what is left of it
    with the factor that fits best."""

    whole: float = 0.0
    rescaled: float = 0.0

    def add(self, expected: Array, actual: Array) -> None:
        """Add a sample. Raises CaptureError if the shapes differ."""
        self.whole = max(self.whole, relative_difference({"": expected}, {"": actual}))
        power = float(np.vdot(actual, actual))
        factor = float(np.vdot(actual, expected)) / power if power else 1.0
        self.rescaled = max(self.rescaled, relative_difference({"": expected}, {"": actual * factor}))


def find_captured_divergence(checkpoint: Checkpoint, graph: Graph, samples: Sequence[Arrays]) -> Divergence:
    """Find the first module whose output in the captured graph differs by more than PARITY of its largest value.

    A module is compared by its last node in the graph, where that has its output's shape. Capture folds constant
    factors into weights, so a module may differ on purpose: one that is read by a module that agrees is not counted,
    and one that differs by a factor alone only if no other does. samples: the inputs of each sample, in a batch of one.
    """
    model = onnx.load(graph.path)
    tensors = find_module_outputs(model, checkpoint.module)
    differences = measure_differences(checkpoint, model, tensors, samples)
    upstream = find_upstream(model, {tensors[path]: path for path in differences})
    agreeing = [path for path, difference in differences.items() if difference.whole <= PARITY]
    suspects = [path for path in differences if not any(path == each or path in upstream[each] for each in agreeing)]
    if not suspects:
        last = f"after {agreeing[-1]}, the last of them" if agreeing else "outside of them"
        return Divergence(
            says=f"each of the {len(differences)} modules that could be compared agrees: it differs {last}"
        )
    path = next((path for path in suspects if differences[path].rescaled > PARITY), suspects[0])
    error = differences[path].whole
    return Divergence(
        says=f"{path} is the first module whose output differs: relative error {error:.2g}, allowed {PARITY:g}",
        layer=path,
        tensor=tensors[path],
        error=error,
        allowed=PARITY,
    )


def find_module_outputs(model: onnx.ModelProto, module: nn.Module) -> dict[str, str]:
    """Find the tensor that each module computes, by its path, in the order of the graph: nodes are named after the
    module that they belong to."""
    paths = {path for path, _ in module.named_modules() if path}
    tensors: dict[str, str] = {}
    for node in model.graph.node:
        path = node.name.rpartition("/")[0]
        if path in paths:
            tensors.pop(path, None)  # a later node takes its place in the order, too
            tensors[path] = node.output[0]
    return tensors


def measure_differences(
    checkpoint: Checkpoint, model: onnx.ModelProto, tensors: dict[str, str], samples: Sequence[Arrays]
) -> dict[str, ModuleDifference]:
    """Measure the difference of each module's output, by path; without modules that run more than once in a forward
    pass, or whose output has another shape in the graph."""
    differences = {path: ModuleDifference() for path in tensors}
    seen: dict[str, list[Array]] = {}

    def keep(path: str, _layer: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, Tensor):
            # A copy: a later module may work in place.
            seen.setdefault(path, []).append(first.detach().clone().numpy())

    known = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors.values() if name not in known)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "captured.onnx"
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
        original = TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs, cores())
        with original, OnnxRuntime().open(path, threads=cores(), optimize=False) as captured:
            for inputs in samples:
                seen.clear()
                with forward_hooks(checkpoint.module, tensors, after=keep):
                    original.run(inputs)
                actual = captured.run(inputs)
                for name in list(differences):
                    try:
                        (expected,) = seen.get(name, [])
                        differences[name].add(expected, actual[tensors[name]])
                    except (ValueError, CaptureError):
                        del differences[name]
    return differences


def find_upstream(model: onnx.ModelProto, modules: dict[str, str]) -> dict[str, frozenset[str]]:
    """Find the modules whose outputs each module depends on. modules: path by tensor."""
    origins: dict[str, frozenset[str]] = {}
    upstream: dict[str, frozenset[str]] = {}
    for node in model.graph.node:
        read = frozenset[str]().union(*(origins.get(tensor, frozenset()) for tensor in read_tensors(node)))
        for tensor in node.output:
            path = modules.get(tensor)
            if path is not None:
                upstream[path] = read
            origins[tensor] = read if path is None else read | {path}
    return upstream
