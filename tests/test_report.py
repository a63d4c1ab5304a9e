"""The report: one page with everything inside it, the same for the same figures, and safe whatever names it shows."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from artifacts import PASSED, X, Y, write_artifact

from export.candidates.candidate import EngineCandidate, format_candidate
from export.candidates.engine_option import EngineOption
from export.report.added_sections import MARK, add_search
from export.report.changes import summarize_search
from export.report.report import render_report
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.inspection import verify
from laconic.artifacts.manifest import MEASURED, REPORT, Manifest
from laconic.artifacts.record import Record
from laconic.artifacts.verdict import Comparison
from laconic.hardware import Machine
from laconic.hashing import FileDigest, digest_file, seal, unseal
from laconic.quantization.graph import Graph, Layer
from laconic.quantization.plan import Plan, PrecisionLadder
from laconic.recipes.recipe import Recipe
from laconic.timing.measurements import Measurements, Timing, TrialRecord

HOSTILE = "<script>alert('x')</script>&\"$\\frac{"
MACHINE = Machine(processor="Some CPU", cores=2, features=("avx2",), memory=8_000_000_000, system="Linux")


def timing(engine, batch, seconds, speedup=1.0):
    return Timing(
        engine=engine,
        batch=batch,
        length=128,
        threads=1,
        seconds=seconds,
        quartiles=(0.9 * seconds, 1.2 * seconds),
        speedup=speedup,
        speedup_quartiles=(0.9 * speedup, 1.1 * speedup),
    )


def measured(batches=(1, 2, 4, 8), engine="openvino, float32"):
    times = [timing("original", batch, 0.01 * batch) for batch in batches]
    times += [timing(engine, batch, 0.003 * batch**0.9, 3.0) for batch in batches]
    return Measurements(
        machine=MACHINE,
        timings=tuple(times),
        knee=4 if len(batches) > 1 else 1,
        stages={"capture the graph": 8.2, "measure each layer's sensitivity": 301.0},
        peak_memory=2_000_000_000,
        original_size=90_000_000,
    )


def pieces(layers=3, names="layer.{}", verdict=PASSED, harm=True, **changes):
    """The arguments of `render_report`."""
    nodes = [f"{names.format(number)}/MatMul" for number in range(layers)]
    precisions = ("int8", "int8-weight", "float16-weight", "float32")
    precision = {node: precisions[number % 4] for number, node in enumerate(nodes)}
    graph = Graph(
        path=Path("graph.onnx"),
        inputs=(X,),
        outputs=(Y,),
        layers=tuple(
            Layer(node, node.rpartition("/")[0], "MatMul", "a", "b", "c", (64, 32 * (number + 1)), 1)
            for number, node in enumerate(nodes)
        ),
        key="k",
    )
    values = {
        "task": "tensors",
        "inputs": (X,),
        "outputs": (Y,),
        "target": "cpu",
        "placement": "openvino",
        "compute": "float32",
        "precision": precision,
        "source": {"kind": "builder"},
        "history": (Record(stage="quantize.static", config={"method": "minmax"}, key="k"),),
        "recipe": {},
        "verdict": verdict,
        "versions": {"laconic": "0.2.0", "openvino": "2026.4"},
        "data": {"calibrate": "f" * 32},
        "licence": "apache-2.0",
        "files": {"model.onnx": FileDigest(sha256="a" * 64, size=23_000_000)},
    }
    harms = {node: 10.0 ** -(1 + number % 5) for number, node in enumerate(nodes)} if harm else {}
    recipe = Recipe.parse({"source": "/somewhere/private/net.safetensors", "data": "/somewhere/private/data.npz"})
    return {
        "manifest": Manifest(**{**values, **changes}),
        "measured": measured(),
        "recipe": recipe,
        "ladder": PrecisionLadder(((Plan(precision),),), harms),
        "graph": graph,
    }


def page(**changes):
    given = pieces(**changes)
    return render_report(given.pop("manifest"), given.pop("measured"), **given)


def tree(html):
    """The page as XML: it is written to be well-formed as that too."""
    return ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>").replace("&nbsp;", " "))


def labelled_verdict():
    figures = {
        "fidelity": 0.9931,
        "fidelity_worst": 0.98,
        "agreement": 0.99,
        "metric_original": 0.97,
        "metric": 0.968,
        "metric_change": -0.002,
    }
    drift = Comparison(
        subject="artifact",
        against="original",
        samples=400,
        figures=figures,
        intervals={"fidelity": (0.992, 0.994), "metric_change": (-0.006, 0.002)},
        required={"fidelity": 0.99, "fidelity_worst": 0.95, "metric_change": -0.01},
    )
    return PASSED.model_copy(update={"drift": (drift,)})


@pytest.mark.parametrize("layers", [0, 1, 3, 40])
@pytest.mark.parametrize("harm", [True, False])
def test_it_is_well_formed_for_few_layers_and_for_many(layers, harm):
    html = page(layers=layers, harm=harm)
    rows = tree(html).findall(".//table[@class='layers']/tbody/tr")
    assert len(rows) == layers
    assert ("Sensitivity is the fidelity lost" in html) == (harm and layers > 0)


def test_it_loads_nothing_and_closes_every_element_and_is_the_same_for_the_same_figures():
    html = page(verdict=labelled_verdict(), layers=40)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)|<script|<link|<img|<iframe|src=|javascript:", html)
    assert not [link for link in re.findall(r'href="([^"]*)"', html) if not link.startswith("#")]
    assert len(html) < 400_000

    class Balance(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open = []

        def handle_starttag(self, tag, attributes):
            self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

        def handle_startendtag(self, tag, attributes):
            pass

    parser = Balance()
    parser.feed(page(verdict=labelled_verdict()))
    parser.close()
    assert parser.open == []
    ids = re.findall(r' id="([^"]*)"', page())
    assert len(ids) == len(set(ids))
    assert ids, "markers and clipping are shared by id"
    assert page(verdict=labelled_verdict()) == page(verdict=labelled_verdict())


def test_hostile_names_are_shown_and_not_run():
    html = page(
        names="<script>alert(1)</script>.{}",
        licence=HOSTILE,
        versions={HOSTILE: HOSTILE},
        history=(Record(stage=HOSTILE, config={HOSTILE: HOSTILE}, key="k"),),
    )
    assert "<script" not in html
    tree(html)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_the_figures_are_on_it_and_no_folder_of_the_machine_nor_a_metric_without_labels():
    html = page()
    assert "/somewhere" not in html
    assert "net.safetensors" in html
    assert "data.npz" in html
    html = page(verdict=labelled_verdict())
    for text in (
        "3.9 &#215;",
        "3.0 &#215;",
        "0.9931",
        "-0.0020 (-0.0060 to +0.0020)",
        "0.992 to 0.994",
        "at least 0.95",
    ):
        assert text in html
    for text in ("5 min 1 s", "quantize.static: method minmax", "apache-2.0", "Some CPU", "f" * 32, "a" * 64):
        assert text in html
    assert "against labels" not in page()
    assert "against labels" in page(verdict=labelled_verdict())
    assert "on made-up inputs" in page(data={})
    assert "made-up" not in page()


def test_a_failed_verdict_is_the_headline():
    verdict = labelled_verdict()
    drift = verdict.drift[0].model_copy(update={"required": {"fidelity": 0.999}})
    html = page(verdict=verdict.model_copy(update={"drift": (drift,)}))
    assert "<strong>Failed.</strong>" in html
    assert "fidelity is 0.9931 (95 %: 0.992 to 0.994, 400 samples), required 0.999" in html
    assert "<strong>Passed.</strong>" in page(verdict=verdict)


@pytest.mark.parametrize("batches", [(1,), (1, 32), (1, 2, 4, 8, 16, 32)])
def test_pictures_are_drawn_for_one_batch_size_and_for_many(batches):
    given = pieces()
    given["measured"] = measured(batches)
    html = render_report(given.pop("manifest"), given.pop("measured"), **given)
    assert len(tree(html).findall(".//figure/svg")) == 2


def test_it_is_written_without_timings_and_shows_the_arithmetic_that_the_engine_reports():
    given = pieces()
    given["measured"] = measured().model_copy(update={"timings": ()})
    html = render_report(given.pop("manifest"), given.pop("measured"), **given)
    assert tree(html).findall(".//figure/svg") == []
    given = pieces(layers=3)
    nodes = list(given["ladder"].sensitivity)
    given["ladder"] = PrecisionLadder(given["ladder"].rungs, dict(zip(nodes, (0.0, -1e-9, 0.01), strict=True)))
    html = render_report(given.pop("manifest"), given.pop("measured"), **given)
    bars = tree(html).findall(".//table[@class='layers']//td[@class='bar']/span")
    assert [bar.get("style") for bar in bars] == ["width: 100.0%"]
    given = pieces()
    given["measured"] = measured().model_copy(update={"arithmetic": {"float32": 0.03, "int8": 0.97}})
    html = render_report(given.pop("manifest"), given.pop("measured"), **given)
    assert "3.0 % in float32, 97.0 % in int8." in html
    assert "the engine multiplies" not in page()


def test_candidates_are_listed_with_the_chosen_one(tmp_path):
    given = pieces()
    (plan,) = given["ladder"].rungs[0]
    (tmp_path / "model.onnx").write_bytes(bytes(1_500_000))
    made = {"plan": plan, "model": tmp_path / "model.onnx", "fidelity": np.array([0.99, 0.97]), "met": True}
    built = [
        EngineCandidate(EngineOption("openvino", "float32"), **made, arithmetic={}, speedup=3.5),
        EngineCandidate(EngineOption("openvino", "bfloat16"), **{**made, "met": False}, arithmetic={}, speedup=4.0),
    ]
    given["candidates"] = [format_candidate(each, chosen=each is built[0]) for each in built]
    html = render_report(given.pop("manifest"), given.pop("measured"), **given)
    table = next(table for table in tree(html).iter("table") if "meets the goal" in "".join(table.itertext()))
    rows = [" ".join("".join(row.itertext()).split()) for row in table.findall("tbody/tr")]
    assert "openvino, float32 chosen" in rows[0]
    assert all(part in rows[0] for part in ("1.5 MB", "0.98000", "0.97000", "3.50", "yes"))
    assert "chosen" not in rows[1]
    assert rows[1].endswith("no")
    assert "<h2>Candidates" not in page()


def staged(written=None, **changes):
    """A page about a model that was pruned, healed and quantized. written: further figures of one that writes."""
    start = {"parameters": 1000.0, "bytes": 4000.0, "multiply-adds": 900.0}
    after = {"parameters": 500.0, "bytes": 2000.0, "multiply-adds": 300.0, "fidelity": 0.9, "fidelity worst": 0.7}
    after |= written or {}
    history = (
        Record(stage="earlier", config={}, key="e", figures=start),
        Record(stage="prune.heads", config={"keep": 0.5}, key="p", figures=after),
        Record(stage="distill.heal", config={}, key="h", figures=after | {"fidelity": 0.96}),
        Record(stage="quantize.static", config={}, key="q", figures={"bytes": 1000.0, "fidelity": 0.95}),
    )
    given = pieces(source={"kind": "builder", "figures": start, "earlier": 1}, history=history, **changes)
    given["measured"] = measured().model_copy(update={"seconds": {"p": 3.0, "h": 200.0}})
    return render_report(given.pop("manifest"), given.pop("measured"), **given)


def test_sizes_and_fidelity_after_each_stage_are_a_table_and_two_plots():
    html = staged()
    found = tree(html).findall(".//table[@class='changes']/tbody/tr")
    rows = [" ".join(filter(None, ("".join(cell.itertext()) for cell in row))) for row in found]
    assert rows == [
        "source 1.0 k 4.0 kB 900",
        "prune.heads 500 (50 %) 2.0 kB (50 %) 300 (33 %) 0.90000 0.70000 3.0 s",
        "distill.heal 500 (50 %) 2.0 kB (50 %) 300 (33 %) 0.96000 0.70000 3 min 20 s",
        "quantize.static 1.0 kB (25 %) 0.95000",
    ]
    assert len(tree(html).findall(".//figure/svg")) == 4
    assert "divergence, nats" not in html
    ids = re.findall(r' id="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert "after each stage" not in page()
    (table,) = tree(staged({"divergence": 0.01234})).findall(".//table[@class='changes']")
    assert [row[6].text for row in table.iter("tr")] == ["divergence, nats", None, "0.0123", "0.0123", None]


def trial(name, speedup, fidelity, **changes):
    return {
        "name": name,
        "fidelity": fidelity,
        "latency": 0.01 / speedup,
        "size": 1e7,
        "speedup": speedup,
        "front": True,
        "reason": "chosen",
        **changes,
    }


TRIALS = [
    trial("heads 0.5", 4.0, 0.97, foretold=3.5),
    trial("heads 0.25", 5.0, 0.9, reason=HOSTILE),
    trial("heads 0.9", 2.0, None, measured=False, front=False, reason="no faster than heads 0.5"),
]


def test_the_trials_of_a_search_are_added_to_the_report_and_replaced_by_a_later_search(tmp_path):
    path = write_artifact(tmp_path / "one.laconic")
    (path / REPORT).write_text(page(), encoding="utf-8")
    report = digest_file(path / REPORT).sha256
    (path / MEASURED).write_bytes(seal(unseal(path / MEASURED) | {"report": report}))
    add_search(path, TRIALS)
    add_search(path, TRIALS)
    html = (path / REPORT).read_text(encoding="utf-8")
    assert html.count("Trials of the search") == 1
    section = html.split(MARK)[1]
    assert all(
        text in section
        for text in ("heads 0.5", "predicted", "no faster than heads 0.5", "4.00 &#215;", "3.50 predicted")
    )
    assert "<script" not in section
    tree(html)
    assert [check for check in verify(path) if not check.passed] == []
    assert [each.name for each in Artifact.load(path).measured.search] == [each["name"] for each in TRIALS]
    add_search(path, [])
    assert "Trials of the search" not in (path / REPORT).read_text(encoding="utf-8")


def test_the_pareto_front_is_plotted_over_the_drop_if_there_are_labels():
    drops = [TrialRecord.model_validate(each | {"drop": 0.01 * number}) for number, each in enumerate(TRIALS)]
    found = summarize_search(drops, "accuracy")
    assert found.quality == "drop of the accuracy, points"
    assert [quality for _, quality in found.rows] == ["+1.00", "+0.00", "+2.00"]
    assert "drop of the metric" in found.picture
    plain = summarize_search([TrialRecord.model_validate(each) for each in TRIALS], "accuracy")
    assert [quality for _, quality in plain.rows] == ["0.90000", "0.97000", ""]
