"""Stage ledger: figures of the model after each stage of the history, beside those of the source model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from laconic.artifacts.record import Record
from laconic.units import format_bytes, format_count, format_fidelity

JSON = "report.json"
"""The file beside a checkpoint that holds the ledger, for programs."""

START = "source"
DIVERGENCE = "divergence"
"""The figure of models that write: the mean divergence of the next token's distributions from the original's, in
nats."""
SIZES = ("parameters", "bytes", "multiply-adds")
"""Figures that a stage reduces."""


@dataclass(frozen=True)
class StageEntry:
    """A row of the ledger: a stage, or the source model.

    figures: measured after the stage. left: the remaining share of each size where it is known, relative to the source
    model. seconds: the time that the stage took when it was run.
    """

    stage: str
    config: Mapping[str, Any]
    figures: Mapping[str, float]
    left: Mapping[str, float]
    seconds: float | None = None

    def plain(self) -> dict[str, Any]:
        """Return the entry, JSON-ready."""
        return asdict(self)


def make_ledger(source: Mapping[str, Any], history: Sequence[Record], seconds: Mapping[str, float]) -> list[StageEntry]:
    """Make the entries of the source model and of each stage of the run; empty where no figures were recorded.

    source: as in the manifest, with its figures and the number of records that it came with. seconds: by the key of the
    record.
    """
    start: dict[str, float] = source.get("figures", {})
    done = history[source.get("earlier", 0) :]
    if not start or not any(record.figures for record in done):
        return []
    entries = [StageEntry(START, {}, start, remaining_shares(start, start))]
    for record in done:
        left = remaining_shares(start, record.figures)
        entries.append(StageEntry(record.stage, record.config, record.figures, left, seconds.get(record.key)))
    return entries


def remaining_shares(start: Mapping[str, float], figures: Mapping[str, float]) -> dict[str, float]:
    """Return the remaining share of each size."""
    return {name: figures[name] / start[name] for name in SIZES if name in figures and start.get(name)}


def format_config(config: Mapping[str, Any]) -> str:
    """Format a stage's settings on one line, without those that are off or empty."""
    shown = {name: value.get("name") if isinstance(value, Mapping) else value for name, value in config.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if value not in (None, False, (), [], ""))


def format_divergence(nats: float) -> str:
    """Format a divergence with three significant digits."""
    return f"{nats:.3g}"


def format_entry(entry: StageEntry) -> dict[str, str]:
    """Format an entry's figures, by column; empty where one is not known."""
    figures, left = entry.figures, entry.left
    columns: dict[str, tuple[Callable[[float], str], str]] = {
        "parameters": (format_count, "parameters"),
        "size": (format_bytes, "bytes"),
        "multiply-adds": (format_count, "multiply-adds"),
        "fidelity": (format_fidelity, "fidelity"),
        "worst": (format_fidelity, "fidelity worst"),
        "divergence": (format_divergence, DIVERGENCE),
    }
    cells = {name: write(figures[key]) if key in figures else "" for name, (write, key) in columns.items()}
    for name, key in (("parameters", "parameters"), ("size", "bytes"), ("multiply-adds", "multiply-adds")):
        if entry.stage != START and left.get(key, 1) != 1:
            cells[name] += f" ({100 * left[key]:.0f} %)"
    return cells
