"""A clock for work on a device that other processes on the machine do not disturb."""

import time
from collections.abc import Callable

import torch


def make_clock(device: torch.device) -> Callable[[], float]:
    """Make a clock in seconds that waits for the device's work: the thread's processor time on a CPU."""
    if device.type != "cuda":
        return time.thread_time

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
