"""Gains: the table that compares the artifact with the original in size, speed, fidelity and metric."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from laconic.artifacts.artifact import Manifest
from laconic.artifacts.verdict import Comparison
from laconic.timing.measurements import ORIGINAL, Measured, Timing


@dataclass(frozen=True)
class GainRow:
    """One row of the table, formatted. change: the artifact's against the original's, or what it was measured on."""

    figure: str
    original: str
    artifact: str
    change: str


def list_gains(manifest: Manifest, measured: Measured, metric: str) -> Iterator[GainRow]:
    """Rows for size, latency, throughput, fidelity and metric. metric: the name of the task's metric against labels."""
    before, after = measured.original_size, served_size(manifest)
    yield GainRow("size", amount(before), amount(after), f"{before / after:.1f} x smaller")
    for batch in dict.fromkeys((1, measured.knee)):
        pair = find_timings(measured.timings, batch)
        if pair:
            old, new = (milliseconds(time.seconds) for time in pair)
            yield GainRow(f"latency, batch {batch}", old, new, format_speedup(pair[1]))
    pair = find_timings(measured.timings, measured.knee)
    if pair:
        old, new = (f"{time.rows_per_second:.0f} rows/s" for time in pair)
        threads = "1 thread" if pair[1].threads == 1 else f"{pair[1].threads} threads"
        length = f", length {pair[1].length}" if pair[1].length else ""
        yield GainRow("throughput", old, new, f"batch {measured.knee}{length}, {threads}")
    for comparison in manifest.verdict.drift if manifest.verdict else ():
        yield from list_fidelity(comparison, metric, "unseen" if manifest.data else "made-up")


def list_fidelity(comparison: Comparison, metric: str, kind: str) -> Iterator[GainRow]:
    """Rows for fidelity and metric, with 95 % intervals. kind: of the samples, "unseen" or "made-up"."""
    figures, intervals = comparison.figures, comparison.intervals
    if "fidelity" in figures:
        low, high = intervals.get("fidelity", (figures["fidelity"], figures["fidelity"]))
        yield GainRow("fidelity, mean", "1", nines(figures["fidelity"]), f"95 %: {nines(low)} to {nines(high)}")
    if "fidelity_worst" in figures:
        worst = nines(figures["fidelity_worst"])
        yield GainRow("fidelity, worst", "1", worst, f"of {comparison.samples} {kind} samples")
    if "metric" in figures:
        low, high = intervals["metric_change"]
        change = f"{figures['metric_change']:+.4f} ({low:+.4f} to {high:+.4f})"
        yield GainRow(metric, f"{figures['metric_original']:.4f}", f"{figures['metric']:.4f}", change)


def served_size(manifest: Manifest) -> int:
    """Bytes of the files that are needed to serve the artifact."""
    return sum(file.size for file in manifest.files.values())


def find_timings(timings: Iterable[Timing], batch: int) -> tuple[Timing, Timing] | None:
    """The original's and the artifact's timing at a batch size; None unless there are exactly these two."""
    found = sorted((time for time in timings if time.batch == batch), key=lambda time: time.engine != ORIGINAL)
    return (found[0], found[1]) if len(found) == 2 else None


def format_speedup(time: Timing) -> str:
    """Format a speed-up with its quartiles; "1" for the baseline."""
    low, high = time.speedup_quartiles
    if low == high == 1:
        return "1"
    return f"{time.speedup:.2f} x ({low:.2f} to {high:.2f})"


def nines(fidelity: float) -> str:
    """A fidelity in five digits; in more where it would look like 1 and is not."""
    return f"{fidelity:.5f}" if fidelity < 0.999995 or fidelity == 1 else f"{fidelity:.6f}"


def amount(size: float) -> str:
    """Bytes, for people."""
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.95 * bytes_:
            return f"{size / bytes_:.1f} {unit}"
    return f"{size:.0f} B"


def count(number: float) -> str:
    """Parameters or operations, for people."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.95 * size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def milliseconds(seconds: float) -> str:
    """Seconds, for people."""
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


def duration(seconds: float) -> str:
    """Seconds, for people."""
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
