"""Every tensor's birth and death in a run: how much memory it takes, when, and for what."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from laconic.offload.memory_accounting import CATEGORIES, Category, Side

SIDES: tuple[Side, ...] = ("device", "host")
BY_PHASE: Mapping[str, Category] = {"forward": "activations"}
"""What bytes are for that nobody claims, by the phase of their birth; temporaries in any other."""


@dataclass
class Entry:
    """A block of memory: its bytes now, and the account that they stand in."""

    size: int
    side: Side
    category: Category


@dataclass(eq=False)
class Ledger:
    """The account book. An event is (entry, change in bytes, position)."""

    entries: list[Entry] = field(default_factory=list)
    events: list[tuple[int, int, int]] = field(default_factory=list)
    positions: list[tuple[str, str]] = field(default_factory=lambda: [("build", "")])
    phase: str = "build"

    def move(self, phase: str, layer: str = "") -> None:
        """From here on, events belong to this phase of the step and this layer of the model."""
        self.phase = phase
        self.positions.append((phase, layer))

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Events in the body belong to this phase."""
        before = self.phase
        self.move(phase)
        try:
            yield
        finally:
            self.move(before)

    def born(self, size: int, side: Side, category: Category | None) -> int:
        """A block of memory comes into being; gives its number."""
        self.entries.append(Entry(size, side, category or BY_PHASE.get(self.phase, "temporaries")))
        number = len(self.entries) - 1
        self.events.append((number, size, len(self.positions) - 1))
        return number

    def resized(self, number: int, size: int) -> None:
        """A block of memory grows or shrinks; to nothing when it dies."""
        entry = self.entries[number]
        if size != entry.size:
            self.events.append((number, size - entry.size, len(self.positions) - 1))
            entry.size = size

    def begin(self) -> None:
        """Forget how memory came to be in use: the course begins with what is alive now. Before a run the weights may
        have been where they do not stay."""
        self.events = [(number, entry.size, 0) for number, entry in enumerate(self.entries) if entry.size]

    def claim(self, number: int, category: Category, side: Side | None = None) -> None:
        """Say what a block has been for, and where it has been, from its birth."""
        entry = self.entries[number]
        entry.category, entry.side = category, side or entry.side

    def close(self) -> "Course":
        """The course of memory over the run."""
        table = np.array(self.events, np.int64).reshape(-1, 3)
        numbers, changes, places = table.T
        accounts = [(side, category) for side in SIDES for category in CATEGORIES]
        kinds = {account: index for index, account in enumerate(accounts)}
        kind = np.array([kinds[entry.side, entry.category] for entry in self.entries], np.int64)
        return Course(numbers=kind[numbers], changes=changes, places=places, positions=tuple(self.positions))


@dataclass(frozen=True, eq=False)
class Course:
    """Bytes over the events of a run.

    numbers, changes, places: [events] int64, the account, the bytes that came or went, and the index into `positions`.
    """

    numbers: NDArray[np.int64]
    changes: NDArray[np.int64]
    places: NDArray[np.int64]
    positions: tuple[tuple[str, str], ...]

    def series(self, side: Side) -> dict[Category, NDArray[np.int64]]:
        """Bytes in use after each event, [events], by category."""
        start = SIDES.index(side) * len(CATEGORIES)
        return {
            category: np.cumsum(np.where(self.numbers == start + index, self.changes, 0))
            for index, category in enumerate(CATEGORIES)
        }

    @cached_property
    def device(self) -> NDArray[np.int64]:
        """Bytes in use on the device after each event, [events]."""
        return np.cumsum(np.where(self.numbers < len(CATEGORIES), self.changes, 0))

    @cached_property
    def host(self) -> NDArray[np.int64]:
        """Bytes in use on the host after each event, [events]."""
        return np.cumsum(np.where(self.numbers >= len(CATEGORIES), self.changes, 0))

    def peak(self) -> int:
        """The most bytes that the device holds at once."""
        return int(self.device.max(initial=0))

    def at_peak(self) -> dict[Category, int]:
        """What the bytes are for at that moment."""
        return self.at(int(self.device.argmax())) if self.device.size else dict.fromkeys(CATEGORIES, 0)

    def at(self, moment: int) -> dict[Category, int]:
        """What the device's bytes are for after an event."""
        seen = self.numbers[: moment + 1]
        totals = np.bincount(seen, self.changes[: moment + 1], len(CATEGORIES))
        return {category: int(totals[index]) for index, category in enumerate(CATEGORIES)}

    def moments(self, key: Callable[[tuple[str, str]], str | None]) -> dict[str, int]:
        """The event after which each part of the run holds the most on the device.

        key: from (phase, layer) to the name of the part; None leaves it out.
        """
        names = [key(position) for position in self.positions]
        found: dict[str, int] = {}
        order = np.argsort(self.places, kind="stable")
        edges = np.flatnonzero(np.diff(self.places[order])) + 1
        for group in np.split(order, edges) if order.size else []:
            name = names[int(self.places[group[0]])]
            moment = int(group[self.device[group].argmax()])
            if name is not None and (name not in found or self.device[moment] > self.device[found[name]]):
                found[name] = moment
        return found

    def phases(self) -> dict[str, dict[Category, int]]:
        """What the device's bytes are for at the peak of each phase."""
        return {phase: self.at(moment) for phase, moment in self.moments(lambda position: position[0]).items()}
