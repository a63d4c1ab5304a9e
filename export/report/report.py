"""The HTML report: one self-contained page."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from export.report.changes import Changes
from export.report.charts import plot_arithmetic, plot_latency, plot_throughput
from laconic import registry
from laconic.artifacts.gain import find_timings, list_gains
from laconic.artifacts.ledger import StageEntry, format_config, make_ledger
from laconic.artifacts.manifest import Manifest
from laconic.artifacts.placement_audit import report_audit
from laconic.artifacts.verdict import Comparison, State, Verdict
from laconic.config import PATHS
from laconic.quantization.graph import Graph
from laconic.quantization.plan import BITS, PrecisionLadder
from laconic.recipes.recipe import Recipe
from laconic.runtimes.product import KINDS, share_multiply_adds
from laconic.timing.measurements import Measurements
from laconic.units import format_bytes, format_count, format_duration, format_fidelity, format_percent, format_seconds

TEMPLATE, CHECKPOINT = "report.html.j2", "checkpoint.html.j2"

FIGURES = {
    "fidelity": "fidelity, mean",
    "fidelity_p5": "fidelity, 5th percentile",
    "fidelity_worst": "fidelity, worst sample",
    "metric_original": "{metric}, original",
    "metric": "{metric}, artifact",
    "metric_change": "{metric}, change",
    "perplexity_original": "perplexity, original",
    "perplexity": "perplexity, artifact",
    "perplexity_ratio": "perplexity, ratio",
    "skill": "share of what answers without information lack",
    "fidelity_of_null": "fidelity of answers without information",
}
"""The labels of a comparison's figures; any other figure is labelled with its name."""

MARKS = {
    "passed": ("good", "✓", "yes"),
    "inconclusive": ("doubtful", "?", "in doubt"),
    "failed": ("bad", "✗", "no"),
    "": ("quiet", "", "not required"),
}
"""For each state its colour, its sign, and whether the figure passed."""

PRECISIONS = {
    "int4-weight": "INT4 weights",
    "int8": "INT8",
    "int8-dynamic": "INT8, dynamic",
    "int8-weight": "INT8 weights",
    "float8": "FP8",
    "float16-weight": "FP16 weights",
    "bfloat16-weight": "BF16 weights",
    "float32": "FP32",
}


@dataclass(frozen=True)
class Line:
    """One formatted figure of a comparison. state: empty if no value is required."""

    name: str
    found: str
    interval: str
    required: str
    state: State | Literal[""]


@dataclass(frozen=True)
class LayerLine:
    """One row of the table of layers. sensitivity: 1 - fidelity with only this layer quantized. bar: its length, 0 to
    100."""

    name: str
    kind: str
    shape: str
    parameters: int
    precision: str
    sensitivity: str
    bar: float


@dataclass(frozen=True)
class CandidateLine:
    """One row of the table of candidates. shares: of the multiply-adds, by the arithmetic that they run in."""

    engine: str
    size: str
    layers: str
    mean: str
    worst: str
    speedup: str
    met: bool
    chosen: bool
    shares: Mapping[str, float] = field(default_factory=dict)


def render_report(
    manifest: Manifest,
    measured: Measurements,
    *,
    recipe: Recipe,
    ladder: PrecisionLadder,
    graph: Graph,
    candidates: Sequence[CandidateLine] = (),
) -> str:
    """Render the report of an artifact. candidates: those that the artifact was chosen from.

    The same arguments give the same bytes.
    """
    source = Path(recipe.source).resolve().name
    metric = str(registry.resolve("task", manifest.task).metric)
    placements = [f"{each.runtime} ({each.arithmetic})" for each in manifest.placements]
    comparisons = [
        (kind, comparison, list(format_comparison(comparison, metric))) for kind, comparison in manifest.comparisons()
    ]
    return render_template(
        TEMPLATE,
        title=source,
        manifest=manifest,
        measured=measured,
        engine=", or ".join(placements),
        made_up=not manifest.data,
        **format_verdict(manifest.verdict),
        **format_headline(manifest, measured),
        gains=list(list_gains(manifest, measured, metric)),
        pictures=make_pictures(measured),
        audit=report_audit(measured.products, measured.machine.processor, measured.why_not_audited),
        arithmetic=make_arithmetic_picture(measured, candidates) if measured.products else "",
        kinds=KINDS,
        int8_share=recipe.goal.int8_share,
        changes=Changes.of(make_ledger(manifest.source, manifest.history, measured.seconds)),
        comparisons=comparisons,
        shares=compute_precision_shares(manifest, graph),
        candidates=candidates,
        layers=list(format_layers(manifest, ladder, graph)),
        has_sensitivity=bool(ladder.sensitivity),
        stages=format_steps(measured.stages),
        recipe=remove_folders(recipe, source).to_yaml(),
        source=source,
    )


def format_verdict(verdict: Verdict | None) -> dict[str, Any]:
    """Format a verdict as the template names its parts."""
    if verdict is None:
        texts = {"failures": ["nothing was compared"], "doubts": [], "out_of_domain": []}
        return {"state": "failed", "by_reference": False, "drift": {}, **texts}
    return {
        "state": verdict.state,
        "by_reference": verdict.by_reference,
        "failures": verdict.failures,
        "doubts": verdict.doubts,
        "out_of_domain": verdict.out_of_domain,
        "drift": verdict.drift[0].figures if verdict.drift else {},
    }


def format_headline(manifest: Manifest, measured: Measurements) -> dict[str, Any]:
    """Format size and latency of a single sample beside the original's, as the template's headline names them."""
    size, alone = manifest.served_size, find_timings(measured.timings, 1)
    return {
        "smaller": f"{measured.original_size / size:.1f}",
        "faster": f"{alone[1].speedup:.1f}" if alone else None,
        "alone": [format_seconds(time.seconds) for time in alone] if alone else None,
        "sizes": [format_bytes(measured.original_size), format_bytes(size)],
    }


def render_checkpoint(report: Mapping[str, Any], recipe: Recipe) -> str:
    """Render the report of a compressed checkpoint. report: the content of its report.json."""
    entries = [StageEntry(**stage) for stage in report["stages"]]
    drift = Comparison.model_validate(report["drift"])
    metric = str(registry.resolve("task", report["task"]).metric)
    return render_template(
        CHECKPOINT,
        title=report["source"],
        report=report,
        entries=entries,
        changes=Changes.of(entries),
        drift=drift,
        lines=list(format_comparison(drift, metric)),
        recipe=remove_folders(recipe, report["source"]).to_yaml(),
    )


def render_template(name: str, **context: Any) -> str:
    """Render a template of the report; all values are escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS
    return environment.get_template(name).render(context, marks=MARKS, precisions=PRECISIONS)


def make_breakable(name: str) -> Markup:
    """Escape a dotted name, and allow line breaks after its dots."""
    return Markup(".<wbr/>").join(name.split("."))


FILTERS: Mapping[str, Callable[[Any], str]] = {
    "amount": format_bytes,
    "nines": format_fidelity,
    "brief": format_config,
    "milliseconds": format_seconds,
    "duration": format_duration,
    "breakable": make_breakable,
    "count": format_count,
    "percent": format_percent,
    "words": lambda name: name.replace("_", " "),
}


def make_pictures(measured: Measurements) -> list[tuple[str, Markup]]:
    """Plot latency and throughput, with captions; nothing if there are no timings."""
    if not measured.timings:
        return []
    return [
        ("Milliseconds per run; the band is the interquartile range", Markup(plot_latency(measured.timings))),  # noqa: S704
        ("Rows per second", Markup(plot_throughput(measured.timings, measured.knee))),  # noqa: S704
    ]


def make_arithmetic_picture(measured: Measurements, candidates: Sequence[CandidateLine]) -> Markup:
    """Plot the arithmetic of each candidate whose kernels are known; where none is, what the artifact's graph asks
    for."""
    known = {f"{each.engine}{' (chosen)' if each.chosen else ''}": each.shares for each in candidates if each.shares}
    bars = known or {"planned": share_multiply_adds(measured.products, planned=True)}
    return Markup(plot_arithmetic(bars))  # noqa: S704


def format_comparison(comparison: Comparison, metric: str) -> Iterator[Line]:
    """Format the figures of a comparison, in the order of FIGURES, others after them."""
    figures = comparison.figures
    for key in sorted(figures, key=lambda key: list(FIGURES).index(key) if key in FIGURES else len(FIGURES)):
        low, high = comparison.intervals.get(key, (math.nan, math.nan))
        least = comparison.required.get(key)
        yield Line(
            name=FIGURES.get(key, key.replace("_", " ")).format(metric=metric),
            found=f"{figures[key]:.6g}",
            interval="" if math.isnan(low) else f"{low:.6g} to {high:.6g}",
            required="" if least is None else f"at least {least:.6g}",
            state="" if least is None else comparison.judge(key),
        )


def compute_precision_shares(manifest: Manifest, graph: Graph) -> list[tuple[str, int, float]]:
    """Count layers and the share of the weights, in percent, per precision; the fewest bits first."""
    layers: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for layer in graph.layers:
        precision = manifest.precision[layer.node]
        layers[precision] += 1
        weights[precision] += layer.parameters
    total = weights.total() or 1
    return [(each, layers[each], 100 * weights[each] / total) for each in BITS if each in layers]


def format_layers(manifest: Manifest, ladder: PrecisionLadder, graph: Graph) -> Iterator[LayerLine]:
    """Format the layers in execution order; the bars are logarithmic, over the range of sensitivities."""
    logs = {node: math.log10(value) for node, value in ladder.sensitivity.items() if value > 0}
    high = max(logs.values(), default=0.0)
    low = min(min(logs.values(), default=0.0), high - 1)
    for layer in graph.layers:
        sensitivity = ladder.sensitivity.get(layer.node)
        length = 8 + 92 * (logs[layer.node] - low) / (high - low) if layer.node in logs else 0.0
        yield LayerLine(
            name=layer.module,
            kind=layer.kind,
            shape=" x ".join(map(str, layer.shape)),
            parameters=layer.parameters,
            precision=manifest.precision[layer.node],
            sensitivity="" if sensitivity is None else "0" if sensitivity <= 0 else f"{sensitivity:.1e}",
            bar=round(length, 1),
        )


def format_steps(seconds: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Format the durations of the steps, in order: title, seconds, and the share of the longest in percent."""
    longest = max(seconds.values(), default=0.0) or 1.0
    return [(name, value, round(100 * value / longest, 1)) for name, value in seconds.items()]


def remove_folders(recipe: Recipe, source: str) -> Recipe:
    """Return the recipe without the folders of this machine, file names only."""
    named: dict[str, Any] = {role: Path(path.name) for role in PATHS if (path := getattr(recipe.data, role))}
    return recipe.model_copy(update={"source": source, "data": recipe.data.model_copy(update=named)})
