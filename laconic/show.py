"""What the command line prints: tables for people."""

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from laconic.artifact import Artifact
from laconic.measured import ORIGINAL, Timing
from laconic.verdict import Comparison

OUT = Console(highlight=False)
ERRORS = Console(stderr=True, highlight=False)


def compressed(artifact: Artifact) -> None:
    """The table at the end of a run: original against artifact."""
    measured, verdict = artifact.measured, artifact.manifest.verdict
    table = Table("", "original", "artifact", "", title=f"{artifact.path.name}: {artifact.manifest.task}")
    for column in table.columns[1:]:
        column.justify = "right"
    before, after = measured.original_size, artifact.size
    table.add_row("size", megabytes(before), megabytes(after), f"{before / after:.1f} x smaller")
    for label, batch in (("latency, batch 1", 1), (f"latency, batch {measured.knee}", measured.knee)):
        pair = at_batch(measured.timings, batch)
        if pair:
            old, new = pair
            table.add_row(label, milliseconds(old.seconds), milliseconds(new.seconds), speedup(new))
    pair = at_batch(measured.timings, measured.knee)
    if pair:
        rates = [f"{time.rows_per_second:.0f} rows/s" for time in pair]
        table.add_row("throughput, one core", *rates, f"at batch {measured.knee}, length {pair[1].length}")
    for comparison in verdict.drift if verdict else ():
        add_drift(table, comparison)
    OUT.print(table)


def add_drift(table: Table, comparison: Comparison) -> None:
    """How faithful the answers are."""
    figures = comparison.figures
    low, high = comparison.intervals.get("fidelity", (figures["fidelity"], figures["fidelity"]))
    table.add_row("fidelity, mean", "1", f"{figures['fidelity']:.5f}", f"95 %: {low:.5f} to {high:.5f}")
    table.add_row("fidelity, worst", "1", f"{figures['fidelity_worst']:.5f}", f"of {comparison.samples} unseen samples")
    if "metric" in figures:
        low, high = comparison.intervals["metric_change"]
        change = f"{figures['metric_change']:+.4f} ({low:+.4f} to {high:+.4f})"
        table.add_row("metric against labels", f"{figures['metric_original']:.4f}", f"{figures['metric']:.4f}", change)


def inspected(artifact: Artifact) -> None:
    """What an artifact is."""
    manifest, measured = artifact.manifest, artifact.measured
    table = Table(show_header=False, title=artifact.name)
    table.add_row("task", manifest.task)
    for side, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
        for spec in specs:
            bounds = ", ".join(f"{axis} {low} to {high}" for axis, (low, high) in spec.bounds.items())
            table.add_row(side, f"{spec.name}: {spec.dtype} {spec.describe()}" + (f"  ({bounds})" if bounds else ""))
    table.add_row("engine", f"{manifest.placement}, {manifest.compute} where not quantized")
    counts = Counter(manifest.precision.values())
    table.add_row("layers", ", ".join(f"{count} {precision}" for precision, count in counts.most_common()) or "none")
    table.add_row("size", f"{megabytes(artifact.size)} (source {megabytes(measured.original_size)})")
    for record in manifest.history:
        config = ", ".join(f"{name} {value}" for name, value in record.config.items())
        table.add_row("history", f"{record.stage}: {config}")
    for name, version in manifest.versions.items():
        table.add_row("version", f"{name} {version}")
    table.add_row("licence of the source", manifest.licence or "not said")
    verdict = manifest.verdict
    table.add_row("verdict", "none" if verdict is None else "passed" if verdict.passed else "; ".join(verdict.failures))
    OUT.print(table)
    OUT.print(timing_table(measured.timings, f"on {measured.machine.processor}, {measured.machine.cores} cores"))


def timing_table(timings: Iterable[Timing], title: str) -> Table:
    """Latency, throughput and speed-up, with their spread."""
    table = Table("engine", "batch", "length", "threads", "ms", "rows/s", "x original", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for time in sorted(timings, key=lambda time: (time.batch, time.engine != ORIGINAL, time.engine)):
        table.add_row(
            time.engine,
            str(time.batch),
            str(time.length),
            str(time.threads),
            f"{1e3 * time.seconds:.2f}",
            f"{time.rows_per_second:.0f}",
            speedup(time),
        )
    return table


def at_batch(timings: Iterable[Timing], batch: int) -> tuple[Timing, Timing] | None:
    """The original's timing and the artifact's."""
    found = sorted((time for time in timings if time.batch == batch), key=lambda time: time.engine != ORIGINAL)
    return (found[0], found[1]) if len(found) == 2 else None


def speedup(time: Timing) -> str:
    """With its quartiles."""
    if time.engine == ORIGINAL:
        return "1"
    low, high = time.speedup_quartiles
    return f"{time.speedup:.2f} x ({low:.2f} to {high:.2f})"


def megabytes(size: int) -> str:
    """Bytes, for people."""
    return f"{size / 1e6:.1f} MB"


def milliseconds(seconds: float) -> str:
    """Seconds, for people."""
    return f"{1e3 * seconds:.2f} ms"
