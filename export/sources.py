"""Loading the source that a recipe names, and capturing its float graph; graphs are cached."""

import dataclasses
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from pydantic import TypeAdapter
from safetensors.numpy import load_file, save_file

from export.capture.capture import capture, measure_parity
from export.capture.model_file import save_model
from export.capture.onnx_interface import infer_layouts
from export.capture.onnx_source import SOURCE, OnnxHints, OnnxInterface, import_onnx
from export.capture.parity import largest_difference
from export.capture.source_divergence import find_source_divergence
from export.capture.source_file import read_onnx
from laconic.arrays import Arrays
from laconic.artifacts.golden import read_golden
from laconic.artifacts.manifest import GRAPH, GRAPH_JSON, Manifest, read_manifest
from laconic.cache import Cache
from laconic.data.array_formats import peek_arrays, read_npz
from laconic.data.batches import batches
from laconic.data.dataset import Dataset
from laconic.data.reader import read_few
from laconic.errors import SourceError, UntrustedCode
from laconic.hardware import cores
from laconic.hashing import digest_file, environment_digest, hash_of
from laconic.models.processors import plain_task
from laconic.models.source import CheckpointSource, GraphSource, Source
from laconic.models.source_loading import is_onnx, load_source
from laconic.models.torch_session import TorchSession
from laconic.quantization.graph import Graph
from laconic.recipes.recipe import Origin, Recipe
from laconic.runtimes.onnx_file import find_external_files
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.predict import ROWS
from laconic.runtimes.runtime import Session
from laconic.tasks.task import Task
from laconic.tensor import TensorSpec

ADAPTER = TypeAdapter(Graph)
INTERFACE, TYPICAL = "interface.json", "typical.safetensors"
"""Files beside the graph of an ONNX file: what is different about its inputs and outputs, and a typical sample."""


def open_source(origin: Origin, cache: Cache, *, trust: bool, samples: Path | None = None) -> Source:
    """Load the model that a recipe names. samples: its file of samples, if any.

    Raises SourceError if the model is missing, damaged or of an unknown kind.
    """
    path = Path(origin.source)
    if not path.exists():
        raise SourceError(
            f"there is no {path}. Give a checkpoint's folder, a weights file with --builder, or an ONNX file"
        )
    if is_onnx(path):
        return open_onnx(path, origin, samples, cache)
    checkpoint = load_source(
        path,
        task=origin.task,
        builder=origin.builder,
        arguments=origin.arguments or None,
        weights_key=origin.weights_key,
        inputs=origin.inputs or None,
        samples=read_npz(samples) if samples and origin.builder and not origin.inputs else None,
        trust=trust,
    )
    return CheckpointSource.of(checkpoint)


def open_onnx(path: Path, origin: Origin, samples: Path | None, cache: Cache) -> GraphSource:
    """Open an ONNX file of any framework as a source, with a normalized graph. samples: the file that tells sizes and
    values of its inputs, if any."""
    file = digest_file(path)
    samples = samples if samples is not None and samples.exists() else None
    seen = digest_file(samples).sha256 if samples is not None and samples.is_file() else str(samples)
    constants = origin.constants if isinstance(origin, Recipe) else {}
    quantizes = isinstance(origin, Recipe) and bool(origin.stages)
    known = [[spec.model_dump(mode="json") for spec in origin.inputs], constants, seen, quantizes]
    key = hash_of("onnx", file.sha256, digest_external_data(path), origin.task, known, environment_digest())

    def fill(folder: Path) -> None:
        rows, read = (peek_arrays(samples), partial(encode_few, samples)) if samples is not None else ({}, None)
        made = import_onnx(path, folder, origin.task, OnnxHints(origin.inputs, constants, rows, read, quantizes))
        write_graph_json(made.graph, folder)
        (folder / INTERFACE).write_text(made.interface.model_dump_json(indent=1))
        save_file(made.typical, folder / TYPICAL)

    folder = cache.directory(f"graph-{key}", fill)
    graph = read_graph_json(folder)
    interface = OnnxInterface.model_validate_json((folder / INTERFACE).read_text())
    kept = {"constants": interface.constants} if interface.constants else {}
    return GraphSource(
        task=plain_task(origin.task, graph.inputs, path, interface.constants, load_file(folder / TYPICAL)),
        key=key,
        size=file.size,
        licence=None,
        description={"kind": "onnx", "sha256": file.sha256, **kept},
        graph=graph,
        file=folder / SOURCE if (folder / SOURCE).is_file() else path.resolve(),
        least_exactness=interface.exactness,
        notes=interface.notes,
    )


def encode_few(path: Path, task: Task) -> list[Arrays]:
    """Read a few samples as a model takes them, [1, ...] by input, one of each shape first."""
    encoded = [task.encode([sample]) for sample in read_few(path, task)]
    shapes = [str({name: array.shape for name, array in arrays.items()}) for arrays in encoded]
    firsts = [shapes.index(shape) for shape in dict.fromkeys(shapes)]
    return [encoded[index] for index in (*firsts, *(each for each in range(len(encoded)) if each not in firsts))]


def digest_external_data(path: Path) -> dict[str, str]:
    """Return the digest of each file of external data beside an ONNX file; none for one that is no such file or lacks
    its data, which the import says."""
    try:
        with path.open("rb") as file:
            return {name: digest_file(path.parent / name).sha256 for name in find_external_files(file)}
    except (OSError, ValueError):
        return {}


def capture_graph(source: Source, cache: Cache) -> Graph:
    """Return the float graph of a source, captured if it is a checkpoint."""
    if isinstance(source, GraphSource):
        return source.graph
    checkpoint = as_checkpoint_source(source).checkpoint
    return read_graph_json(
        cache.directory(
            f"graph-{hash_of('capture', source.key, environment_digest())}",
            lambda folder: write_graph_json(capture(checkpoint, folder), folder),
        )
    )


def measure_capture_error(source: Source, graph: Graph, samples: Dataset, cache: Cache) -> float | None:
    """Measure the graph's largest error against the module or the file that it was made from, relative to the largest
    output: on these samples, and on made-up inputs of other sizes. None where the graph itself is the source."""
    if isinstance(source, GraphSource) and source.file is None:
        return None
    key = hash_of("capture-error", source.key, graph.key, samples.fingerprint, environment_digest())

    def measure() -> float:
        if isinstance(source, GraphSource):
            reference, errors = source.open(cores()), [0.0]
        else:
            checkpoint = as_checkpoint_source(source).checkpoint
            reference = TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs, cores())
            errors = [measure_parity(checkpoint, graph)]
        inputs = (batch for _, batch in batches(samples, source.task, ROWS))
        with reference, OnnxRuntime().open(graph.path, threads=cores()) as candidate:
            return max(*errors, largest_difference(reference, candidate, inputs, source.task.align))

    return float(cache.json(f"error-{key}", measure))


def find_divergence(source: Source, graph: Graph, samples: Dataset) -> str:
    """Find the node of an ONNX file from which on its graph differs; empty where it is not known, or for a module."""
    if not isinstance(source, GraphSource) or source.file is None:
        return ""
    rows = (batch for _, batch in batches(samples, source.task, 1))
    return find_source_divergence(source.file, graph.path, rows)


def as_checkpoint_source(source: Source) -> CheckpointSource:
    """Return the source, typed as one with a module. Raises SourceError for a graph, which has none."""
    if not isinstance(source, CheckpointSource):
        raise SourceError("an ONNX file is a graph without a module. Stages that change the module need a checkpoint")
    return source


def open_original(path: Path, artifact: Path, threads: int, *, builder: str | None = None, trust: bool) -> Session:
    """Open the model that an artifact was made from, in full precision. Raises what `open_original_source` raises."""
    return open_original_source(path, artifact, builder=builder, trust=trust).open(threads)


def open_original_source(path: Path, artifact: Path, *, builder: str | None = None, trust: bool) -> Source:
    """Load the model that an artifact was made from.

    builder: the "package.module:factory" that builds the module, from the user: code that the artifact names is never
    imported. Its arguments are those that the artifact recorded, if that is trusted. Raises SourceError, UntrustedCode,
    or ArtifactError if there is no artifact.
    """
    manifest = read_manifest(artifact)
    if is_onnx(path):
        return open_onnx_original(path, artifact, manifest, Cache())
    made = manifest.source
    keys: dict[str, Any] = {"source": str(path), "task": manifest.task}
    if made.get("kind") == "builder" and not path.is_dir():
        if builder is None:
            raise SourceError(
                f"{path} needs the function that builds its module, and code that an artifact names is not called. "
                f"Give --builder package.module:factory; the artifact was made with {made.get('builder')!r}"
            )
        if made.get("arguments") and not trust:
            raise UntrustedCode(
                f"{builder} would be called with the arguments that {artifact} recorded: {made['arguments']!r}. "
                f"Give --trust if the artifact is yours"
            )
        keys |= {"builder": builder, "arguments": made.get("arguments", {}), "inputs": manifest.inputs}
        keys["weights_key"] = made.get("weights_key")
    return open_source(Recipe.parse(keys | {"stages": []}), Cache(), trust=trust)


def check_original(source: Source, path: Path, artifact: Path, manifest: Manifest) -> None:
    """Raise SourceError unless a source has the inputs and outputs of an artifact."""
    assert isinstance(source, (CheckpointSource, GraphSource))
    model = source.checkpoint if isinstance(source, CheckpointSource) else source.graph
    for side in ("inputs", "outputs"):
        actual, expected = (describe_signature(getattr(each, side)) for each in (model, manifest))
        if actual != expected:
            raise SourceError(
                f"{path} is not the model that {artifact} was made from: its {side} are {', '.join(actual)}, expected "
                f"{', '.join(expected)}. Give the source of that artifact as --original"
            )


def describe_signature(specs: tuple[TensorSpec, ...]) -> list[str]:
    """Describe the name, type and shape of each tensor."""
    return [f"{spec.name}: {spec.dtype} {spec.describe()}" for spec in specs]


def open_onnx_original(path: Path, artifact: Path, manifest: Manifest, cache: Cache) -> GraphSource:
    """Open the ONNX file that an artifact was made from as it was opened then: with the sizes and constants that the
    artifact knows, and its golden inputs as samples."""
    placement = manifest.placements[0]
    size = manifest.files[placement.golden].size
    pairs = read_golden(artifact / placement.golden, size, manifest.inputs, manifest.outputs)
    constants = manifest.source.get("constants", {})
    keys = {"source": str(path), "task": manifest.task, "constants": constants, "stages": []}
    inputs = restore_inputs(path, manifest)
    with TemporaryDirectory() as folder:
        samples = Path(folder) / "golden.npz"
        arrays: Arrays = {}
        for spec in manifest.inputs:
            rows = [row for given, _ in pairs for row in given[spec.name]]
            arrays[spec.name] = np.concatenate([row.reshape(-1) for row in rows])
            arrays[f"{spec.name}_shapes"] = np.array([row.shape for row in rows], np.int64).reshape(len(rows), -1)
        np.savez(samples, **arrays)  # type: ignore[arg-type]
        return open_onnx(path, Recipe.parse(keys | {"inputs": inputs}), samples, cache)


def restore_inputs(path: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """Return the specs of the inputs, with the axes in the order of the file. Those of a batch that
    is fixed to one row are left to it. Bounds whose lower end is 1 are found anew: the model need not run there."""
    given = {spec["name"]: spec for spec in manifest.recipe.get("inputs", ())}
    model = ir.from_proto(read_onnx(path))
    layouts = infer_layouts(
        model,
        path,
        specs=[TensorSpec(**spec) for spec in given.values()],
        constants=manifest.source.get("constants", {}),
    )
    places = {layout.name: layout.place for layout in layouts if not layout.has_fixed_batch}
    inputs = []
    for spec in manifest.inputs:
        if spec.name in given:
            inputs.append(given[spec.name])
        elif spec.name in places:
            first, *shape = spec.shape
            shape.insert(places[spec.name], first)
            bounds = {axis: limits for axis, limits in spec.bounds.items() if limits[0] > 1}
            inputs.append({"name": spec.name, "dtype": spec.dtype, "shape": shape, "bounds": bounds})
    return inputs


def copy_graph(graph: Graph, folder: Path) -> list[Path]:
    """Write a graph and its description to a new folder, under the names that they have in an artifact. Returns the
    files."""
    folder.mkdir()
    save_model(onnx.load(graph.path), folder / GRAPH)
    write_graph_json(dataclasses.replace(graph, path=folder / GRAPH), folder)
    return sorted(folder.iterdir())


def write_graph_json(graph: Graph, folder: Path) -> None:
    """Write the description of a graph that its ONNX file does not contain (signature, layers, key), beside the
    file."""
    relative = dataclasses.replace(graph, path=graph.path.relative_to(folder))
    (folder / GRAPH_JSON).write_bytes(ADAPTER.dump_json(relative, indent=1))


def read_graph_json(folder: Path) -> Graph:
    """Read a graph from a folder that `write_graph_json` described."""
    graph = ADAPTER.validate_json((folder / GRAPH_JSON).read_bytes())
    return dataclasses.replace(graph, path=folder / graph.path)
