"""Trials of plans that quantize one layer each: only the graph from that layer on is run again."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest

import onnx
from onnx import NodeProto, ValueInfoProto, helper

from export.candidates.engine_option import EngineOption
from export.candidates.plan_evaluator import PlanEvaluator
from export.passes.rewrite import read_tensors
from export.placements.split_decoder import has_decoder, is_text_decoder
from laconic.arrays import Array, Arrays
from laconic.data.batches import batches
from laconic.data.dataset import Dataset
from laconic.hardware import cores
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan
from laconic.runtimes.predict import ROWS, gather_rows
from laconic.runtimes.runtime import Session
from laconic.tasks.decoder_tensors import PAST

PART, WHOLE, WEIGHTS = "part.onnx", "float.onnx", "float.data"
"""The files of the part of a graph that is run, and of the graph and its weights, which all parts share."""
SECTION = 8
"""Layers of a section of the graph, which is loaded once. To write and load all that follows each layer took half of
the time of ViT-B's trials."""


@dataclass(frozen=True)
class Activations:
    """What the nodes before a place in the graph computed, as far as nodes after it read it, or it is an output.

    place: of the first node that has not run. batches: the tensors of each batch, by name.
    """

    place: int
    batches: Sequence[Arrays]


@dataclass(frozen=True)
class GraphPart:
    """A part of the float graph, with the names of the tensors that it reads."""

    graph: Graph
    inputs: frozenset[str]

    def run(self, session: Session, batch: Arrays) -> Arrays:
        """Run a session of this part on a batch; returns the batch with what it computes."""
        return batch | session.run({name: array for name, array in batch.items() if name in self.inputs})


@dataclass
class LayerTrials:
    """Measures the divergence of plans with one engine option on one dataset.

    A plan that quantizes one layer differs from the float graph from that layer on. The float graph is therefore run
    once, from one layer to the next, and of each plan only what follows its layer: half of the work, where layers are
    asked for in the order of the graph. The sections after all that its quantization changes are in float for every
    layer, and therefore kept open. Plans that quantize several layers and encoder-decoders are run whole, and so is
    everything for a GPU, whose engines would have to be built for each part.
    """

    evaluator: PlanEvaluator
    option: EngineOption
    dataset: Dataset
    _model: onnx.ModelProto | None = field(default=None, init=False)
    _indices: list[Array] = field(default_factory=list, init=False)
    _known: Activations = field(default=Activations(0, ()), init=False)
    _sections: dict[int, tuple[GraphPart, Session]] = field(default_factory=dict, init=False)

    def __call__(self, plan: Plan) -> Array:
        """Measure a plan's divergence, per sample: [samples]. Results are cached."""
        layer = self._find_lone(plan)
        run = None if layer is None else partial(self._run_from, layer, plan)
        return self.evaluator.plan_divergence(plan, self.option, self.dataset, run)

    def _find_lone(self, plan: Plan) -> Layer | None:
        """Find the one layer that a plan quantizes, where the graph can be run from it on."""
        graph = self.evaluator.graph
        quantized = [layer for layer in graph.layers if plan.precision[layer.node] != "float32"]
        is_split = has_decoder(graph) and not is_text_decoder(graph)
        if len(quantized) != 1 or self.option.on_gpu or is_split:
            return None
        return quantized[0]

    def _run_from(self, layer: Layer, plan: Plan) -> Arrays:
        """Compute the outputs of a plan that quantizes one layer: [samples, ...] by name."""
        known = self._advance(layer)
        sections = self._find_sections(layer)
        part = self._write_part(known, stop=next(iter(sections), None))
        inside = {each.node for each in part.graph.layers}
        plan = replace(plan, precision={node: each for node, each in plan.precision.items() if node in inside})
        path = self.evaluator.folder / "trial.onnx"
        self.option.build(part.graph, plan, path)
        outputs = [value.name for value in self._load().graph.output]
        with self.option.open_for_trial(path, cores()) as session:
            runs = [part.run(session, batch) for batch in known.batches]
        for place, stop in zip_longest(sections, sections[1:]):
            section, session = self._open_section(Activations(place, runs), stop=stop)
            runs = [section.run(session, batch) for batch in runs]
        results = ({name: run[name] for name in outputs} for run in runs)
        return gather_rows(zip(self._indices, results, strict=True), len(self.dataset))

    def _find_sections(self, layer: Layer) -> list[int]:
        """Find the places where sections begin, after the last node that reads the layer's output, or what another
        operator makes of it, since an output is quantized after the operators that are fused into the layer."""
        nodes = self._load().graph.node
        names = {each.node for each in self.evaluator.graph.layers}
        made, end = {layer.output}, 0
        for _ in range(2):
            readers = [at for at, node in enumerate(nodes) if made & set(node.input)]
            made, end = {name for at in readers for name in nodes[at].output}, max([end, *readers])
        places = [at for at, node in enumerate(nodes) if node.name in names]
        return [at for at in places[::SECTION] if at > max(end, self._known.place)]

    def _open_section(self, reached: Activations, *, stop: int | None) -> tuple[GraphPart, Session]:
        """Load the float graph from where `reached` ends to before the place `stop`, or to its end, unless it is. Those
        before it are closed once no layer needs them."""
        for place in [each for each in self._sections if each <= self._known.place]:
            self._sections.pop(place)[1].close()
        if reached.place not in self._sections:
            part = self._write_part(reached, stop=stop)
            self._sections[reached.place] = part, self.option.open_for_trial(part.graph.path, cores())
        return self._sections[reached.place]

    def _advance(self, layer: Layer) -> Activations:
        """Run the float graph up to a layer: from the layer that was asked for before, or from the start where that
        comes later."""
        place = next(at for at, node in enumerate(self._load().graph.node) if node.name == layer.node)
        if not self._known.batches or place < self._known.place:
            encoded = list(batches(self.dataset, self.evaluator.task, ROWS))
            self._indices = [indices for indices, _ in encoded]
            self._known = Activations(0, [batch for _, batch in encoded])
        if place > self._known.place:
            part = self._write_part(self._known, stop=place)
            kept = self._find_boundary(place)
            with self.option.open_for_trial(part.graph.path, cores()) as session:
                runs = [part.run(session, batch) for batch in self._known.batches]
            self._known = Activations(place, [{name: batch[name] for name in kept if name in batch} for batch in runs])
        return self._known

    def _write_part(self, known: Activations, *, stop: int | None) -> GraphPart:
        """Write the float graph from where `known` ends to before the place `stop`, or to its end."""
        model = self._load()
        nodes = model.graph.node[known.place : stop]
        read, made = find_read(nodes), [name for node in nodes for name in node.output if name]
        inputs_read = {name for name in read if name in known.batches[0]}
        results = {value.name for value in model.graph.output} if stop is None else set(self._find_boundary(stop))
        part = helper.make_model(
            helper.make_graph(
                nodes,
                model.graph.name,
                [describe(name, [batch[name] for batch in known.batches]) for name in sorted(inputs_read)],
                [ValueInfoProto(name=name) for name in made if name in results],
                [tensor for tensor in model.graph.initializer if tensor.name in read],
            ),
            opset_imports=model.opset_import,
            ir_version=model.ir_version,
            functions=model.functions,
        )
        path = self.evaluator.folder / PART
        onnx.save(part, path)
        names = {node.name for node in nodes}
        whole = self.evaluator.graph
        # A part of a language model is no decoder with a cache: it is run as it is, with an empty one.
        inputs = tuple(spec for spec in whole.inputs if spec.name in inputs_read - {PAST})
        layers = tuple(layer for layer in whole.layers if layer.node in names)
        graph = Graph(path, inputs, whole.outputs, layers, f"{whole.key}/{known.place}")
        return GraphPart(graph, frozenset(inputs_read))

    def _find_boundary(self, place: int) -> list[str]:
        """Find the tensors that nodes from a place on read, and the outputs of the graph."""
        graph = self._load().graph
        return [*find_read(graph.node[place:]), *(value.name for value in graph.output)]

    def _load(self) -> onnx.ModelProto:
        """Load the float graph without its weights, which are written once."""
        if self._model is None:
            path = self.evaluator.folder / WHOLE
            path.with_name(WEIGHTS).unlink(missing_ok=True)
            onnx.save(onnx.load(self.evaluator.graph.path), path, save_as_external_data=True, location=WEIGHTS)
            self._model = onnx.load(path, load_external_data=False)
        return self._model


def find_read(nodes: Sequence[NodeProto]) -> dict[str, None]:
    """Find the names of the tensors that nodes read, in order."""
    return dict.fromkeys(name for node in nodes for name in read_tensors(node))


def describe(name: str, arrays: Sequence[Array]) -> ValueInfoProto:
    """Describe the input that holds any of these arrays: with the sizes that they share."""
    shape = [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*(each.shape for each in arrays), strict=True)]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(arrays[0].dtype), shape)
