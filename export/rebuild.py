"""Building an artifact's model for other engines: its plan is placed again, without calibration and without samples."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from safetensors import SafetensorError, safe_open

from export.candidates.engine_option import EngineOption
from export.lineage import Lineage
from export.passes.grouped_weights import find_weight_names, read_grouped_weight
from export.pipeline import EngineBuild, Result
from export.placements.split_decoder import has_decoder, split_decoder
from export.sources import ADAPTER, capture_graph, open_onnx_original, open_source
from export.validation.figures import round_figure
from export.validation.missed import find_missed
from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact, check_destination, publish_artifact
from laconic.artifacts.golden import GOLDEN_FLOOR
from laconic.artifacts.manifest import CALIBRATION, GRAPH, GRAPH_JSON
from laconic.artifacts.placement import Placement
from laconic.artifacts.verdict import Comparison, Verdict
from laconic.artifacts.writer import GRAPH_KEY, ArtifactParts, write_artifact_folder
from laconic.cache import Cache, open_scratch_folder
from laconic.errors import CorruptArtifact, SourceError
from laconic.files import read_json
from laconic.models.source import GraphSource
from laconic.models.source_loading import is_onnx
from laconic.progress import Steps
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan, Precision, PrecisionLadder, QuantizedWeight
from laconic.quantization.plan_file import unpack_bias_corrections, unpack_flags, unpack_ranges, unpack_smoothing
from laconic.recipes.job import Job
from laconic.recipes.recipe import Origin, Recipe
from laconic.recipes.splits import split_samples
from laconic.tasks.fidelity import measure_fidelity

AGAINST = "float graph"
"""What a rebuilt artifact is compared with: the graph that the original was captured as."""

REBUILT_FIDELITY = 0.98
"""The fidelity of another engine's outputs to the golden ones that is enough: 0.997 for MiniLM's vectors between
OpenVINO and ONNX Runtime."""


@dataclass(frozen=True)
class Calibration:
    """The content of calibration.safetensors. graph: digest of the float graph that it was found on."""

    arrays: Arrays
    graph: str


def build(
    path: Path,
    destination: Path,
    *,
    changes: Mapping[str, Any] | None = None,
    original: Origin | None = None,
    trust: bool = False,
    steps: Steps | None = None,
    cache: Cache | None = None,
) -> Result:
    """Write the model of the artifact at `path` as an artifact for other engines, whole or not at all.

    The float graph comes from the artifact, or is captured from `original`, its source. Precision, ranges and rounded
    weights are those of the artifact; outputs are compared with the float graph's, on the samples of `data`, or on
    synthetic ones, of which nothing is required. What is required then is that the artifact's golden inputs, which are
    real samples, give its golden outputs.

    changes: keys of the recipe: target, engine_only, portable, keep_graph, data, goal; those that are None are left
    out. trust: whether the source may execute code. Raises SourceError where there is no float graph, or another one
    than the artifact's.
    """
    check_destination(destination)
    steps, cache = steps or Steps(), cache or Cache()
    artifact = Artifact.load(path)
    calibration = read_calibration(artifact)
    keys = {key: value for key, value in (changes or {}).items() if value is not None}
    if "data" not in keys and "goal" not in keys:
        keys["goal"] = {"fidelity": 0.0, "worst": 0.0}
    recipe = Recipe.parse({"source": str(path), "task": artifact.manifest.task, "stages": []} | keys)
    with steps.step("load the float graph") as step:
        graph = find_graph(artifact, calibration, original, cache, trust=trust)
        step.note = f"{len(graph.layers)} layers"
    plan = restore_plan(artifact, calibration, graph)
    with open_job(recipe, artifact, graph, destination, steps, cache) as lineage:
        parts = EngineBuild(lineage, PrecisionLadder.of(plan), against=AGAINST).make_parts()
        folder = lineage.job.folder / "artifact"
        write_artifact_folder(keep_provenance(check_golden(parts, artifact), artifact), folder)
        publish_artifact(folder, destination)
    built = Artifact.load(destination)
    return Result(built, tuple(find_missed(built, recipe.goal)))


def read_calibration(artifact: Artifact) -> Calibration:
    """Read what calibration found. Raises SourceError for an artifact without it, CorruptArtifact for a damaged one."""
    path = artifact.path / CALIBRATION
    if CALIBRATION not in artifact.manifest.files:
        raise SourceError(
            f"{artifact.path} holds no {CALIBRATION}: an earlier version of Laconic made it. Compress the model again"
        )
    try:
        with safe_open(path, "numpy") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
            return Calibration(arrays, (file.metadata() or {})[GRAPH_KEY])
    except (SafetensorError, KeyError, OSError) as error:
        raise CorruptArtifact(f"{path} cannot be read: {error}. Compress the model again") from error


def find_graph(
    artifact: Artifact, calibration: Calibration, original: Origin | None, cache: Cache, *, trust: bool
) -> Graph:
    """Find the float graph of an artifact, in it or from its source. Raises SourceError."""
    if GRAPH in artifact.manifest.files:
        return read_kept_graph(artifact.path)
    if original is None:
        raise SourceError(
            f"{artifact.path} does not hold its float graph. Give --original, the model that it was made from, or "
            f"compress it again with --keep-graph"
        )
    path = Path(original.source)
    if path.exists() and is_onnx(path):
        graph = open_onnx_original(path, artifact.path, artifact.manifest, cache).graph
        graph = replace(graph, inputs=artifact.manifest.inputs)  # whose bounds all samples told, and not a few
    else:
        graph = capture_graph(open_source(original, cache, trust=trust), cache)
    if graph.key != calibration.graph:
        raise SourceError(
            f"{original.source} gives another graph than {artifact.path} was made from: it is another model, it was "
            f"pruned or trained in between, or another version of torch captured it. Compress it again with "
            f"--keep-graph"
        )
    return graph


def read_kept_graph(folder: Path) -> Graph:
    """Read the float graph that an artifact holds. Raises CorruptArtifact."""
    try:
        graph = ADAPTER.validate_python(read_json(folder / GRAPH_JSON))
    except (OSError, ValueError) as error:
        raise CorruptArtifact(f"{folder / GRAPH_JSON} does not describe a graph: {error}") from None
    return replace(graph, path=folder / GRAPH)


def restore_plan(artifact: Artifact, calibration: Calibration, graph: Graph) -> Plan:
    """Restore the plan of an artifact: its precision, and what calibration found. INT8 weights, and those
    with groups, are read from its graph, since they need not be rounded to nearest; others in 4 bits are rounded
    anew."""
    precision = artifact.manifest.placements[0].precision
    nodes = {layer.node for layer in graph.layers}
    if precision.keys() != nodes:
        raise CorruptArtifact(f"{artifact.path} names other layers than its float graph has. Compress the model again")
    flags = unpack_flags(calibration.arrays)
    plan = Plan(
        precision,  # type: ignore[arg-type]
        unpack_ranges(calibration.arrays),
        unpack_smoothing(calibration.arrays),
        attention=flags["attention"],
        int8_kv_cache=flags["int8_kv_cache"],
        int4_value_cache=flags["int4_value_cache"],
    )
    corrections = unpack_bias_corrections(calibration.arrays)
    model = onnx.load(artifact.model).graph
    tensors, built = {tensor.name: tensor for tensor in model.initializer}, {node.name: node for node in model.node}
    weights: dict[tuple[str, Precision], QuantizedWeight] = {}
    for layer in graph.layers:
        node, each = layer.node, plan.precision[layer.node]
        if (grouped := read_grouped_weight(layer, built, tensors)) is not None:
            weights[node, each] = replace(grouped, bias_correction=corrections.get(node))
            continue
        integers, scales = map(tensors.get, find_weight_names(built, node))
        if each in ("int8", "int8-weight") and integers is not None and scales is not None:
            arrays = [numpy_helper.to_array(tensor) for tensor in (integers, scales)]
            weights[node, each] = QuantizedWeight(arrays[0], arrays[1].reshape(1, -1), corrections.get(node))
    return replace(plan, weights=weights)


@contextmanager
def open_job(
    recipe: Recipe, artifact: Artifact, graph: Graph, destination: Path, steps: Steps, cache: Cache
) -> Iterator[Lineage]:
    """Open the lineage of a rebuilt artifact, whose source is the float graph."""
    made, task = artifact.manifest, artifact.task()
    if made.source.get("kind") == "onnx" and recipe.data.calibrate:  # such a model need not run at made-up sizes
        inputs, _ = artifact.golden(made.placements[0])[0]
        task.typical_sample = {name: array[:1] for name, array in inputs.items()}
    with open_scratch_folder(destination) as folder:
        decoder = folder / "decoder.onnx" if has_decoder(graph) else None
        if decoder is not None:
            split_decoder(graph.path, decoder)
        source = GraphSource(
            task=task,
            key=graph.key,
            size=artifact.measured.original_size,
            licence=made.licence,
            description=dict(made.source),
            graph=graph,
            decoder=decoder,
        )
        lineage = Lineage(source, Job(recipe, split_samples(recipe, source.task), folder, steps, cache))
        lineage.history += made.history
        yield lineage


def check_golden(parts: ArtifactParts, artifact: Artifact) -> ArtifactParts:
    """Return the parts of a rebuilt artifact, whose verdicts compare it with the golden outputs of the one it is made
    from."""
    made = parts.manifest
    verdict = Verdict.model_validate(made["verdict"])
    comparison = compare_with_golden(EngineOption.here(made["placement"], made["compute"]), parts.model, artifact)
    manifest = made | {"verdict": add_parity(verdict, comparison).model_dump(mode="json")}
    alternatives = []
    for each in parts.alternatives:
        placement = each.placement
        comparison = compare_with_golden(EngineOption.here(placement.runtime, placement.compute), each.model, artifact)
        if placement.verdict is not None:
            placement = placement.model_copy(update={"verdict": add_parity(placement.verdict, comparison)})
        alternatives.append(replace(each, placement=placement))
    return replace(parts, manifest=manifest, alternatives=alternatives)


def compare_with_golden(option: EngineOption, model: Path, artifact: Artifact) -> Comparison:
    """Compare the outputs of a rebuilt graph with the golden outputs of an artifact, for its golden inputs."""
    preferred = artifact.manifest.placements[0]
    task = artifact.task()
    with option.open(model, 1) as session:
        values = [
            measure_fidelity(task, outputs, session.run(inputs)) for inputs, outputs in artifact.golden(preferred)
        ]
    fidelity = np.concatenate(values)
    return Comparison(
        subject="rebuilt artifact",
        against="golden outputs of the one it was built from",
        samples=len(fidelity),
        figures={"fidelity": round_figure(fidelity.mean()), "fidelity_worst": round_figure(fidelity.min())},
        required={"fidelity": allow_twice(preferred)},
    )


def allow_twice(placement: Placement) -> float:
    """Compute the fidelity that is required of the outputs of another engine to golden outputs: both may be as far from
    the graph run node by node as the engine that gave them was."""
    engine = placement.verdict.find_check("engine") if placement.verdict else None
    worst = engine.figures.get("fidelity_worst", 1.0) if engine else 1.0
    return max(min(REBUILT_FIDELITY, 1 - 2 * (1 - worst)), GOLDEN_FLOOR)


def add_parity(verdict: Verdict, comparison: Comparison) -> Verdict:
    """Return the verdict with one more comparison."""
    return verdict.model_copy(update={"parity": (*verdict.parity, comparison)})


def keep_provenance(parts: ArtifactParts, artifact: Artifact) -> ArtifactParts:
    """Return the parts of a rebuilt artifact with the source, the stages and their durations of the one that it is made
    from."""
    made = artifact.manifest
    kept: Mapping[str, Any] = {key: made.recipe[key] for key in ("stages", "seed") if key in made.recipe}
    manifest = parts.manifest | {"source": made.source, "recipe": {**parts.manifest["recipe"], **kept}}
    measured = parts.measured.model_copy(update={"seconds": artifact.measured.seconds})
    return replace(parts, manifest=manifest, measured=measured)
