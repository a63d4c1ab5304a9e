"""The most bytes that torch's allocator gives out on the processor, of the device's tensors and of the host's apart.

The bytes are the allocator's own, from a profile's trace: no tensor is looked at, and nothing of the planner's tracking
is used. Only the code under test can tell which side a tensor is on, so each stretch in which it says so is marked in
the trace, and an allocation belongs to the side of the stretch that it lies in.
"""

import gc
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from train.offload import memory_accounting
from train.offload.memory_accounting import Account
from train.step.objective import Batch
from train.step.train_state import TrainState
from train.step.train_step import train_step

MARK = "measured steps"
SIDE = "side: "


class AllocatedPeaks(NamedTuple):
    """The most bytes that were given out at once: on the device, on the host, and on both together."""

    device: int
    host: int
    both: int


def measure_allocated_peaks(
    prepare: Callable[[], tuple[TrainState, Batch]], steps: int, clip: float | None
) -> AllocatedPeaks:
    """The peaks within some training steps.

    Everything is built and freed within the profile: what was allocated before it would not be counted.
    """
    with mark_sides(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        state, batch = prepare()
        gc.collect()
        with record_function(MARK):
            for _ in range(steps):
                train_step(state, batch, max_grad_norm=clip)
        state.finish()
        del state, batch
        gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return find_peaks(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


@contextmanager
def mark_sides() -> Iterator[None]:
    """Mark each stretch of the body whose allocations are accounted to a side, in the trace of a profile."""
    plain = memory_accounting._account

    @contextmanager
    def marked(account: Account) -> Iterator[None]:
        with plain(account), record_function(SIDE + account.side):
            yield

    memory_accounting._account = marked
    try:
        yield
    finally:
        memory_accounting._account = plain


def find_peaks(events: list[dict[str, Any]]) -> AllocatedPeaks:
    """The peaks within the marked steps of a trace."""
    (steps,) = (event for event in events if event.get("name") == MARK and "dur" in event)
    stretches = [event for event in events if event.get("name", "").startswith(SIDE) and "dur" in event]
    memory = [event for event in events if event.get("name") == "[memory]"]
    open_stretches: list[tuple[float, str]] = []
    side_of: dict[int, str] = {}
    now: Counter[str] = Counter()
    peaks: Counter[str] = Counter()
    for event in sorted([*stretches, *memory], key=lambda event: event["ts"]):
        while open_stretches and open_stretches[-1][0] < event["ts"]:
            open_stretches.pop()
        if "dur" in event:
            open_stretches.append((event["ts"] + event["dur"], event["name"].removeprefix(SIDE)))
            continue
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            side_of[address] = open_stretches[-1][1] if open_stretches else "device"
        elif address not in side_of:
            continue  # allocated before the profile
        now[side_of[address]] += size
        now["both"] += size
        if steps["ts"] <= event["ts"] <= steps["ts"] + steps["dur"]:
            peaks |= now
    return AllocatedPeaks(peaks["device"], peaks["host"], peaks["both"])
