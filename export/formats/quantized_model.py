"""The model that an artifact holds, as a module of transformers: quantized weights as they are, all others in float."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import onnx
import torch
from onnx import NodeProto, numpy_helper
from torch import nn

from export.passes.grouped_weights import find_weight_names, read_grouped_weight
from laconic.arrays import Array
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.golden import find_golden_floor
from laconic.artifacts.record import Record
from laconic.errors import FormatRefused
from laconic.models.checkpoint import prepare, rebuild
from laconic.models.language_model import LanguageModel
from laconic.models.torch_session import TorchSession
from laconic.models.vision_language_model import VisionLanguageModel
from laconic.quantization.graph import Layer
from laconic.quantization.plan import BITS, INTEGER, Precision, QuantizedWeight
from laconic.quantization.qparams import expand_scales
from laconic.tasks.text_generation import TextGeneration
from laconic.weight_formats.weight_format import LinearWeight

PREFIX = "model."
"""What names in the graph have before those of transformers."""
INTEGER_FLOOR = 0.6
"""The least agreement with golden outputs of an artifact with products or a cache in INT8, which the module has in
float: 0.89 for a small Llama with random weights, and at most 0.20 with one of its square weights transposed."""
Kind = Literal["MatMul", "Gather"]
KINDS: tuple[Kind, ...] = ("MatMul", "Gather")
"""The operators of layers whose weights are quantized in a language model."""


@dataclass(frozen=True)
class QuantizedModule:
    """module: with the weights of a graph, restored to float. layers: the quantized weights, by the path of their
    module in `model`; those of embeddings transposed, so that the rows are the outputs."""

    module: LanguageModel
    layers: Mapping[str, LinearWeight]

    @property
    def model(self) -> Any:
        """The model of transformers."""
        return self.module.model

    @property
    def has_tied_head(self) -> bool:
        """Whether the head has the weight of the embeddings."""
        return self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight


@dataclass(frozen=True)
class QuantizedModel(QuantizedModule):
    """The module of an artifact."""

    artifact: Artifact

    @property
    def task(self) -> TextGeneration:
        """The task, with the tokenizer, the chat template and the settings of generation."""
        return cast(TextGeneration, self.artifact.task())


def read_quantized_model(artifact: Artifact) -> QuantizedModel:
    """Read the model of an artifact, and prove by the golden outputs that the module computes what the artifact does.

    Raises FormatRefused for an artifact of another kind, and one whose graph is not that of its module.
    """
    manifest = artifact.manifest
    module = build_module(manifest.source, manifest.history)
    if module is None:
        raise FormatRefused(
            f"{artifact.path} is for {manifest.task}, and the formats of other programs are for language models of "
            f"transformers that write ({TextGeneration.name})"
        )
    weights = GraphWeights.read(artifact.model, manifest.placements[0].precision)
    read = QuantizedModel(module, read_layers(module, weights), artifact)
    check_golden(read)
    return read


def build_module(source: Mapping[str, Any], history: tuple[Record, ...]) -> LanguageModel | None:
    """Build the module of a language model of transformers, without its weights; None for any other model, and for
    one that reads images. source, history: as a manifest has them."""
    module = prepare(rebuild(source, history)) if source.get("kind") == "huggingface" else None
    return module if isinstance(module, LanguageModel) and not isinstance(module, VisionLanguageModel) else None


def read_layers(module: LanguageModel, weights: "GraphWeights") -> dict[str, LinearWeight]:
    """Read the weights of a graph into a module; return those that are quantized, by the path of their module. Raises
    FormatRefused for a graph that is not that of the module."""
    layers: dict[str, LinearWeight] = {}
    for path, layer in module.model.named_modules():
        for name, parameter in layer.named_parameters(path, recurse=False):
            is_linear = isinstance(layer, nn.Linear) and name == f"{path}.weight"
            shape = tuple(reversed(parameter.shape)) if is_linear else tuple(parameter.shape)
            quantized = weights.find_quantized(path, shape) if name == f"{path}.weight" else None
            if quantized is not None:
                layers[path] = quantized
            stored = weights.find_float(path, name, shape) if quantized is None else restore(quantized.weight)
            is_transposed = is_linear or (quantized is not None and isinstance(layer, nn.Embedding))
            parameter.data.copy_(torch.from_numpy(np.array(stored.T if is_transposed else stored, np.float32)))
    return layers


def restore(weight: QuantizedWeight) -> Array:
    """Compute the float weight that a quantized one stands for, [in, out] float32."""
    rows = len(weight.integers)
    shifts = 0 if weight.zeros is None else expand_scales(weight.zeros, rows, weight.group_size)
    return np.asarray((weight.integers - shifts) * expand_scales(weight.scales, rows, weight.group_size), np.float32)


def check_golden(read: QuantizedModel) -> None:
    """Raise FormatRefused unless the module gives the golden outputs of its artifact."""
    artifact, placement = read.artifact, read.artifact.manifest.placements[0]
    session = TorchSession(read.module, artifact.manifest.inputs, artifact.manifest.outputs)
    name, worst = min(artifact.measure_golden_agreement(session, placement).items(), key=lambda pair: pair[1])
    is_float = not (placement.int8_kv_cache or any(layer.has_integer_inputs for layer in read.layers.values()))
    if not worst >= (floor := find_golden_floor(placement.verdict) if is_float else INTEGER_FLOOR):
        raise FormatRefused(
            f"{artifact.path} computes something else than transformers with its weights: agreement of {name!r} with "
            f"its golden outputs is {worst:.4f}, expected at least {floor:g}"
        )


@dataclass(frozen=True)
class GraphWeights:
    """The weights in the graph of an artifact. precision: by node, as planned."""

    nodes: Mapping[str, NodeProto]
    tensors: Mapping[str, onnx.TensorProto]
    precision: Mapping[str, str]

    @classmethod
    def read(cls, model: Path, precision: Mapping[str, str]) -> "GraphWeights":
        """Read a graph. Raises FormatRefused where inputs of layers are scaled in it."""
        graph = onnx.load(model).graph
        nodes = {node.name: node for node in graph.node}
        if scaled := next((name for name in nodes if "/smooth" in name), None):
            raise FormatRefused(
                f"{model.parent} scales the inputs of layers (AWQ or SmoothQuant: {scaled}), and "
                f"other formats have no place for the factors. Compress with quantize.weights or quantize.gptq"
            )
        tensors = {tensor.name: tensor for tensor in graph.initializer}
        return cls(nodes, tensors, precision)

    def find_quantized(self, path: str, shape: tuple[int, ...]) -> LinearWeight | None:
        """Find the quantized weight of a module; None where it is stored in float. shape: [in, out], or [rows, width]
        of an embedding."""
        for kind in KINDS:
            node = f"{PREFIX}{path}/{kind}"
            precision = cast(Precision, self.precision.get(node, "float32"))
            if precision in ("int4-weight", "int8-weight", *INTEGER):
                is_integer = precision in INTEGER and kind == "MatMul"
                return LinearWeight(self._read_weight(node, kind, shape), BITS[precision], is_integer)
        return None

    def _read_weight(self, node: str, kind: Kind, shape: tuple[int, ...]) -> QuantizedWeight:
        grouped = read_grouped_weight(Layer(node, node, kind, "", "", "", shape, axis=1), self.nodes, self.tensors)
        if grouped is not None:
            return replace(grouped, integers=grouped.integers.T) if kind == "Gather" else grouped
        names = find_weight_names(self.nodes, node)
        if kind == "Gather":
            names = self.nodes[node].input[0], self.nodes[f"{node}/scale"].input[0]
        elif (product := self.nodes.get(f"{node}/integer")) is not None:
            names = product.input[1], self.nodes[f"{node}/scale"].input[1]
        integers, scales = (self._read_array(name) for name in names)
        return QuantizedWeight(integers.T if kind == "Gather" else integers, scales.reshape(1, -1).astype(np.float32))

    def find_float(self, path: str, name: str, shape: tuple[int, ...]) -> Array:
        """Find a parameter that is stored in float. Raises FormatRefused where the graph has none of that name.

        Parameters with equal values (norms that were never trained) are one tensor of the graph, under the first one's
        name: such a parameter is the only tensor of its shape that the nodes of its module read.
        """
        for slot, kind in ((1, "MatMul"), (0, "Gather")):
            node = self.nodes.get(f"{PREFIX}{path}/{kind}")
            if node is not None and name == f"{path}.weight":
                widened = self.nodes.get(f"{node.name}/weight/widen")
                return self._read_array(node.input[slot] if widened is None else widened.input[0])
        if (stored := f"{PREFIX}{name}") not in self.tensors:
            read = {key for node in self.nodes.values() if is_part(node, path) for key in node.input}
            shared = [key for key in sorted(read & self.tensors.keys()) if tuple(self.tensors[key].dims) == shape]
            stored = shared[0] if len(shared) == 1 else stored
        return self._read_array(stored)

    def _read_array(self, name: str) -> Array:
        if name not in self.tensors:
            raise FormatRefused(f"the artifact's graph has no weight {name!r}: it does not compute as its module does")
        return numpy_helper.to_array(self.tensors[name])


def is_part(node: NodeProto, path: str) -> bool:
    """Return whether a node is one of a module itself, not of a module inside it."""
    return node.name.rpartition("/")[0] == f"{PREFIX}{path}"
