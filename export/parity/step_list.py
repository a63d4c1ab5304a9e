"""The steps of an artifact's model, from the original to the HTTP response."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

from export.capture.capture import export_program
from export.capture.graph_file import write_graph
from export.parity.captured_divergence import find_captured_divergence
from export.parity.model_step import EXACTNESS, IDENTICAL, ModelStep, Serving
from export.parity.placed_divergence import find_placed_divergence
from export.parity.stage_results import find_compressed, find_teacher, list_module_records
from export.sources import capture_graph
from export.validation.figures import describe_tolerance
from export.validation.validate import engine_tolerance
from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact, Choice
from laconic.artifacts.parity_ledger import Divergence
from laconic.artifacts.verdict import Verdict
from laconic.cache import Cache
from laconic.errors import CaptureError
from laconic.models.source import CheckpointSource, Source
from laconic.quantization.graph import Graph
from laconic.quantization.plan import INTEGER
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.runtime import Kernel, Session, find_kernel
from laconic.tasks.task import Task
from laconic.tasks.tolerance import Tolerance

ORIGINAL, COMPRESSED, CAPTURED, PLACED, ENGINE, HTTP = "original", "compressed", "captured", "placed", "engine", "HTTP"
NODE_BY_NODE = "onnxruntime, node by node"
SHOWN = 3
"""Layers that are named."""


class StepList:
    """Makes the steps of one artifact.

    folder: scratch, for a captured graph that is not exact. bounded: whether the loss of compression and quantization
    must keep within the tolerance.
    """

    def __init__(
        self,
        artifact: Artifact,
        original: Source,
        choice: Choice,
        serving: Serving,
        folder: Path,
        *,
        bounded: bool,
        trust: bool,
    ) -> None:
        self.original = original
        self.placement = choice.placement
        self.model = artifact.path / choice.placement.model
        self.engine = choice.engine
        self.serving = serving
        self.cache = Cache()
        self.folder = folder
        self.bounded = bounded
        records = list_module_records(artifact.manifest, trust=trust)
        self.changed = bool(records)
        self.compressed, self.missing = (
            find_compressed(records, self.cache, trust=trust) if records else (None, "no stage changed the module")
        )
        self.tolerance = read_tolerance(choice.placement.verdict, artifact.task())
        self.stages = ", ".join(record.stage for record in records)
        self.teacher = find_teacher(records, trust=trust)

    @property
    def captured_from(self) -> Source | None:
        """The source of the captured graph; None where it is not available."""
        return self.compressed if self.changed else self.original

    @cached_property
    def graph(self) -> Graph | None:
        """The captured graph, from the cache if it is there; None without the module that it is captured from.

        Raises CaptureError if torch cannot export the module. A graph that is not exact is kept: the ledger says where.
        """
        source = self.captured_from
        if source is None:
            return None
        try:
            return capture_graph(source, self.cache)
        except CaptureError:
            if not isinstance(source, CheckpointSource):
                raise
            checkpoint = source.checkpoint
            return write_graph(export_program(checkpoint), self.folder, checkpoint.inputs, checkpoint.outputs)

    def __iter__(self) -> Iterator[ModelStep]:
        """Yield the steps in their order; those that are left out say why."""
        loss = describe_tolerance(self.tolerance) if self.bounded else {}
        drift = {} if self.teacher else loss  # what later stages and the verdict compare with is a teacher's result
        engine = "torch" if isinstance(self.original, CheckpointSource) else "onnxruntime"
        yield ModelStep(ORIGINAL, f"{engine}, float32", partial(self.original.open, 1))
        yield ModelStep(
            COMPRESSED,
            f"after {self.stages}: torch, float32" if self.changed else "",
            partial(self.compressed.open, 1) if self.compressed else None,
            skipped=self.missing,
            before=(ORIGINAL,),
            required=drift,
            required_of_original=drift,
        )
        yield ModelStep(
            CAPTURED,
            f"float graph: {NODE_BY_NODE}",
            self.open_captured if self.captured_from else None,
            skipped=self.missing,
            before=(COMPRESSED,) if self.changed else (ORIGINAL,),
            required={EXACTNESS: self.original.exactness},
            explain=self.explain_captured,
        )
        yield ModelStep(
            PLACED,
            f"{self.model.name}: {NODE_BY_NODE}",
            partial(open_node_by_node, self.model),
            before=(CAPTURED,),
            required=loss,
            required_of_original=drift,
            explain=self.explain_placed,
        )
        yield ModelStep(
            ENGINE,
            f"{self.model.name}: {self.engine.name}, {self.placement.compute}",
            self.open_engine,
            before=(PLACED,),
            required=describe_tolerance(engine_tolerance(self.tolerance)),
            required_of_original=drift,
            explain=self.explain_engine,
        )
        yield ModelStep(
            HTTP,
            f"laconic serve: {self.engine.name}, {self.placement.compute}",
            self.serving.open,
            before=(ENGINE,),
            required={IDENTICAL: 1.0},
            required_of_original=drift,
        )

    def open_captured(self) -> Session:
        """Open the captured graph, node by node."""
        assert self.graph is not None, "the step is left out without a module to capture"
        return open_node_by_node(self.graph.path)

    def open_engine(self) -> Session:
        """Open the artifact in its engine, as it is served on one thread. Golden outputs are not checked: the ledger is
        for artifacts that fail them, too."""
        return self.serving.lay_out(self.engine.open(self.model, threads=1, compute=self.placement.compute))

    def explain_captured(self, samples: Sequence[Arrays]) -> Divergence:
        """Find the first module whose output the captured graph does not give."""
        source, graph = self.captured_from, self.graph
        if graph is None or not isinstance(source, CheckpointSource):
            return Divergence(says="not bisected: an ONNX source has no modules")
        return find_captured_divergence(source.checkpoint, graph, samples)

    def explain_placed(self, samples: Sequence[Arrays]) -> Divergence:
        """Find the first layer whose error its quantization does not explain."""
        try:
            graph = self.graph
        except CaptureError as error:
            return Divergence(says=f"not bisected: {error}")
        if graph is None:
            return Divergence(says=f"not bisected, for want of a captured graph: {self.missing}")
        return find_placed_divergence(graph, self.model, self.placement.precision, samples)

    def explain_engine(self, samples: Sequence[Arrays]) -> Divergence:
        """Name the layers that the engine runs in another precision."""
        with self.engine.open(self.model, threads=1, compute=self.placement.compute) as session:
            session.run(samples[0])
            return find_engine_divergence(self.placement.precision, session.kernels())


def open_node_by_node(model: Path) -> Session:
    """Open a graph in ONNX Runtime without optimizations."""
    return OnnxRuntime().open(model, threads=1, optimize=False)


def read_tolerance(verdict: Verdict | None, task: Task) -> Tolerance:
    """Read the fidelity that the verdict required of the artifact; the task's own tolerance where there is no
    verdict."""
    required = verdict.drift[0].required if verdict and verdict.drift else {}
    if "fidelity" not in required:
        return task.tolerance
    return Tolerance(mean=required["fidelity"], worst=required.get("fidelity_worst"))


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
        f"{len(names)} of {len(layers)} layers run in {what} ({', '.join(names[:SHOWN])}"
        f"{', ...' if len(names) > SHOWN else ''})"
        for what, names in differing.items()
    ]
    return Divergence(says=f"the outputs differ; {'; '.join(parts)}")
