"""Gains: the table that compares the artifact with the original in size, speed, fidelity and metric."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from laconic.artifacts.manifest import Manifest
from laconic.artifacts.verdict import Comparison
from laconic.timing.measurements import ORIGINAL, DynamicBaseline, Measurements, Timing, WritingSpeed, find_pair
from laconic.units import format_bytes, format_fidelity, format_seconds


@dataclass(frozen=True)
class GainRow:
    """One row of the table, formatted. change: the artifact's against the original's, or what it was measured on."""

    figure: str
    original: str
    artifact: str
    change: str


def list_gains(manifest: Manifest, measured: Measurements, metric: str) -> Iterator[GainRow]:
    """List rows for size, latency, throughput, fidelity and metric, and one for another form of the same file where it
    was compared. metric: the name of the task's metric against labels."""
    before, after = measured.original_size, manifest.served_size
    yield GainRow("size", format_bytes(before), format_bytes(after), compare_sizes(before, after))
    for batch in dict.fromkeys((1, measured.knee)):
        pair = find_timings(measured.timings, batch)
        if pair:
            old, new = (format_seconds(time.seconds) for time in pair)
            yield GainRow(f"latency, batch {batch}", old, new, format_speedup(pair[1]))
    pair = find_timings(measured.timings, measured.knee)
    if pair:
        old, new = (f"{time.rows_per_second:.0f} rows/s" for time in pair)
        threads = "1 thread" if pair[1].threads == 1 else f"{pair[1].threads} threads"
        length = f", length {pair[1].length}" if pair[1].length else ""
        yield GainRow("throughput", old, new, f"batch {measured.knee}{length}, {threads}")
    writing = find_pair(measured.writing)
    if writing:
        yield from list_writing(*writing)
    drift = manifest.verdict.drift if manifest.verdict else ()
    for comparison in drift[:1]:
        yield from list_fidelity(comparison, metric, "unseen" if manifest.data else "made-up")
    for comparison in drift[1:]:
        yield format_kind(comparison)
    if measured.dynamic:
        yield format_dynamic(measured.dynamic)


def list_writing(original: WritingSpeed, artifact: WritingSpeed) -> Iterator[GainRow]:
    """List rows for the time to the first token of a lone answer, and for the tokens behind it."""
    old, new = original.first_token, artifact.first_token
    change = f"{old / new:.2f} x, prompt of {artifact.prompt} tokens"
    yield GainRow("time to first token", format_seconds(old), format_seconds(new), change)
    was, now = original.tokens_per_second, artifact.tokens_per_second
    yield GainRow("tokens behind it", f"{was:.1f} tokens/s", f"{now:.1f} tokens/s", f"{now / was:.2f} x")


def list_fidelity(comparison: Comparison, metric: str, kind: str) -> Iterator[GainRow]:
    """List rows for fidelity and metric, with 95 % intervals. kind: of the samples, "unseen" or "made-up"."""
    figures, intervals = comparison.figures, comparison.intervals
    if "fidelity" in figures:
        low, high = intervals.get("fidelity", (figures["fidelity"], figures["fidelity"]))
        interval = f"95 %: {format_fidelity(low)} to {format_fidelity(high)}"
        yield GainRow("fidelity, mean", "1", format_fidelity(figures["fidelity"]), interval)
    if "fidelity_worst" in figures:
        worst = format_fidelity(figures["fidelity_worst"])
        yield GainRow("fidelity, worst", "1", worst, f"of {comparison.samples} {kind} samples")
    if "metric_change" in figures and "metric_change" in intervals:
        low, high = intervals["metric_change"]
        before, after = (figures.get(name, math.nan) for name in ("metric_original", "metric"))
        state = comparison.judge("metric_change") if "metric_change" in comparison.required else "passed"
        doubt = "" if state == "passed" else f", {state}"
        change = f"{figures['metric_change']:+.4f} ({low:+.4f} to {high:+.4f}){doubt}"
        yield GainRow(metric, f"{before:.4f}", f"{after:.4f}", change)
    if "perplexity_ratio" in figures and "perplexity_ratio" in intervals:
        low, high = intervals["perplexity_ratio"]
        before, after = (figures.get(name, math.nan) for name in ("perplexity_original", "perplexity"))
        change = f"x {figures['perplexity_ratio']:.4f} ({low:.4f} to {high:.4f})"
        yield GainRow("perplexity", f"{before:.3f}", f"{after:.3f}", change)


KIND_FIGURES = {"fidelity_p5": "5th percentile", "fidelity_worst": "worst"}


def format_kind(comparison: Comparison) -> GainRow:
    """Format the row of one kind of samples."""
    figures = comparison.figures
    parts = [f"{label} {format_fidelity(figures[key])}" for key, label in KIND_FIGURES.items() if key in figures]
    return GainRow(
        figure=f"fidelity, {comparison.subject.removeprefix('artifact ')}",
        original="1",
        artifact=format_fidelity(figures.get("fidelity", math.nan)),
        change=f"{', '.join(parts)} of {comparison.samples}",
    )


def format_dynamic(baseline: DynamicBaseline) -> GainRow:
    """Format the row of ONNX Runtime's dynamic quantization."""
    if baseline.unavailable:
        return GainRow("ONNX Runtime dynamic INT8", "", "-", "not available")
    change = f"fidelity {format_fidelity(baseline.fidelity)}, {baseline.speed:.2f} x as fast"
    return GainRow("ONNX Runtime dynamic INT8", "", format_bytes(baseline.size), change)


def find_timings(timings: Iterable[Timing], batch: int) -> tuple[Timing, Timing] | None:
    """Find the original's and the artifact's timing at a batch size; None unless there are exactly these two."""
    pair = sorted((time for time in timings if time.batch == batch), key=lambda time: time.engine != ORIGINAL)
    return (pair[0], pair[1]) if len(pair) == 2 else None


def format_speedup(time: Timing) -> str:
    """Format a speed-up with its quartiles; "1" for the baseline."""
    low, high = time.speedup_quartiles
    if low == high == 1:
        return "1"
    return f"{time.speedup:.2f} x ({low:.2f} to {high:.2f})"


def compare_sizes(before: float, after: float) -> str:
    """Say how many times smaller or larger a size in bytes became."""
    ratio = max(before, after) / min(before, after)
    return "as large" if f"{ratio:.1f}" == "1.0" else f"{ratio:.1f} x {'smaller' if after <= before else 'larger'}"
