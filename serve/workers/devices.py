"""The GPUs that workers are divided among."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable by which CUDA shows a process some of the GPUs, by number or by identifier."""
NODE = re.compile(r"nvidia(\d+)")
"""The name of a GPU's device file; `nvidiactl` and others beside it are not GPUs."""


def list_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """List the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    They are not asked for by CUDA itself, which would take memory on each of them for a process that runs nothing.
    """
    if VISIBLE in environment:
        return [each.strip() for each in environment[VISIBLE].split(",") if each.strip()]
    matches = (NODE.fullmatch(each.name) for each in devices.glob("nvidia*"))
    return [str(number) for number in sorted(int(each[1]) for each in matches if each)]


def assign_gpus(workers: int | None, gpus: list[str]) -> list[dict[str, str]]:
    """Make the environment of each worker: a GPU each, in turn. workers: how many; one for each GPU where None."""
    count = max(1, len(gpus)) if workers is None else workers
    return [{VISIBLE: gpus[number % len(gpus)]} if gpus else {} for number in range(count)]
