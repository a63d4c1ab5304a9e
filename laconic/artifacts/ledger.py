"""What each stage gained and cost, from the history: the figures after it, beside those of the model as it came."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laconic.artifacts.gain import amount, count, nines
from laconic.artifacts.record import Record

JSON = "report.json"
"""The same beside a checkpoint, for programs."""

START = "as it came"
SIZES = ("parameters", "bytes", "multiply-adds")
"""What a stage makes smaller."""


@dataclass(frozen=True)
class Entry:
    """A stage, or the model as it came. figures: counted after it. left: the share that is left of each size, where it
    is known; 1 is as it came. seconds: that it took when it was done."""

    stage: str
    config: Mapping[str, Any]
    figures: Mapping[str, float]
    left: Mapping[str, float]
    seconds: float | None = None

    def plain(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "stage": self.stage,
            "config": dict(self.config),
            "figures": dict(self.figures),
            "left": dict(self.left),
            "seconds": self.seconds,
        }


def ledger(source: Mapping[str, Any], history: Sequence[Record], seconds: Mapping[str, float]) -> list[Entry]:
    """The model as it came, and each stage of the run; none where nothing was counted.

    source: as in the manifest, with its figures, and how many of the records it came with. seconds: by the key of the
    record.
    """
    start: dict[str, float] = source.get("figures", {})
    done = history[source.get("earlier", 0) :]
    if not start or not any(record.figures for record in done):
        return []
    return [Entry(START, {}, start, shares(start, start)), *entries(start, done, seconds)]


def entries(start: Mapping[str, float], done: Sequence[Record], seconds: Mapping[str, float]) -> Iterator[Entry]:
    """The stages."""
    for record in done:
        yield Entry(record.stage, record.config, record.figures, shares(start, record.figures), seconds.get(record.key))


def shares(start: Mapping[str, float], figures: Mapping[str, float]) -> dict[str, float]:
    """What is left of each size."""
    return {name: figures[name] / start[name] for name in SIZES if name in figures and start.get(name)}


def brief(config: Mapping[str, Any]) -> str:
    """A stage's settings on a line, without those that say nothing: what is off, empty, not given, or a group."""
    shown = {name: value.get("name") if isinstance(value, Mapping) else value for name, value in config.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if value not in (None, False, (), [], ""))


def cells(entry: Entry) -> dict[str, str]:
    """Its figures for people, by name; empty where one is not known."""
    figures, left = entry.figures, entry.left
    written = {
        "parameters": (count, "parameters"),
        "size": (amount, "bytes"),
        "multiply-adds": (count, "multiply-adds"),
        "fidelity": (nines, "fidelity"),
        "worst": (nines, "fidelity worst"),
    }
    found = {name: write(figures[key]) if key in figures else "" for name, (write, key) in written.items()}
    for name, key in (("parameters", "parameters"), ("size", "bytes"), ("multiply-adds", "multiply-adds")):
        if entry.stage != START and left.get(key, 1) != 1:
            found[name] += f" ({100 * left[key]:.0f} %)"
    return found
