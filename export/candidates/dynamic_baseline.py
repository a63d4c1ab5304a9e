"""ONNX Runtime's dynamic quantization of an ONNX file beside the artifact: what anybody gets by one call, without
samples."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnxruntime.quantization import quantize_dynamic

from export.candidates.candidate import EngineCandidate
from laconic.arrays import Arrays
from laconic.data.dataset import Dataset
from laconic.errors import LaconicError
from laconic.files import folder_size
from laconic.models.source import GraphSource, Source
from laconic.progress import Steps, hide_library_messages
from laconic.recipes.splits import SampleSplits
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.predict import predict
from laconic.runtimes.runtime import Session
from laconic.tasks.fidelity import measure_fidelity
from laconic.tasks.tolerance import Tolerance
from laconic.timing.benchmark import LEAST_ROUNDS, LENGTH, interleave, make_timings
from laconic.timing.measurements import DynamicBaseline
from laconic.units import format_bytes, format_percent

LARGEST = 2 * 10**9
"""Bytes of a file from which on the comparison is left out: it would take minutes and gigabytes."""
FEWEST = 8
"""Test samples below which it is left out: a fidelity of fewer says nothing."""
SECONDS = 6.0
"""How long the samples may take, by the timing of one: of more, as many as that allows are compared."""
SAME_SIZE, SAME_FIDELITY, SAME_SPEED = 1.01, 5e-4, 0.95
"""Within these, neither is worse."""
LAYERS = "layers"
QUANTIZED = ("Cast", "Conv", "Gemm", "MatMul")
"""Operators that read the weights of layers."""
FLOATS = {TensorProto.FLOAT: "32", TensorProto.FLOAT16: "16", TensorProto.BFLOAT16: "16"}


def compare_dynamic(
    chosen: EngineCandidate,
    source: Source,
    samples: SampleSplits,
    answer: Callable[[Dataset], Arrays],
    required: Tolerance,
    steps: Steps,
) -> DynamicBaseline | None:
    """Quantize the file of a run dynamically by ONNX Runtime, and measure its size, fidelity and speed beside the
    artifact's; None where that is no choice: for a checkpoint, a GPU, or one of many artifacts.

    answer: gives the original's outputs for some samples. required: of the artifact. A file that cannot be quantized
    so, or is not worth the time, is no error: the result says why it has no figures.
    """
    is_choice = samples.part == "all" and samples.fingerprints and not chosen.option.reference
    if not isinstance(source, GraphSource) or not is_choice or chosen.option.on_gpu:
        return None
    with steps.step("compare with dynamic INT8") as step:
        try:
            baseline = measure_dynamic(chosen, source, samples.judge, answer)
        except Exception as error:  # noqa: BLE001 - whatever stops the other tool must not stop the compression
            kind = "ONNX Runtime cannot run it" if isinstance(error, LaconicError) else "quantize_dynamic fails"
            baseline = DynamicBaseline(unavailable=f"{kind} ({type(error).__name__})")
        step.note = baseline.describe()
    return baseline.model_copy(update={"gave_up": tuple(list_given_up(baseline, chosen, source.size, required))})


def measure_dynamic(
    chosen: EngineCandidate, source: GraphSource, judge: Dataset, answer: Callable[[Dataset], Arrays]
) -> DynamicBaseline:
    """Measure the dynamically quantized form of a file, and the artifact on the same samples.

    judge: the test samples. answer: gives the original's outputs for some of them. Raises whatever the engine raises.
    """
    if source.size > LARGEST:
        return DynamicBaseline(unavailable=f"files of more than {format_bytes(LARGEST)} are not compared")
    if len(judge) < FEWEST:
        return DynamicBaseline(unavailable=f"{len(judge)} test samples are too few to compare on")
    folder = chosen.model.parent.parent / "dynamic"
    folder.mkdir()
    path = folder / "dynamic.onnx"
    with hide_library_messages():
        quantize_dynamic(source.file or source.graph.path, path)
    task = source.task
    with chosen.option.open(chosen.model, 1) as artifact, OnnxRuntime().open(path) as dynamic:
        sessions: dict[str, Session] = {"artifact": artifact, "dynamic": dynamic}
        inputs = task.timed(1, LENGTH)
        runs = {name: partial(session.run, inputs) for name, session in sessions.items()}
        seconds = interleave(runs, rounds=LEAST_ROUNDS + 2)
        _, timing = make_timings(seconds, "artifact", batch=1, length=0, threads=1)
        affordable = int(SECONDS / sum(float(np.median(each)) for each in seconds.values()))
        few = judge if affordable >= len(judge) else judge.take(max(affordable, FEWEST))
        reference = answer(few)
        ours, theirs = (measure_fidelity(task, reference, predict(session, task, few)) for session in sessions.values())
    return DynamicBaseline(
        size=folder_size(folder),
        samples=len(few),
        fidelity=float(theirs.mean()),
        fidelity_worst=float(theirs.min()),
        artifact_fidelity=float(ours.mean()),
        speed=timing.speedup,
    )


def list_given_up(
    baseline: DynamicBaseline, chosen: EngineCandidate, original: int, required: Tolerance
) -> Iterator[str]:
    """Yield a sentence for each of size, fidelity and speed in which the artifact is worse, with the reason. original:
    the size of the file in bytes."""
    size = folder_size(chosen.model.parent)
    if size > SAME_SIZE * original:
        yield f"larger than the file: {describe_floats(chosen)}"
    if baseline.unavailable:
        return
    is_faithful = baseline.fidelity >= required.mean and baseline.fidelity_worst >= (required.worst or 0.0)
    reason = "" if is_faithful else "that form is not as faithful as required"
    if size > SAME_SIZE * baseline.size:
        yield f"larger than dynamic INT8: {', and '.join(filter(None, (reason, describe_floats(chosen))))}"
    if baseline.artifact_fidelity < baseline.fidelity - SAME_FIDELITY:
        yield "less faithful than dynamic INT8: the fastest that meets the goal is taken. --fidelity asks more"
    if baseline.speed * SAME_SPEED > 1:
        yield f"slower than dynamic INT8 at batch 1: {reason or 'engines are chosen by batches of 1 and 8 together'}"


def describe_floats(chosen: EngineCandidate) -> str:
    """Say which weights of an artifact stay in float, by the operators that read them, the largest first."""
    graph = onnx.load(chosen.model, load_external_data=False).graph
    readers: dict[str, str] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, LAYERS if node.op_type in QUANTIZED else node.op_type)
    sizes: Counter[tuple[str, str]] = Counter()
    for tensor in graph.initializer:
        if tensor.data_type in FLOATS:
            width = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            sizes[readers.get(tensor.name, "subgraphs"), FLOATS[tensor.data_type]] += int(np.prod(tensor.dims)) * width
    total = folder_size(chosen.model.parent)
    largest = [(name, bits, size) for (name, bits), size in sizes.most_common(2) if size > total / 20]
    if not largest:
        return "its scales and Q/DQ nodes take the rest"
    shares = [f"{format_percent(size / total)} of it are {bits}-bit weights of {name}" for name, bits, size in largest]
    is_kept = any(name == LAYERS for name, _, _ in largest)
    return ", ".join(shares) + (", which the goal or the recipe keeps so" if is_kept else "")
