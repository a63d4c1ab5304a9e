"""What a worker process costs: the same model in the server's own process, and in a worker.

    python benchmarks/processes.py

Models of ONNX Runtime that multiply a row of 384 numbers by more and more matrices, from nothing to some milliseconds.
Both servers run all the time, and rounds of them take turns. Processor time is that of the server and its workers.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from results import Results, make_parser
from safetensors.numpy import save_file
from server import Load, Served, requests_of

from laconic.artifacts.artifact import Artifact
from laconic.artifacts.manifest import GOLDEN, MANIFEST, MEASURED, MODEL, Manifest
from laconic.hardware import this_machine
from laconic.hashing import digest_file, seal
from laconic.tensor import TensorSpec
from laconic.timing.measurements import Measurements
from serve.settings.server_settings import Settings

WIDTH = 384


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="*", default=[0, 8, 32, 128])
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    head = ["one row takes the engine", "clients", "requests per CPU-second, inline", "in a worker", "ratio (range)"]
    results.begin("processes", head)
    with tempfile.TemporaryDirectory() as folder:
        for layers in arguments.layers:
            path = write_model(Path(folder) / f"layers{layers}.laconic", layers)
            lone = time_row(path)
            with Served(path, settings_of(0)) as inline, Served(path, settings_of(1)) as worker:
                requests = requests_of(Artifact.load(path), 1, 0)
                for clients in arguments.clients:
                    rates: list[list[float]] = [[], []]
                    for _ in range(arguments.rounds):
                        for server, own in zip((inline, worker), rates, strict=True):
                            cpu = server.cpu_seconds()
                            done = asyncio.run(Load(server.port, requests, clients).run(arguments.seconds))
                            own.append(len(done) / (server.cpu_seconds() - cpu))
                    ratios = [theirs / ours for ours, theirs in zip(*rates, strict=True)]
                    row = [f"{1e6 * lone:.0f} us", f"{clients}", *(f"{statistics.median(own):.0f}" for own in rates)]
                    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                    results.add("processes", [*row, spread])


def settings_of(workers: int) -> Settings:
    """One executor, in so many workers."""
    return Settings(workers=workers, threads=1, executors=1, queue_seconds=60, unproven=True)


def write_model(path: Path, layers: int) -> Path:
    """An artifact of y = x, times `layers` orthogonal matrices one after the other."""
    path.mkdir()
    rng = np.random.default_rng(0)
    matrices = [np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0].astype(np.float32) for _ in range(layers)]
    nodes = [helper.make_node("MatMul", [f"x{i}" if i else "x", f"w{i}"], [f"x{i + 1}"]) for i in range(layers)]
    nodes.append(helper.make_node("Identity", [f"x{layers}" if layers else "x"], ["y"]))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in "xy")
    weights = [numpy_helper.from_array(matrix, f"w{i}") for i, matrix in enumerate(matrices)]
    graph = helper.make_graph(nodes, "layers", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path / MODEL)
    rows = rng.standard_normal((2, WIDTH)).astype(np.float32)
    answers = rows
    for matrix in matrices:
        answers = answers @ matrix
    save_file({"0.input.x": rows, "0.output.y": np.ascontiguousarray(answers)}, path / GOLDEN)
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", WIDTH))
    manifest = Manifest(
        task="tensors",
        inputs=(spec,),
        outputs=(spec.model_copy(update={"name": "y"}),),
        target="cpu",
        placement="onnxruntime",
        compute="float32",
        precision={},
        source={"name": path.stem},
        history=(),
        recipe={},
        verdict=None,
        versions={},
        data={},
        licence=None,
        files={name: digest_file(path / name) for name in (MODEL, GOLDEN)},
    )
    measured = Measurements(
        machine=this_machine(), timings=(), knee=8, stages={}, peak_memory=1, original_size=1, report=None
    )
    (path / MANIFEST).write_bytes(seal(manifest.model_dump(mode="json")))
    (path / MEASURED).write_bytes(seal(measured.model_dump(mode="json")))
    return path


def time_row(path: Path) -> float:
    """The seconds that one row takes the engine, the best of 200."""
    artifact = Artifact.load(path)
    inputs = artifact.task().typical(1, 0, 0)
    best = float("inf")
    with artifact.open() as session:
        for _ in range(200):
            started = time.perf_counter()
            session.run(inputs)
            best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    main()
