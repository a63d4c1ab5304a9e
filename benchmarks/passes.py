"""What each pass over a captured graph gains: the same model exported with one pass left out at a time.

    python benchmarks/passes.py [--rounds N] [--batch N] [--engines NAME,...] [--cache FOLDER]

MiniLM, and models of the shapes of ViT-S and ResNet-18 with random weights, in each engine for CPUs: in its preferred
arithmetic without quantization, and in INT8 where it has it. Within an engine all graphs take turns, in one thread, by
processor time. The ratio is the time without the pass to that with all: above 1 the pass pays. Where leaving a pass out
gives the same nodes, or a graph that the engine does not load, nothing is timed.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx
import transformers
from family_checkpoint import CLASSES, sharpen
from inputs import model_folder
from results import Results, make_parser

import export.capture.capture as capturing
import export.passes.normalize as normalizing
import export.placements.place as placing
from compress.quantize.calibration import observe_activations
from compress.quantize.ranges import minmax
from export.candidates.engine_option import EngineOption
from export.capture import graph_forms
from laconic.errors import RuntimeFailure
from laconic.models.checkpoint import Checkpoint
from laconic.models.source_loading import load_source
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.runtime import make_runtime
from laconic.timing.benchmark import interleave, make_timings

ALL = "all passes"
LENGTH = 128
PASSES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    ALL: nullcontext,
    "attention as two products": lambda: patch.object(graph_forms, "IMPLEMENTATIONS", graph_forms.IMPLEMENTATIONS[1:]),
    "Gemm as MatMul and Add": lambda: patch.object(normalizing, "_split_gemm", ignore),
    "scales folded into weights": lambda: patch.object(normalizing, "fold_scales", ignore),
    "keys transposed in two steps": lambda: patch.object(normalizing, "split_key_transposes", ignore),
    "attention as one operator": lambda: patch.object(placing, "fuse_attention", ignore),
}
"""The passes that change what is computed, each with what leaves it out. The others name, sort and strip. The last one
belongs to the placement for ONNX Runtime, the others to the capture."""
SQUARE = {"size": {"height": 224, "width": 224}}


def main() -> None:
    """Export, measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="how often each graph is run")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--engines", default="openvino,onnxruntime", help="with commas between them")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where inputs and graphs go")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    folder = arguments.cache / "passes"
    folder.mkdir(parents=True, exist_ok=True)
    results.begin("passes", ["model", "engine", "ms", *list(PASSES)[1:]])
    for name, source in write_sources(folder, arguments.cache):
        graphs = export_graphs(load_source(source), folder / name)
        for engine in arguments.engines.split(","):
            for row in measure(name, graphs, engine, arguments.batch, arguments.rounds):
                results.add("passes", row)


def ignore(*given: object) -> None:
    """In place of a pass."""


def write_sources(folder: Path, cache: Path) -> Iterator[tuple[str, Path]]:
    """The names and folders of the models."""
    yield "MiniLM", model_folder(cache)
    labels = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: i for i, name in enumerate(CLASSES)}}
    small = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
    residual = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
    transformers.set_seed(0)
    for name, make, processor in (
        ("ViT-S", lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**small, **labels)), SQUARE),
        (
            "ResNet-18",
            lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig(**residual, **labels)),
            {"size": {"shortest_edge": 224}},
        ),
    ):
        path = folder / f"{name}-source"
        if not path.exists():
            model: Any = make()  # type: ignore[no-untyped-call]
            sharpen(model.eval()).save_pretrained(path)
            kind = "ViTImageProcessorPil" if name == "ViT-S" else "ConvNextImageProcessorPil"
            getattr(transformers, kind)(**processor).save_pretrained(path)
        yield name, path


def export_graphs(checkpoint: Checkpoint, folder: Path) -> dict[str, tuple[Checkpoint, Graph]]:
    """The graph with all passes, and without each. Both compute what the module does, or the export fails."""
    found = {}
    for number, (name, leave_out) in enumerate(PASSES.items()):
        path = folder / str(number)
        path.mkdir(parents=True, exist_ok=True)
        with leave_out():
            found[name] = checkpoint, capturing.capture(checkpoint, path)
    return found


def measure(
    model: str, graphs: dict[str, tuple[Checkpoint, Graph]], engine: str, batch: int, rounds: int
) -> Iterator[list[str]]:
    """A row for each arithmetic of an engine."""
    computes = make_runtime(engine).computes()
    for compute, precision in ((computes[-1], "float32"), ("float32", "int8")):
        option = EngineOption(engine, compute)
        with ExitStack() as stack:
            runs, told, whole = {}, dict[str, str](), Counter[tuple[str, int]]()
            for name, (checkpoint, graph) in graphs.items():
                path = graph.path.parent / f"{engine}-{compute}-{precision}.onnx"
                with PASSES[name]():
                    option.build(graph, make_plan(checkpoint, graph, precision), path)
                whole = whole or count_nodes(path)  # all passes come first
                if name != ALL and count_nodes(path) == whole:
                    told[name] = "the same"
                    continue
                try:
                    session = stack.enter_context(option.open(path, 1))
                except RuntimeFailure:
                    if name == ALL:
                        raise
                    told[name] = "does not load"
                    continue
                runs[name] = partial(session.run, checkpoint.task.typical(batch, LENGTH))
            seconds = interleave(runs, rounds=rounds, clock=time.process_time)
        times = {each.engine: each for each in make_timings(seconds, ALL, batch=batch, length=LENGTH, threads=1)}
        shown = "INT8" if precision == "int8" else {"float32": "FP32", "bfloat16": "BF16"}[compute]
        cells = [told.get(name) or describe(times[name].speedup_quartiles, times[name].speedup)
                 for name in list(PASSES)[1:]]  # fmt: skip
        yield [model, f"{engine}, {shown}", f"{times[ALL].seconds * 1e3:.1f}", *cells]


def describe(quartiles: tuple[float, float], speedup: float) -> str:
    """How much longer the graph without the pass takes, with quartiles."""
    return f"{1 / speedup:.2f} ({1 / quartiles[1]:.2f} to {1 / quartiles[0]:.2f})"


def make_plan(checkpoint: Checkpoint, graph: Graph, precision: str) -> Plan:
    """All layers in one precision, with ranges of a few random batches; embeddings stay as they are."""
    if precision == "float32":
        return Plan({layer.node: "float32" for layer in graph.layers})
    batches = [checkpoint.task.typical(1, LENGTH)]
    seen = observe_activations(graph, batches, OnnxRuntime(), graph.path.parent)
    ranges = {name: minmax(histogram) for name, histogram in seen.histograms.items()}
    return Plan({layer.node: "int8-weight" if layer.kind == "Gather" else "int8" for layer in graph.layers}, ranges)


def count_nodes(path: Path) -> Counter[tuple[str, int]]:
    """The operators of a graph, with their numbers of inputs."""
    return Counter((node.op_type, len(node.input)) for node in onnx.load(path, load_external_data=False).graph.node)


if __name__ == "__main__":
    main()
