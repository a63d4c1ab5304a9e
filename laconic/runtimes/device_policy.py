"""How much device memory to hold, and which runs to replay as CUDA graphs; decided without a GPU."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Replay = TypeVar("Replay")


def grow(needed: int, held: int, most: int) -> int:
    """Return the bytes to hold in a buffer that needs `needed` and has `held`; equal to `held` if it is large enough.

    Sizes are powers of two, up to the `most` that the engine can need, so that growing requests allocate rarely: each
    allocation waits for the GPU, and makes the graphs that hold the old address useless.
    """
    if needed <= held:
        return held
    return max(needed, min(1 << max(needed - 1, 1).bit_length(), most))


class ReplayCache(Generic[Replay]):
    """Replays by the shapes of their inputs; the least recently used leaves first.

    capacity: replays that are kept. after: runs of the same shapes after which one is captured. Shapes that are rare
    are not worth a capture.
    """

    def __init__(self, capacity: int = 4, after: int = 3) -> None:
        self.capacity = capacity
        self.after = after
        self._replays: OrderedDict[Hashable, Replay] = OrderedDict()
        self._runs: OrderedDict[Hashable, int] = OrderedDict()

    def find(self, key: Hashable) -> Replay | None:
        """Return the replay for these shapes; None if there is none."""
        if key not in self._replays:
            return None
        self._replays.move_to_end(key)
        return self._replays[key]

    def count(self, key: Hashable) -> bool:
        """Count a run of these shapes. Returns whether it is time to capture a replay."""
        runs = self._runs.pop(key, 0) + 1
        self._runs[key] = runs
        if len(self._runs) > 16 * self.capacity:
            self._runs.popitem(last=False)
        return runs >= self.after

    def put(self, key: Hashable, replay: Replay) -> list[Replay]:
        """Keep a replay. Returns those that must be released for it; their shapes are counted from the start again, so
        that shapes beyond the capacity are not captured at every run."""
        released = [self._replays.pop(key)] if key in self._replays else []
        self._replays[key] = replay
        while len(self._replays) > self.capacity:
            displaced, old = self._replays.popitem(last=False)
            self._runs.pop(displaced, None)
            released.append(old)
        return released

    def clear(self) -> list[Replay]:
        """Forget everything. Returns the replays, which must be released."""
        released = list(self._replays.values())
        self._replays.clear()
        self._runs.clear()
        return released
