"""Where the time of an artifact goes: the share of each kind of kernel, by the profile of OpenVINO or ONNX Runtime.

    python benchmarks/kernel_profile.py ARTIFACT [--engine onnxruntime] [--batch 8] [--runs 40]

One thread; of each kernel the shortest of all runs counts, so that other work on the machine weighs little, and only
shares are told. Kernels of a kind have names that differ in numbers alone. Of a language model that writes, runs are
steps that write one token each, behind a prompt of 64.
"""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime as ort
import openvino as ov
from results import Results, make_parser

from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact
from laconic.runtimes.onnxruntime import DISABLED, IN_FLOAT
from laconic.runtimes.openvino import core, make_properties
from laconic.runtimes.runtime import Compute
from laconic.runtimes.stateful_graph import make_stateful

LENGTH = 128
PROMPT = 64
LEAST = 0.01
"""Kinds with a smaller share are told together."""


class Kernel(NamedTuple):
    """An executed node: its name in the graph that the engine made, and the engine's name of its kernel."""

    node: str
    kind: str


def profile_openvino(model: Path, compute: Compute, inputs: Arrays, runs: int) -> dict[Kernel, float]:
    """The shortest time of each kernel in one thread, in microseconds."""
    return take_shortest(open_request(model, compute), [inputs] * runs)


def profile_steps(model: Path, compute: Compute, context: int, runs: int) -> dict[Kernel, float]:
    """The shortest time of each kernel of a step that writes one token, in one thread, in microseconds. context: the
    most tokens that the model takes."""
    request = open_request(make_stateful(model, context).graph, compute)
    tokens = np.arange(PROMPT + runs)[None]
    cuts = [(0, PROMPT), *((start, start + 1) for start in range(PROMPT, PROMPT + runs))]
    inputs: list[Arrays] = [
        {
            "input_ids": tokens[:, start:stop],
            "position_ids": tokens[:, start:stop],
            "attention_mask": np.ones((1, stop), np.int64),
            "beam_idx": np.zeros(1, np.int32),
        }
        for start, stop in cuts
    ]
    request.infer(inputs[0])
    return take_shortest(request, inputs[1:])


def open_request(model: Path | ov.Model, compute: Compute) -> ov.InferRequest:
    """Open a model so that it is profiled."""
    properties = make_properties(1, compute) | {"PERF_COUNT": "YES"}
    return core().compile_model(model, "CPU", properties).create_infer_request()


def take_shortest(request: ov.InferRequest, inputs: Iterable[Arrays]) -> dict[Kernel, float]:
    """Compute with inputs in turn. Return the shortest time of each kernel, in microseconds."""
    times: dict[Kernel, float] = {}
    for each in inputs:
        request.infer(each)
        for node in request.profiling_info:
            kernel = Kernel(node.node_name, f"{node.node_type}, {node.exec_type}")
            times[kernel] = min(times.get(kernel, float("inf")), node.real_time.total_seconds() * 1e6)
    return {kernel: time for kernel, time in times.items() if time}


def profile_onnxruntime(model: Path, compute: Compute, inputs: Arrays, runs: int) -> dict[Kernel, float]:
    """The shortest time of each kernel in one thread, in microseconds."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_profiling = True
    for key, value in (DISABLED, IN_FLOAT):
        options.add_session_config_entry(key, value)
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = f"{folder}/profile"
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        for _ in range(runs):
            session.run(None, inputs)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    times: dict[Kernel, float] = {}
    for event in events:
        node, ran, _ = event["name"].partition("_kernel_time")
        if ran:
            kernel = Kernel(node, event["args"]["op_name"])
            times[kernel] = min(times.get(kernel, float("inf")), event["dur"])
    return times


PROFILES: dict[str, Callable[[Path, Compute, Arrays, int], dict[Kernel, float]]] = {
    "openvino": profile_openvino,
    "onnxruntime": profile_onnxruntime,
}


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
    parser = make_parser(__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument(
        "--engine", choices=list(PROFILES), help="one that the artifact is placed for; by default its first"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--runs", type=int, default=40)
    arguments = parser.parse_args()
    artifact = Artifact.load(arguments.artifact)
    engine = arguments.engine or artifact.manifest.placement
    placement = next((each for each in artifact.manifest.placements if each.runtime == engine), None)
    if placement is None or engine not in PROFILES:
        found = ", ".join(each.runtime for each in artifact.manifest.placements)
        parser.error(f"the artifact is placed for {found}, of which only {' and '.join(PROFILES)} are profiled")
    results = Results(publish=arguments.publish)
    task, model = artifact.task(), artifact.path / placement.model
    if artifact.manifest.task == "text-generation":
        if engine != "openvino":
            parser.error("of language models that write, steps are profiled in openvino alone")
        times = profile_steps(model, placement.compute, int(task.max_tokens), arguments.runs)  # type: ignore[attr-defined]
    else:
        times = PROFILES[engine](model, placement.compute, task.typical(arguments.batch, LENGTH), arguments.runs)
    results.table("kernels", ["nodes", "kernel", "number", "share of the time"], describe(times))


if __name__ == "__main__":
    main()
