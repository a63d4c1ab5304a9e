"""The report: one page for people, with everything that it shows inside it."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from export.candidates import EngineCandidate
from export.report.changes import Changes, summarize_search
from export.report.charts import plot_latency, plot_throughput
from laconic import registry
from laconic.artifacts.artifact import MEASURED, REPORT, Artifact, Manifest
from laconic.artifacts.gain import amount, at_batch, duration, gains, milliseconds, nines, shipped
from laconic.artifacts.ledger import Entry, brief, ledger
from laconic.artifacts.verdict import Comparison
from laconic.config import PATHS
from laconic.hashing import digest_file, seal
from laconic.quantization.graph import Graph
from laconic.quantization.plan import BITS, Ladder
from laconic.recipes.recipe import Recipe
from laconic.timing.measurements import Measurements, TrialRecord

TEMPLATE, CHECKPOINT, SEARCH = "report.html.j2", "checkpoint.html.j2", "search.html.j2"
MARK = "<!--search-->"
"""Before and behind the section about a search."""

FIGURES = {
    "fidelity": "fidelity, mean",
    "fidelity_worst": "fidelity, worst sample",
    "metric_original": "{metric}, original",
    "metric": "{metric}, artifact",
    "metric_change": "{metric}, change",
}
"""What the figures of a comparison are called on the page; any other is called by its name."""

PRECISIONS = {
    "int4-weight": "INT4 weights",
    "int8": "INT8",
    "int8-dynamic": "INT8, dynamic",
    "int8-weight": "INT8 weights",
    "float16-weight": "FP16 weights",
    "float32": "FP32",
}


@dataclass(frozen=True)
class Line:
    """A figure of a comparison, written for people. passed: None where nothing is required."""

    name: str
    found: str
    interval: str
    required: str
    passed: bool | None


@dataclass(frozen=True)
class LayerLine:
    """A layer. harm: 1 - fidelity where only this layer is quantized. bar: its length, 0 to 100."""

    name: str
    kind: str
    shape: str
    parameters: int
    precision: str
    harm: str
    bar: float


@dataclass(frozen=True)
class CandidateLine:
    """A candidate, written for people."""

    engine: str
    size: str
    layers: str
    mean: str
    worst: str
    speedup: str
    met: bool
    taken: bool


def render_report(
    manifest: Manifest,
    measured: Measurements,
    *,
    recipe: Recipe,
    ladder: Ladder,
    graph: Graph,
    candidates: Sequence[EngineCandidate] = (),
) -> str:
    """The page. The same arguments give the same bytes. candidates: what the artifact was chosen from."""
    source = Path(recipe.source).resolve().name
    metric = str(registry.resolve("task", manifest.task).metric)
    alone = at_batch(measured.timings, 1)
    verdict = manifest.verdict
    return (
        make_environment()
        .get_template(TEMPLATE)
        .render(
            title=source,
            manifest=manifest,
            measured=measured,
            engine=f"{manifest.placement}, {manifest.compute} where not quantized",
            passed=verdict is not None and verdict.passed,
            failures=verdict.failures if verdict else ["nothing was compared"],
            made_up=not manifest.data,
            smaller=f"{measured.original_size / shipped(manifest):.1f}",
            faster=f"{alone[1].speedup:.1f}" if alone else None,
            alone=[milliseconds(time.seconds) for time in alone] if alone else None,
            sizes=[amount(measured.original_size), amount(shipped(manifest))],
            drift=verdict.drift[0].figures if verdict and verdict.drift else {},
            gains=list(gains(manifest, measured, metric)),
            pictures=make_pictures(measured),
            changes=Changes.of(ledger(manifest.source, manifest.history, measured.seconds)),
            comparisons=[
                (kind, comparison, list(format_comparison(comparison, metric)))
                for kind in ("parity", "drift")
                for comparison in (getattr(verdict, kind) if verdict else ())
            ],
            shares=compute_precision_shares(manifest, graph),
            tried=[format_candidate(candidate, manifest) for candidate in candidates],
            layers=list(format_layers(manifest, ladder, graph)),
            has_harm=bool(ladder.harm),
            precisions=PRECISIONS,
            stages=format_steps(measured.stages),
            recipe=remove_folders(recipe, source).to_yaml(),
            source=source,
        )
    )


def render_checkpoint(report: Mapping[str, Any], recipe: Recipe) -> str:
    """The page of a checkpoint. report: what is said in JSON."""
    entries = [Entry(**stage) for stage in report["stages"]]
    drift = Comparison.model_validate(report["drift"])
    metric = str(registry.resolve("task", report["task"]).metric)
    return (
        make_environment()
        .get_template(CHECKPOINT)
        .render(
            title=report["source"],
            report=report,
            entries=entries,
            changes=Changes.of(entries),
            drift=drift,
            lines=list(format_comparison(drift, metric)),
            precisions=PRECISIONS,
            recipe=remove_folders(recipe, report["source"]).to_yaml(),
        )
    )


def add_search(folder: Path, trials: Iterable[Mapping[str, Any]]) -> None:
    """Put what a search has tried into an artifact's report and its measured.json, in place of an earlier search.

    trials: the fields of a Trial, JSON-ready.
    """
    artifact = Artifact.load(folder)
    found = tuple(TrialRecord.model_validate(trial) for trial in trials)
    metric = str(registry.resolve("task", artifact.manifest.task).metric)
    section = make_environment().get_template(SEARCH).render(search=summarize_search(found, metric)) if found else ""
    before, _, rest = (folder / REPORT).read_text(encoding="utf-8").partition(MARK)
    after = rest.rpartition(MARK)[2]
    (folder / REPORT).write_text(f"{before}{MARK}\n{section}{MARK}{after}", encoding="utf-8")
    measured = artifact.measured.model_copy(update={"search": found, "report": digest_file(folder / REPORT).sha256})
    (folder / MEASURED).write_bytes(seal(measured.model_dump(mode="json")))


def make_environment() -> Environment:
    """Where the template is found; whatever it is given is escaped."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["amount"] = amount
    made.filters["nines"] = nines
    made.filters["brief"] = brief
    made.filters["milliseconds"] = milliseconds
    made.filters["duration"] = duration
    made.filters["breakable"] = make_breakable
    made.filters["words"] = lambda name: name.replace("_", " ")
    return made


def make_breakable(name: str) -> Markup:
    """A dotted name, escaped, that may wrap behind its dots."""
    return Markup(".<wbr/>").join(name.split("."))


def make_pictures(measured: Measurements) -> list[tuple[str, Markup]]:
    """Captions and pictures of the speed; none where nothing was timed."""
    if not measured.timings:
        return []
    return [
        ("Milliseconds per run; the band holds half of the runs", Markup(plot_latency(measured.timings))),  # noqa: S704
        ("Rows per second", Markup(plot_throughput(measured.timings, measured.knee))),  # noqa: S704
    ]


def format_comparison(comparison: Comparison, metric: str) -> Iterator[Line]:
    """The figures that count first."""
    figures = comparison.figures
    for key in sorted(figures, key=lambda key: list(FIGURES).index(key) if key in FIGURES else len(FIGURES)):
        low, high = comparison.intervals.get(key, (math.nan, math.nan))
        least = comparison.required.get(key)
        yield Line(
            name=FIGURES.get(key, key.replace("_", " ")).format(metric=metric),
            found=f"{figures[key]:.6g}",
            interval="" if math.isnan(low) else f"{low:.6g} to {high:.6g}",
            required="" if least is None else f"at least {least:.6g}",
            passed=None if least is None else figures[key] >= least,
        )


def compute_precision_shares(manifest: Manifest, graph: Graph) -> list[tuple[str, int, float]]:
    """Precision, number of layers, and the share of the weights in percent; the fewest bits first."""
    layers: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for layer in graph.layers:
        precision = manifest.precision[layer.node]
        layers[precision] += 1
        weights[precision] += layer.parameters
    total = weights.total() or 1
    return [(each, layers[each], 100 * weights[each] / total) for each in BITS if each in layers]


def format_candidate(candidate: EngineCandidate, manifest: Manifest) -> CandidateLine:
    """How a candidate came out; it was taken if the manifest speaks of it."""
    counts = Counter(candidate.plan.precision.values())
    files = candidate.model.parent.glob(f"{candidate.model.name}*")
    return CandidateLine(
        engine=candidate.name,
        size=amount(sum(file.stat().st_size for file in files)),
        layers=", ".join(f"{counts[each]} {PRECISIONS.get(each, each)}" for each in BITS if each in counts),
        mean=nines(float(candidate.fidelity.mean())),
        worst=nines(float(candidate.fidelity.min())),
        speedup=f"{candidate.speedup:.2f}",
        met=candidate.met,
        taken=(candidate.option.runtime, candidate.option.compute, dict(candidate.plan.precision))
        == (manifest.placement, manifest.compute, manifest.precision),
    )


def format_layers(manifest: Manifest, ladder: Ladder, graph: Graph) -> Iterator[LayerLine]:
    """In the order in which they run; the bars are logarithmic, over the range of what was found."""
    logs = {node: math.log10(harm) for node, harm in ladder.harm.items() if harm > 0}
    high = max(logs.values(), default=0.0)
    low = min(min(logs.values(), default=0.0), high - 1)
    for layer in graph.layers:
        harm = ladder.harm.get(layer.node)
        length = 8 + 92 * (logs[layer.node] - low) / (high - low) if layer.node in logs else 0.0
        yield LayerLine(
            name=layer.module,
            kind=layer.kind,
            shape=" x ".join(map(str, layer.shape)),
            parameters=layer.parameters,
            precision=manifest.precision[layer.node],
            harm="" if harm is None else "0" if harm <= 0 else f"{harm:.1e}",
            bar=round(length, 1),
        )


def format_steps(seconds: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Step, seconds, and the share of the longest in percent; in the order in which they ran."""
    longest = max(seconds.values(), default=0.0) or 1.0
    return [(name, value, round(100 * value / longest, 1)) for name, value in seconds.items()]


def remove_folders(recipe: Recipe, source: str) -> Recipe:
    """The recipe without the folders of the disk that it ran on."""
    named: dict[str, Any] = {role: Path(path.name) for role in PATHS if (path := getattr(recipe.data, role))}
    return recipe.model_copy(update={"source": source, "data": recipe.data.model_copy(update=named)})
