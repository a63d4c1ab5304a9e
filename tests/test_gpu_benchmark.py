"""The benchmark for GPUs, proved without one: its dry run, what it leaves out and why, and its environment."""

import importlib.metadata
import io
import json
import os
import runpy
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch

from laconic.cache import VARIABLE
from train.planner import device_rates

HOME = Path(__file__).parents[1]
BENCHMARKS = HOME / "benchmarks"
SCRIPT = BENCHMARKS / "gpu.py"
BLOCKED = """
import runpy, sys
for name in {names}:
    sys.modules[name] = None
sys.path.insert(0, {folder!r})
sys.argv = ["gpu.py", *{arguments}]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The modules of the benchmarks, which import one another by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield


ERRORS = {"FP32": 1e-5, "FP16": 0.01, "BF16": 0.05, "FP8": 0.3, "INT8": 0.5}
"""INT8: 0.02 for the tiny ViT in torch; 0.38 without VNNI, where oneDNN's products saturate (docs of oneDNN: Nuances of
int8 Computations)."""


def run(*arguments, blocked=()):
    code = BLOCKED.format(
        names=blocked, folder=str(BENCHMARKS), arguments=[str(each) for each in arguments], script=str(SCRIPT)
    )
    environment = os.environ | {"PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """What a dry run prints and writes. It runs in this process: another would import everything anew."""
    folder = tmp_path_factory.mktemp("dry")
    # A transformer and a convolutional network: BERT-base and ResNet-50.
    arguments = ("--dry-run", "--only", "r", "--training", "--out", folder, "--cache", folder / "cache")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", ["gpu.py", *map(str, arguments)])
        patch.setenv(VARIABLE, str(folder / "cache"))
        patch.setattr(device_rates, "MATRIX_SIDES", {"cpu": (16, 64)})
        patch.setattr(device_rates, "SECONDS", 0.001)
        with redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not stopped.value.code
    return shown.getvalue(), (folder / "results.md").read_text(), json.loads((folder / "results.json").read_text())


def test_a_dry_run_measures_every_model_way_and_precision_or_says_why_not(dry):
    _, _, results = dry
    ways = {row["way"].partition(",")[0] for row in results["rows"]}
    assert ways == {"torch eager", "torch.compile", "ONNX Runtime CUDA", "TensorRT"}
    told = {(row["model"], row["way"], row["precision"]) for row in (*results["rows"], *results["left"])}
    assert len(told) == 2 * 4 * 5
    for row in results["rows"]:
        assert row["seconds"] > 0
        assert row["error"] < ERRORS[row["precision"]], row
        assert row["memory"] is row["joules"] is row["share"] is None
    reasons = {each["reason"] for each in results["left"]}
    assert not any("Error" in reason for reason in reasons), reasons
    assert "FP8 needs compute capability 8.9, the device has none, being a CPU" in reasons


def test_a_dry_run_says_that_nothing_ran_on_a_gpu_and_predicted_memory_stands_beside_the_measured_one(dry):
    shown, written, results = dry
    assert shown.strip() == written.strip()
    assert "A dry run on the CPU" in written
    assert "Nothing here was measured on a GPU" in written
    assert results["dry_run"] is True
    table = [line for line in written.splitlines() if line.startswith("| tiny ")]
    assert len(table) == len(results["rows"])
    assert all("by reference execution" in line for line in table if "TensorRT" in line or "ONNX" in line)
    _, written, results = dry
    assert len(results["training"]) == 3
    for row in results["training"]:
        assert row["measured"] == pytest.approx(row["predicted"], rel=0.05)
        assert row["note"] == ""
    assert "predicted, MiB" in written


def test_what_cannot_be_imported_is_named_and_the_rest_is_measured(tmp_path):
    blocked = ("pydantic", "transformers", "torchao", "pynvml")
    done = run("--dry-run", "--only", "MiniLM", "--training", "--out", tmp_path, blocked=blocked)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {row["way"] for row in results["rows"]} == {"torch eager", "torch.compile, traced only"}
    reasons = {(each["way"].partition(",")[0], each["precision"]): each["reason"] for each in results["left"]}
    assert reasons["TensorRT", "FP16"].startswith("the project's export cannot be imported")
    assert reasons["torch.compile", "INT8"].startswith("torchao cannot be imported")
    assert results["training"] == []
    assert results["training_absent"].startswith("training cannot be imported")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_or_pytorch_it_says_so_in_a_sentence(tmp_path):
    done = run("--out", tmp_path / "out")
    assert done.returncode == 3
    assert done.stderr.startswith("No NVIDIA GPU")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    done = run("--dry-run", blocked=("torch",))
    assert done.returncode == 3
    assert "PyTorch cannot be imported" in done.stderr
    assert "Traceback" not in done.stderr


class Echo:
    """A runner that answers with a multiple of its input, or fails."""

    def __init__(self, factor=1.0, fails_at=None):
        self.factor, self.fails_at, self.closed = factor, fails_at, False

    def run(self, inputs):
        if self.fails_at == len(inputs["image"]):
            raise RuntimeError("out of memory\nand more")
        return self.factor * inputs["image"].reshape(len(inputs["image"]), -1)

    def close(self):
        self.closed = True


def measure(runners, *, seconds=30.0, batches=(1, 2), device=None):
    from gpu_device import BenchmarkDevice
    from gpu_models import TINY_NETWORKS
    from gpu_rows import Effort, NetworkRun, Pace, Variant

    def opener(runner):
        if isinstance(runner, Exception):
            raise runner
        return runner

    variants = [
        Variant(f"way {number}", "FP32", lambda runner=runner: opener(runner), "FP32")
        for number, runner in enumerate(runners)
    ]
    effort = Effort(batches=batches, rounds=5, window=0.0)
    run = NetworkRun(
        TINY_NETWORKS[-1],
        variants,
        device or BenchmarkDevice(torch.device("cpu")),
        effort,
        Pace(time.monotonic() + seconds),
    )
    run.measure()
    return run


def test_a_way_that_fails_is_left_out_where_it_failed_and_the_others_go_on():
    runners = [Echo(), Echo(2.0), Echo(fails_at=2), RuntimeError("no such engine")]
    run = measure(runners)
    assert [(row.way, row.batch) for row in run.rows] == [
        ("way 0", 1), ("way 1", 1), ("way 2", 1), ("way 0", 2), ("way 1", 2)
    ]  # fmt: skip
    assert [(each.way, each.batch, each.reason) for each in run.left] == [
        ("way 3", None, "RuntimeError: no such engine"),
        ("way 2", 2, "RuntimeError: out of memory"),
    ]
    assert all(runner.closed for runner in runners[:3])
    errors = {row.way: row.error for row in run.rows}
    assert errors == pytest.approx({"way 0": 0.0, "way 1": 1.0, "way 2": 0.0})


def test_memory_energy_and_share_are_those_of_each_way():
    from gpu_device import BenchmarkDevice, find_peak

    held = [1000]

    class SimulatedDevice(BenchmarkDevice):
        """A device of which another 100 J are used whenever it is asked, and whose memory is a list."""

        def __init__(self):
            super().__init__(torch.device("cpu"))
            self.on_gpu, self.name, self.used = True, "NVIDIA H100 PCIe", 0.0

        def synchronize(self):
            pass

        def release(self):
            held[1:] = [size for size in held[1:] if size != 7]  # the caches of a way

        def bytes_in_use(self):
            return sum(held)

        def joules(self):
            self.used += 100
            return self.used

    class Holding(Echo):
        """A runner that keeps 50 bytes of each batch size that it sees, beside 7 that the device takes back."""

        def __init__(self):
            super().__init__()
            self.seen = set()

        def run(self, inputs):
            if len(inputs["image"]) not in self.seen:
                self.seen.add(len(inputs["image"]))
                held.extend([50, 7])
            return super().run(inputs)

    run = measure([Echo(), Holding()], device=SimulatedDevice())
    assert [(row.way, row.batch, row.memory) for row in run.rows] == [
        ("way 0", 1, 0), ("way 1", 1, 57), ("way 0", 2, 0), ("way 1", 2, 107)
    ]  # fmt: skip
    for row in run.rows:
        assert row.joules == 100 / row.batch
        assert row.share == pytest.approx(run.flops * row.batch / row.seconds / find_peak("NVIDIA H100 PCIe", "FP32"))


def test_what_has_no_reference_or_time_is_left_out_and_outputs_that_are_not_finite_show_as_such():
    run = measure([RuntimeError("no"), Echo()])
    assert run.rows == []
    assert {each.reason for each in run.left} == {"RuntimeError: no", "its reference did not run"}
    run = measure([Echo(), Echo()], seconds=-1)
    assert run.rows == []
    assert "no time left (--minutes)" in {each.reason for each in run.left}
    from gpu_results import format_row

    run = measure([Echo(), Echo(np.inf)], batches=(1,))
    assert run.rows[1].error is run.rows[1].cosine is None
    assert format_row(run.rows[1])[-2:] == ("not finite", "\u2013")


def test_the_models_have_the_shapes_that_they_are_named_for():
    from gpu_models import NETWORKS

    found = {network.name: network.count_flops() / 1e9 for network in NETWORKS}
    # Twice the published multiply-adds: ResNet-50 4.09 G, ViT-B/16 17.6 G, BERT-base 11.2 G for 128 tokens.
    assert found == pytest.approx({"MiniLM": 2.87, "BERT-base": 22.35, "ViT-B/16": 35.13, "ResNet-50": 8.18}, rel=0.01)


def test_peaks_agree_with_those_that_training_uses():
    from gpu_device import find_peak

    from train.callbacks.flops import datasheet

    names = (
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 PCIe",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A10",
        "NVIDIA L4",
        "Tesla T4",
    )
    for name in names:
        for precision in ("FP32", "FP16", "BF16"):
            assert find_peak(name, precision) == datasheet(name, precision)
    assert find_peak("NVIDIA H200", "INT8") == 1978.9e12
    assert find_peak("NVIDIA GeForce RTX 4090", "BF16") == 165.2e12
    assert find_peak("NVIDIA A100-SXM4-80GB", "FP8") is None
    assert find_peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "FP16") is None
    assert find_peak("NVIDIA GeForce GTX 1080", "FP16") is None


def test_no_requirement_of_the_environment_replaces_pytorch():
    from gpu_environment import KEPT, list_requirements, name_of

    found = list_requirements()
    names = {name_of(each) for requirements in found.values() for each in requirements}
    assert not names & {*KEPT, "laconic"}
    assert {"pydantic", "transformers", "torchao", "onnxruntime-gpu", "tensorrt-cu13", "pytest"} <= names


def test_the_environment_has_the_packages_of_its_python_and_the_checkout(tmp_path):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu_environment.py", tmp_path / "venv", "--offline"], capture_output=True
    )
    assert done.returncode == 0, done.stderr
    code = "import importlib.metadata, laconic; print(laconic.__file__, importlib.metadata.version('torch'))"
    shown = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path
    ).stdout.split()
    assert shown == [str(HOME / "laconic" / "__init__.py"), importlib.metadata.version("torch")]


def test_the_report_of_the_tests_is_read_and_those_that_do_not_end_have_not_succeeded(tmp_path):
    from gpu_tests import read_report

    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="one"/><testcase classname="a" name="two">'
        '<failure message="assert 1 == 2&#10;more"/></testcase><testcase classname="a" name="three">'
        '<skipped message="no TensorRT"/></testcase><testcase name="b"><error message="No module"/></testcase>'
        "</testsuite></testsuites>"
    )
    found = read_report(tmp_path / "tests.xml")
    assert found.passed == ["a.one"]
    assert found.failed == {"a.two": "assert 1 == 2", "b": "No module"}
    assert found.describe().splitlines()[0] == "1 passed, 2 failed, 1 skipped."
    assert "- 1 skipped: no TensorRT" in found.describe()
    assert not found.succeeded
    from gpu_tests import TestRun, run_gpu_tests

    found = run_gpu_tests(tmp_path, 0.01)
    assert "took longer" in found.problem
    assert not found.succeeded
    assert TestRun(passed=["a"], skipped={"b": "no TensorRT"}).succeeded
