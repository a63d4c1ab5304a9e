"""Models on an NVIDIA GPU in every precision and engine, beside PyTorch, in one interleaved run; and training beside
its plan.

    python benchmarks/gpu.py [--tests] [--training] [--minutes 8] [--out .gpu]
    python benchmarks/gpu.py --dry-run

MiniLM-, BERT-base-, ViT-B- and ResNet-50-shaped models with random weights. Needs PyTorch for CUDA alone; ways whose
packages are missing are left out with the reason, as is what does not fit into the time. `--dry-run` goes through the
same steps on the CPU with tiny models, the graphs for GPU engines by reference execution: it shows that the script
works, and nothing about a GPU. Writes results.md and results.json. Exit codes: 0, 1 if a test failed or the tests did
not end, 3 without a GPU.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

try:
    import torch
except ImportError as error:
    print(f"PyTorch cannot be imported ({error}). Give a Python that has it: make gpu GPU_PYTHON=...", file=sys.stderr)
    sys.exit(3)

from gpu_device import PRECISIONS, BenchmarkDevice
from gpu_models import NETWORKS, TINY_NETWORKS, Network
from gpu_results import Results, describe_software
from gpu_rows import Effort, NetworkRun, NotMeasured, Pace, Runner, Variant, first_line
from gpu_tests import run_gpu_tests
from gpu_torch import forbid_tf32, open_torch

ENGINES = {"onnxruntime-cuda": "ONNX Runtime CUDA", "tensorrt": "TensorRT"}
EAGER, COMPILE = "torch eager", "torch.compile"
ORDER = (
    (EAGER, ("FP32", "FP16", "BF16")),
    (COMPILE, ("FP16", "BF16")),
    ("onnxruntime-cuda", ("FP16", "BF16")),
    ("tensorrt", ("FP16", "INT8", "FP8")),
    (COMPILE, ("INT8", "FP8", "FP32")),
    ("tensorrt", ("BF16", "FP32")),
    ("onnxruntime-cuda", ("FP32", "INT8", "FP8")),
    (EAGER, ("INT8", "FP8")),
)
"""Ways and precisions, the most telling first: where the time does not suffice, the last are left out."""
DRY_EFFORT = Effort(batches=(2,), rounds=1, window=0.0, tries=1)
TESTS, TABLE = 0.2, 0.8
"""Shares of the time that is left for the tests, and for the table where training follows it."""


def main() -> None:
    """Measure, and write the results."""
    arguments = parse_arguments()
    if not arguments.dry_run and not torch.cuda.is_available():
        print(
            "No NVIDIA GPU that PyTorch can use is on this machine, so nothing was measured. Look at nvidia-smi, and "
            "whether torch.version.cuda is set; or give --dry-run",
            file=sys.stderr,
        )
        sys.exit(3)
    pace = Pace(time.monotonic() + 60 * arguments.minutes)
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = BenchmarkDevice(torch.device("cpu" if arguments.dry_run else "cuda"))
    results = Results(device.name, describe_software(), device.absent, dry_run=arguments.dry_run)
    if arguments.tests:
        results.tests = run_gpu_tests(arguments.out, pace.split(TESTS) - time.monotonic())
        results.write(arguments.out)
    forbid_tf32()
    if arguments.dry_run:
        torch.set_num_threads(1)
    networks = TINY_NETWORKS if arguments.dry_run else NETWORKS
    chosen = [each for each in networks if arguments.only.lower() in each.name.lower()]
    table = Pace(pace.split(TABLE if arguments.training else 1.0), pace.costs)
    for number, network in enumerate(chosen):
        share = Pace(table.split(1 / (len(chosen) - number)), table.costs)
        measure_network(network, device, share, results)
        results.write(arguments.out)
    if arguments.training:
        measure_training(device, pace, results, arguments.cache)
        results.write(arguments.out)
    print(results.render())
    sys.exit(1 if results.tests and not results.tests.succeeded else 0)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU: tries the script itself")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything; what does not fit is named")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--tests", action="store_true", help="run the tests that need a GPU first")
    parser.add_argument("--training", action="store_true", help="train a 1.1 B model, too, beside its planned memory")
    parser.add_argument("--out", type=Path, default=Path(".gpu"), help="the folder for results.md and results.json")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where configs go")
    return parser.parse_args()


def measure_network(network: Network, device: BenchmarkDevice, pace: Pace, results: Results) -> None:
    """Measure one model, and add its rows to the results."""
    with tempfile.TemporaryDirectory() as folder:
        variants = list(list_variants(network, device, Path(folder)))
        effort = Effort() if device.on_gpu else DRY_EFFORT
        run = NetworkRun(network, variants, device, effort, pace)
        run.measure()
    print(f"{network.name}: {len(run.rows)} rows, {len(run.left)} left out", file=sys.stderr)
    results.rows += run.rows
    results.left += run.left


def list_variants(network: Network, device: BenchmarkDevice, folder: Path) -> Iterator[Variant]:
    """The ways to run a model, the reference first."""
    prepare, open_engine = load_engines(network, folder, reference=not device.on_gpu)
    for way, precisions in ORDER:
        for precision in precisions:
            assert precision in PRECISIONS
            if way in ENGINES:
                name = ENGINES[way] if device.on_gpu else f"{ENGINES[way]}, by reference execution"
                # ONNX Runtime multiplies FP32 in TF32 unless it is told not to.
                peak = "" if (way, precision) == ("onnxruntime-cuda", "FP32") else precision
                yield Variant(
                    name, precision, partial(open_engine, way, precision), peak, partial(prepare, way, precision)
                )
            elif way == EAGER and precision in ("INT8", "FP8"):
                yield Variant(way, precision, refuse_eager, precision)
            else:
                opener = partial(open_torch, network, precision, device, compiled=way == COMPILE)
                name = way if way == EAGER or device.on_gpu else f"{COMPILE}, traced only"
                yield Variant(name, precision, opener, precision)


def refuse_eager() -> Runner:
    """The reason why there is no such row."""
    raise NotMeasured("torchao's quantized layers are made for torch.compile; look at its rows")


def load_engines(
    network: Network, folder: Path, *, reference: bool
) -> tuple[Callable[[str, str], None], Callable[[str, str], Runner]]:
    """Functions that prepare and open the network in an engine and a precision."""
    try:
        from gpu_engines import EngineGraphs
    except Exception as error:  # noqa: BLE001 - a package that does not fit fails in its own way
        reason = f"the project's export cannot be imported: {first_line(error)}"

        def refuse(engine: str, precision: str) -> Runner:
            raise NotMeasured(reason)

        return lambda engine, precision: None, refuse
    graphs = EngineGraphs(network, folder, reference=reference)
    return graphs.prepare, graphs.open


def measure_training(device: BenchmarkDevice, pace: Pace, results: Results, cache: Path) -> None:
    """Measure training, and add it to the results."""
    try:
        from gpu_training import train_combinations
    except Exception as error:  # noqa: BLE001 - a package that does not fit fails in its own way
        results.training_absent = f"training cannot be imported: {first_line(error)}"
        return
    for row in train_combinations(device.torch, cache, pace):
        results.training.append(dataclasses.asdict(row))


if __name__ == "__main__":
    main()
