"""Console tables of the commands."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from laconic import registry
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.compare import make_rows
from laconic.artifacts.gain import format_speedup, list_gains
from laconic.artifacts.inspection import Check
from laconic.artifacts.ledger import DIVERGENCE, StageEntry, format_config, format_entry, make_ledger
from laconic.artifacts.manifest import REPORT
from laconic.artifacts.verdict import Comparison, Verdict
from laconic.commands.console import OUT, make_table
from laconic.commands.doctor import Finding
from laconic.hardware import this_machine
from laconic.loadtest.traffic import LoadPoint
from laconic.runtimes.product import KINDS, describe_shares
from laconic.timing.measurements import Timing, TrialRecord
from laconic.units import format_bytes, format_count, format_percent

MAX_FINDINGS = 3
"""Findings of one rule that are printed: a model for another engine breaks the same rule in every layer."""


def print_compressed(artifact: Artifact) -> None:
    """Print the table at the end of a run: original against artifact."""
    manifest = artifact.manifest
    metric = registry.resolve("task", manifest.task).metric
    table = make_table(f"{artifact.name}: {manifest.task}", "", "original", "artifact", "", right=(1, 2))
    for gain in list_gains(manifest, artifact.measured, metric):
        table.add_row(gain.figure, gain.original, gain.artifact, gain.change)
    OUT.print(table)
    if not manifest.data:
        OUT.print(
            "\nNo samples were given: fidelity was measured on made-up inputs. Give --data for a real comparison."
        )
    for sentence in (*manifest.verdict.doubts, *manifest.verdict.out_of_domain) if manifest.verdict else ():
        OUT.print(f"\n{sentence}", soft_wrap=True)
    for sentence in artifact.measured.dynamic.gave_up if artifact.measured.dynamic else ():
        OUT.print(f"\nThe artifact is {sentence}.", soft_wrap=True)
    if not artifact.measured.timings:
        OUT.print(
            f"\nNot timed: {manifest.placement} is not on this machine. There, run: laconic tune {artifact.path}",
            soft_wrap=True,
        )
    OUT.print(f"\nRead {artifact.path / REPORT}, or: laconic serve {artifact.path}", soft_wrap=True)


def print_checkpoint(path: Path, report: Mapping[str, Any]) -> None:
    """Print a compressed checkpoint: figures after each stage, and the comparison with the original."""
    drift = Comparison.model_validate(report["drift"])
    OUT.print(
        make_stage_table(
            [StageEntry(**stage) for stage in report["stages"]], f"{path.name}: {report['task']}, a checkpoint"
        )
    )
    OUT.print(f"\nAgainst {drift.against}, {drift.samples} held-out test samples: {format_figures(drift.figures)}")
    OUT.print(f"\nRead {path / REPORT}, or: laconic.load({str(path)!r}).module", soft_wrap=True)


def make_stage_table(entries: Sequence[StageEntry], title: str) -> Table:
    """Make the table of sizes and fidelity after each stage."""
    columns = ["parameters", "size", "fidelity", "worst"]
    columns += ["divergence"] * any(DIVERGENCE in entry.figures for entry in entries)
    table = make_table(title, "stage", *columns, right=tuple(range(1, len(columns) + 1)))
    for entry in entries:
        cells = format_entry(entry)
        table.add_row(entry.stage, *(cells[name] for name in columns))
    return table


def print_onnx(summary: Mapping[str, Any]) -> None:
    """Print the description of an ONNX file."""
    table = make_table(Path(summary["file"]).name, "", "")
    table.columns[0].no_wrap = True
    table.add_row(
        "size", f"{format_bytes(summary['bytes'])}, opset {summary['opset']}, {summary['producer'] or 'unnamed'}"
    )
    operators = ", ".join(f"{count} {name}" for name, count in summary["operators"].items())
    table.add_row("operators", operators + (", ..." if operators else "") + (" in FP16" * summary["half_precision"]))
    for each in summary["inputs"]:
        free = ", ".join(map(str, each["free"]))
        known = (
            f"the batch is {each['batch']}" + (f"; free: axis {free}" if free else "") if each["batch"] else "in doubt"
        )
        table.add_row("input", f"{each['name']}: {each['dtype']} [{', '.join(map(str, each['shape']))}], {known}")
    for each in summary["outputs"]:
        table.add_row("output", f"{each['name']}: [{', '.join(each['shape'])}]")
    for name, after in summary["states"].items():
        table.add_row(
            "state",
            f"{name}, which comes back as {after}. Give the values that it has in use with the samples; the server "
            f"keeps none, so that a client sends {after} back as {name}",
        )
    for obstacle in summary["obstacles"]:
        table.add_row("in the way", obstacle)
    table.add_row("samples", summary["samples"])
    table.add_row("to compress", summary["command"])
    OUT.print(table)


def print_artifact(artifact: Artifact, kernels: Mapping[str, Any]) -> None:
    """Print the description of an artifact."""
    manifest, measured = artifact.manifest, artifact.measured
    table = make_table(artifact.name, "", "")
    table.columns[0].no_wrap = True
    table.add_row("task", manifest.task)
    for side, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
        for spec in specs:
            bounds = ", ".join(f"{axis} {low} to {high}" for axis, (low, high) in spec.bounds.items())
            table.add_row(side, f"{spec.name}: {spec.dtype} {spec.describe()}" + (f", {bounds}" if bounds else ""))
    for number, each in enumerate(manifest.placements):
        table.add_row("or" if number else "engine", f"{each.runtime}, {each.arithmetic}")
    table.add_row("size", f"{format_bytes(artifact.size)}, the source {format_bytes(measured.original_size)}")
    for line in format_kernels(kernels):
        table.add_row("layers", line)
    for head, line in format_audit(kernels.get("audit")):
        table.add_row(head, line)
    if measured.arithmetic:
        shares = ", ".join(f"{100 * share:.1f} % {name}" for name, share in measured.arithmetic.items())
        table.add_row("arithmetic", f"{shares}, by share of the weights")
    table.add_row("batching", f"up to {measured.knee} rows" if manifest.batching else "one sample at a time")
    for record in manifest.history:
        config = format_config(record.config)
        table.add_row("history", f"{record.stage}: {config}" if config else record.stage)
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    table.add_row("licence", manifest.licence or "not stated by the source")
    for kind, comparison in manifest.comparisons():
        table.add_row(kind, format_comparison(comparison))
    table.add_row("verdict", format_verdict(manifest.verdict))
    OUT.print(table)
    entries = make_ledger(manifest.source, manifest.history, measured.seconds)
    if len(entries) > 1:
        OUT.print()
        OUT.print(make_stage_table(entries, "sizes and fidelity after each stage"))
    if measured.search:
        OUT.print()
        OUT.print(make_search_table(measured.search))
    if measured.timings:
        OUT.print()
        OUT.print(make_timing_table(measured.timings, f"{measured.machine.processor}, {measured.machine.cores} cores"))


def make_search_table(trials: Sequence[TrialRecord]) -> Table:
    """Make the table of a search's trials: the Pareto front (*), and why each of the others was not chosen."""
    table = make_table(f"{len(trials)} candidates were tried", "candidate", "speed-up", "size", "why", right=(1, 2))
    for trial in sorted(trials, key=lambda trial: (not trial.front, -trial.speedup)):
        name = f"* {trial.name}" if trial.front else trial.name
        table.add_row(name, f"{trial.speedup:.2f} x", format_bytes(trial.size), trial.reason)
    return table


def print_verdict(title: str, verdict: Verdict) -> None:
    """Print a verdict that no artifact carries, with its comparisons."""
    table = make_table(title, "samples", "")
    for comparison in verdict.comparisons:
        table.add_row(str(comparison.samples), format_comparison(comparison))
    table.add_row("verdict", format_verdict(verdict))
    OUT.print(table)


def format_comparison(comparison: Comparison) -> str:
    """Format a comparison: its state unless passed, and its figures."""
    state = "" if comparison.passed else f" ({comparison.state})"
    return f"{comparison.subject} against {comparison.against}{state}: {format_figures(comparison.figures)}"


def format_verdict(verdict: Verdict | None) -> str:
    """Format a verdict: its state, why, and where the artifact is out of its domain, each on a line; or `none`."""
    return "\n".join([verdict.state, *verdict.reasons, *verdict.out_of_domain]) if verdict else "none"


def format_figures(figures: Mapping[str, float]) -> str:
    """Format figures on one line."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.6g}" for name, value in figures.items())


def format_kernels(kernels: Mapping[str, Any]) -> list[str]:
    """Format the counts of layers by precision and running arithmetic, one line each."""
    if "error" in kernels:
        return [f"not opened here: {kernels['error']}"]
    return [
        f"{count} {planned}, "
        + (f"run in {running}" if running != "not told" else "the engine does not report how they run")
        for planned, counts in kernels["layers"].items()
        for running, count in counts.items()
    ] or ["none with weights"]


def format_audit(audit: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Format the audit of the multiply-adds as rows: the shares by arithmetic, and each group of products that fell
    back. Nothing for an artifact of an earlier version."""
    if audit is None:
        return
    count = f"of {format_count(audit['multiply_adds'])} for one sample"
    shares = describe_shares(audit["shares"] or audit["planned"])
    recorded = "" if audit["machine"] == this_machine().processor else f", as run on {audit['machine']}"
    state = recorded if audit["shares"] else f"; {audit['state']}"
    yield "multiply-adds", f"{shares}, {count}{state}"
    for group in audit["fallbacks"]:
        number = len(group["nodes"])
        what = group["nodes"][0] if number == 1 else f"{number} {KINDS[group['kind']]}"
        kernels = f" ({', '.join(group['kernels'])})" if group["kernels"] else ""
        runs = f"{group['runs']}{kernels} instead of {group['asked']}"
        yield "fell back", f"{what}, {format_percent(group['share'])}: {runs}; {group['reason']}"


def make_timing_table(timings: Sequence[Timing], title: str) -> Table:
    """Make the table of latency, throughput and speed-up, the latter with its quartiles."""
    threads = sorted({time.threads for time in timings})
    lengths = sorted({time.length for time in timings} - {0})
    title = f"{title}; {format_plural(threads, 'thread')}" + (
        f", length {', '.join(map(str, lengths))}" if lengths else ""
    )
    table = make_table(title, "engine", "batch", "ms", "rows/s", "speed-up", right=(1, 2, 3, 4))
    order = list(dict.fromkeys(time.engine for time in timings))
    for time in sorted(timings, key=lambda time: (time.batch, order.index(time.engine))):
        table.add_row(
            time.engine,
            str(time.batch),
            f"{1e3 * time.seconds:.2f}",
            f"{time.rows_per_second:.0f}",
            format_speedup(time),
        )
    return table


def print_comparison(comparison: Mapping[str, Any]) -> None:
    """Print the comparison of two artifacts."""
    names = [side["name"] for side in (comparison["a"], comparison["b"])]
    if names[0] == names[1]:
        names = [side["path"] for side in (comparison["a"], comparison["b"])]
    both = make_table(comparison["a"]["task"], "", *names, right=(1, 2))
    for line in make_rows(comparison):
        both.add_row(*line)
    OUT.print(both)
    if comparison["differ"]:
        differ = make_table("different settings", "", *names)
        for each in comparison["differ"]:
            differ.add_row(each["setting"], *("" if each[side] is None else str(each[side]) for side in ("a", "b")))
        OUT.print()
        OUT.print(differ)
    if "agreement" in comparison:
        figures_of_both = {name: value for name, value in comparison["agreement"].items() if isinstance(value, float)}
        OUT.print(
            f"\n{comparison['agreement']['samples']} samples, both asked: {format_figures(figures_of_both)}",
            soft_wrap=True,
        )
    if comparison["a"]["machine"] != comparison["b"]["machine"]:
        OUT.print("\nThe artifacts were timed on different machines. Time them on one with laconic bench.")


def print_recipes(recipes: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of ready recipes."""
    table = make_table("", "recipe", "for", "stages")
    for recipe in recipes:
        stages = [stage if isinstance(stage, str) else next(iter(stage)) for stage in recipe["stages"]]
        table.add_row(recipe["name"], recipe["says"], "\n".join(stages))
    OUT.print(table)


def print_timings(timings: Sequence[Timing]) -> None:
    """Print the timings of `bench`."""
    OUT.print(make_timing_table(timings, "median of interleaved rounds"))


def print_load(points: Sequence[LoadPoint]) -> None:
    """Print what came of the loads of `bench --url`; latencies in milliseconds."""
    names = list(dict.fromkeys(name for point in points for name in point.latencies))
    table = make_table("latencies in ms", points[0].load, "requests", "goodput/s", *names, "errors")
    for point in points:
        latencies = [f"{point.latencies[name]:.1f}" if name in point.latencies else "-" for name in names]
        errors = ", ".join(f"{count} x {reason}" for reason, count in point.errors.items())
        table.add_row(f"{point.value:g}", str(point.requests), f"{point.goodput:.0f}", *latencies, errors or "none")
    OUT.print(table)


def format_plural(numbers: Sequence[int], noun: str) -> str:
    """Format numbers with a noun: `1 thread`, `2 threads`."""
    return f"{', '.join(map(str, numbers))} {noun}{'' if list(numbers) == [1] else 's'}"


def print_checks(checks: Sequence[Check]) -> None:
    """Print the checks of `verify`."""
    table = make_table("", "", "", "")
    for check in checks:
        table.add_row("ok" if check.passed else "FAILED", check.check, check.found)
    OUT.print(table)


def print_lint(report: Mapping[str, Any]) -> None:
    """Print the findings of `lint`, at most `MAX_FINDINGS` of a rule, and how many layers are quantized."""
    for rule in dict.fromkeys(finding["rule"] for finding in report["findings"]):
        findings = [finding for finding in report["findings"] if finding["rule"] == rule]
        for finding in findings[:MAX_FINDINGS]:
            where = f"{finding['node']}: " if finding["node"] else ""
            print_wrapped(f"{finding['severity']:<9}{rule}: ", where + finding["message"], indent=9)
        if len(findings) > MAX_FINDINGS:
            print_wrapped(" " * 9, f"{len(findings) - MAX_FINDINGS} more of {rule}; --json prints all", indent=9)
    count = report["quantized"]
    floating = f", in float: {', '.join(count['floating'])}" if count["floating"] else ""
    text = f"{count['quantized']} of {count['total']} linear layers and convolutions quantized{floating}"
    print_wrapped("", text, indent=9)
    sparse = report["sparse"]
    if sparse["sparse"]:
        OUT.print(f"{sparse['sparse']} of {sparse['total']} have 2:4 sparse weights", soft_wrap=True)


def print_wrapped(head: str, text: str, *, indent: int) -> None:
    """Print text on lines as wide as the console, at least 60 columns. indent: of the lines after the first."""
    for line in textwrap.wrap(
        text, max(OUT.width, 60), initial_indent=head, subsequent_indent=" " * indent, break_long_words=False
    ):
        OUT.print(line, soft_wrap=True)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print the findings of `doctor`."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        head = f"{'ok' if finding.works else 'no':<4}{finding.name:<{width}}  "
        text = f"{finding.found.removesuffix('.')}. Try: {finding.remedy}" if finding.remedy else finding.found
        print_wrapped(head, text, indent=len(head))
