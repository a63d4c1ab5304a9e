"""The memory in use over a run: every allocation and release, and the bytes by category after each of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from train.offload.memory_accounting import CATEGORIES, Category, Side

SIDES: tuple[Side, ...] = ("device", "host")
DEFAULT_CATEGORIES: Mapping[str, Category] = {"forward": "activations"}
"""The category of allocations that nobody assigns, by the phase of the step; temporaries in any other phase."""


@dataclass
class Allocation:
    """A block of memory: its size now, in bytes, and what it is accounted to."""

    size: int
    side: Side
    category: Category


@dataclass(eq=False)
class AllocationLog:
    """Records allocations and releases in order.

    events: (index of the allocation, change in bytes, index of the position). positions: (phase, layer) of the step.
    """

    allocations: list[Allocation] = field(default_factory=list)
    events: list[tuple[int, int, int]] = field(default_factory=list)
    positions: list[tuple[str, str]] = field(default_factory=lambda: [("build", "")])
    phase: str = "build"

    def enter(self, phase: str, layer: str = "") -> None:
        """Let later events belong to this phase of the step and this layer of the model."""
        self.phase = phase
        self.positions.append((phase, layer))

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Let events in the body belong to this phase."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def allocate(self, size: int, side: Side, category: Category | None) -> int:
        """Record a new block of `size` bytes; returns its index."""
        self.allocations.append(Allocation(size, side, category or DEFAULT_CATEGORIES.get(self.phase, "temporaries")))
        index = len(self.allocations) - 1
        self.events.append((index, size, len(self.positions) - 1))
        return index

    def resize(self, index: int, size: int) -> None:
        """Record that a block grows or shrinks; a release is a resize to 0."""
        allocation = self.allocations[index]
        if size != allocation.size:
            self.events.append((index, size - allocation.size, len(self.positions) - 1))
            allocation.size = size

    def start(self) -> None:
        """Drop the events so far: the timeline starts with what is allocated now. Before a run the weights may have
        been on another side than during it."""
        self.events = [(index, block.size, 0) for index, block in enumerate(self.allocations) if block.size]

    def assign(self, index: int, category: Category, side: Side | None = None) -> None:
        """Account a block to a category, and to a side, for its whole lifetime."""
        allocation = self.allocations[index]
        allocation.category, allocation.side = category, side or allocation.side

    def build_timeline(self) -> "MemoryTimeline":
        """Build the timeline of the bytes in use over the recorded events."""
        table = np.array(self.events, np.int64).reshape(-1, 3)
        indices, changes, places = table.T
        accounts = [(side, category) for side in SIDES for category in CATEGORIES]
        numbers = {account: number for number, account in enumerate(accounts)}
        account = np.array([numbers[block.side, block.category] for block in self.allocations], np.int64)
        return MemoryTimeline(account[indices], changes, places, tuple(self.positions))


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """Bytes in use over the events of a run.

    accounts: [events] int64, side and category of each event: index into the product of SIDES and CATEGORIES.
    changes: [events] int64, bytes allocated or, below 0, released. places: [events] int64, index into `positions`.
    positions: (phase, layer) of the step.
    """

    accounts: NDArray[np.int64]
    changes: NDArray[np.int64]
    places: NDArray[np.int64]
    positions: tuple[tuple[str, str], ...]

    def series(self, side: Side) -> dict[Category, NDArray[np.int64]]:
        """Return the bytes in use after each event, [events], by category."""
        start = SIDES.index(side) * len(CATEGORIES)
        return {
            category: np.cumsum(np.where(self.accounts == start + index, self.changes, 0))
            for index, category in enumerate(CATEGORIES)
        }

    @cached_property
    def device(self) -> NDArray[np.int64]:
        """Bytes in use on the device after each event, [events]."""
        return np.cumsum(np.where(self.accounts < len(CATEGORIES), self.changes, 0))

    @cached_property
    def host(self) -> NDArray[np.int64]:
        """Bytes in use on the host after each event, [events]."""
        return np.cumsum(np.where(self.accounts >= len(CATEGORIES), self.changes, 0))

    def peak(self) -> int:
        """Return the peak memory of the device, in bytes."""
        return int(self.device.max(initial=0))

    def at_peak(self) -> dict[Category, int]:
        """Return the device's bytes by category at the peak."""
        return self.at(int(self.device.argmax())) if self.device.size else dict.fromkeys(CATEGORIES, 0)

    def at(self, event: int) -> dict[Category, int]:
        """Return the device's bytes by category after an event."""
        accounts = self.accounts[: event + 1]
        totals = np.bincount(accounts, self.changes[: event + 1], len(CATEGORIES))
        return {category: int(totals[index]) for index, category in enumerate(CATEGORIES)}

    def find_peaks(self, key: Callable[[tuple[str, str]], str | None]) -> dict[str, int]:
        """Find the event after which each part of the run has its peak on the device.

        key: from (phase, layer) to the name of the part; None leaves the position out.
        """
        names = [key(position) for position in self.positions]
        peaks: dict[str, int] = {}
        order = np.argsort(self.places, kind="stable")
        edges = np.flatnonzero(np.diff(self.places[order])) + 1
        for group in np.split(order, edges) if order.size else []:
            name = names[int(self.places[group[0]])]
            event = int(group[self.device[group].argmax()])
            if name is not None and (name not in peaks or self.device[event] > self.device[peaks[name]]):
                peaks[name] = event
        return peaks

    def list_spans(self) -> list[tuple[str, int, int]]:
        """List the phases in the order of the run, those that repeat one by one: name, first event, and the one after
        the last."""
        names = [phase for phase, _ in self.positions]
        starts = [0, *(index for index in range(1, len(names)) if names[index] != names[index - 1]), len(names)]
        edges = np.searchsorted(self.places, starts)
        return [(names[begin], int(a), int(b)) for begin, a, b in zip(starts, edges, edges[1:], strict=False)]

    def phases(self) -> dict[str, dict[Category, int]]:
        """Return the device's bytes by category at the peak of each phase."""
        return {phase: self.at(event) for phase, event in self.find_peaks(lambda position: position[0]).items()}
