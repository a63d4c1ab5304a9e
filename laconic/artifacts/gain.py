"""What was gained and what it cost: the original beside the artifact, a row for each figure that matters."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from laconic.artifacts.artifact import Manifest
from laconic.artifacts.verdict import Comparison
from laconic.timing.measurements import ORIGINAL, Measurements, Timing


@dataclass(frozen=True)
class Gain:
    """One figure, written for people. change: the artifact's against the original's, or what it was found on."""

    figure: str
    original: str
    artifact: str
    change: str


def gains(manifest: Manifest, measured: Measurements, metric: str) -> Iterator[Gain]:
    """Size, speed, fidelity and metric. metric: what the task's figure against labels is called."""
    before, after = measured.original_size, shipped(manifest)
    yield Gain("size", amount(before), amount(after), f"{before / after:.1f} x smaller")
    for batch in dict.fromkeys((1, measured.knee)):
        pair = at_batch(measured.timings, batch)
        if pair:
            old, new = (milliseconds(time.seconds) for time in pair)
            yield Gain(f"latency, batch {batch}", old, new, speedup(pair[1]))
    pair = at_batch(measured.timings, measured.knee)
    if pair:
        old, new = (f"{time.rows_per_second:.0f} rows/s" for time in pair)
        threads = "1 thread" if pair[1].threads == 1 else f"{pair[1].threads} threads"
        length = f", length {pair[1].length}" if pair[1].length else ""
        yield Gain("throughput", old, new, f"batch {measured.knee}{length}, {threads}")
    for comparison in manifest.verdict.drift if manifest.verdict else ():
        yield from faithfulness(comparison, metric, "unseen" if manifest.data else "made-up")


def faithfulness(comparison: Comparison, metric: str, kind: str) -> Iterator[Gain]:
    """How faithful the answers are, with 95 % intervals. kind: of the samples."""
    figures, intervals = comparison.figures, comparison.intervals
    if "fidelity" in figures:
        low, high = intervals.get("fidelity", (figures["fidelity"], figures["fidelity"]))
        yield Gain("fidelity, mean", "1", nines(figures["fidelity"]), f"95 %: {nines(low)} to {nines(high)}")
    if "fidelity_worst" in figures:
        worst = nines(figures["fidelity_worst"])
        yield Gain("fidelity, worst", "1", worst, f"of {comparison.samples} {kind} samples")
    if "metric" in figures:
        low, high = intervals["metric_change"]
        change = f"{figures['metric_change']:+.4f} ({low:+.4f} to {high:+.4f})"
        yield Gain(metric, f"{figures['metric_original']:.4f}", f"{figures['metric']:.4f}", change)


def shipped(manifest: Manifest) -> int:
    """Bytes of the files that it takes to serve the artifact."""
    return sum(file.size for file in manifest.files.values())


def at_batch(timings: Iterable[Timing], batch: int) -> tuple[Timing, Timing] | None:
    """The original's timing and the artifact's; None where there are not just these two."""
    found = sorted((time for time in timings if time.batch == batch), key=lambda time: time.engine != ORIGINAL)
    return (found[0], found[1]) if len(found) == 2 else None


def speedup(time: Timing) -> str:
    """With its quartiles; bare for what the others are compared with."""
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
