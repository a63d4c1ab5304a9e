"""Where the time of an artifact goes in OpenVINO: the share of each kind of kernel, by its execution profile.

    python benchmarks/kernel_profile.py ARTIFACT [--batch 8] [--runs 40]

One thread; of each kernel the shortest of all runs counts, so that other work on the machine weighs little, and only
shares are told. Kernels of a kind have names that differ in numbers alone.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import openvino as ov
from judge import print_machine
from run import table

from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact
from laconic.runtimes.openvino import HINTS, core

LENGTH = 128
LEAST = 0.01
"""Kinds with a smaller share are told together."""


class Kernel(NamedTuple):
    """An executed node of the compiled model: its name in the graph, and OpenVINO's of its kernel."""

    node: str
    kind: str


def open_profiled(artifact: Artifact) -> ov.InferRequest:
    """The graph for OpenVINO of an artifact, in one thread, with the time of each kernel."""
    placement = next(each for each in artifact.manifest.placements if each.runtime == "openvino")
    properties = {
        "INFERENCE_PRECISION_HINT": HINTS[placement.compute],
        "INFERENCE_NUM_THREADS": "1",
        "PERF_COUNT": "YES",
    }
    return core().compile_model(artifact.path / placement.model, "CPU", properties).create_infer_request()


def profile(request: ov.InferRequest, inputs: Arrays, runs: int) -> dict[Kernel, float]:
    """The shortest time of each kernel, in microseconds."""
    times: dict[Kernel, float] = {}
    for _ in range(runs):
        request.infer(inputs)
        for each in request.profiling_info:
            kernel = Kernel(each.node_name, f"{each.node_type}, {each.exec_type}")
            times[kernel] = min(times.get(kernel, float("inf")), each.real_time.total_seconds() * 1e6)
    return {kernel: time for kernel, time in times.items() if time}


def describe(times: Mapping[Kernel, float]) -> list[list[str]]:
    """A row for each kind of kernel, that with the largest share first."""
    kinds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel, time in times.items():
        kinds[kernel.kind, re.sub(r"\d+", "N", kernel.node)].append(time)
    whole = sum(times.values())
    rows, rest = [], []
    for (kind, node), each in sorted(kinds.items(), key=lambda item: -sum(item[1])):
        if sum(each) < LEAST * whole:
            rest += each
        else:
            rows.append([f"`{node}`", kind, str(len(each)), f"{sum(each) / whole:.1%}"])
    return [*rows, ["all others", "", str(len(rest)), f"{sum(rest) / whole:.1%}"]]


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--runs", type=int, default=40)
    arguments = parser.parse_args()
    artifact = Artifact.load(arguments.artifact)
    print_machine()
    inputs = artifact.task().typical(arguments.batch, LENGTH)
    times = profile(open_profiled(artifact), inputs, arguments.runs)
    table(["nodes", "kernel", "number", "share of the time"], describe(times))


if __name__ == "__main__":
    main()
