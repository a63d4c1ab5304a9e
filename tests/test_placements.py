"""Portable artifacts: one model placed for several engines, and the fastest one found where it is opened."""

import digits
import pytest
from served import running

from compress.pipeline import compress
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.inspection import verify
from laconic.artifacts.manifest import GOLDEN, MANIFEST, REPORT
from laconic.cache import VARIABLE, Cache
from laconic.errors import CorruptArtifact, MissingPackage, RecipeError, UnprovenArtifact
from laconic.hashing import seal, unseal
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.units import format_fidelity
from serve.welcome import Addresses, format_welcome
from serve.workers.engine_sessions import describe_race

ENGINES = {"openvino", "onnxruntime"}


@pytest.fixture(scope="module")
def portable(tmp_path_factory):
    """The digits network in INT8, placed for both engines."""
    folder = tmp_path_factory.mktemp("portable")
    weights, data = digits.write(folder)
    recipe = {"source": str(weights), "builder": "digits:DigitsNet", "data": str(data), "portable": True}
    given = Recipe.parse(recipe | {"stages": [{"quantize.static": {"samples": 32}}]})
    made = compress(given, folder / "digits.laconic", cache=Cache(folder / "cache"), steps=Steps(quiet=True))
    assert made.missed == ()
    return made.artifact


@pytest.fixture
def raced(portable, monkeypatch, tmp_path):
    """The artifact, what a race finds on this machine, and how often it was run."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    first, second = (each.runtime for each in portable.manifest.placements)
    speeds, races = {first: 1.0, second: 1.0}, []

    def race(sessions, task, threads):
        races.append(threads)
        return {name: speeds[name] for name in sessions}

    monkeypatch.setattr("laconic.artifacts.artifact.measure_speeds", race)
    return portable, speeds, races


def test_each_placement_has_a_graph_golden_outputs_and_a_verdict_of_its_own(portable):
    manifest = portable.manifest
    assert manifest.format == 3
    assert {each.runtime for each in manifest.placements} == ENGINES == ENGINES & set(manifest.versions)
    assert len({manifest.files[each.model].sha256 for each in manifest.placements}) == 2
    for placement in manifest.placements:
        assert placement.verdict.failures == []
        with portable.open(placement.runtime) as session:
            assert min(portable.measure_golden_agreement(session, placement).values()) > 0.95
    (other,) = portable.manifest.alternatives
    subjects = [each.subject for kind, each in portable.manifest.comparisons() if kind == "drift"]
    assert subjects.count("artifact") == subjects.count(f"artifact for {other.runtime}") == 1
    assert f"artifact for {other.runtime}" in (portable.path / REPORT).read_text(encoding="utf-8")
    found = verify(portable.path)
    assert [check.check for check in found].count("golden outputs") == 2
    assert [check for check in found if not check.passed] == []


def test_both_placements_give_the_same_answers_within_the_goal(portable):
    task, (images, _) = portable.task(), digits.samples()
    inputs = {"image": images[-200:]}
    with portable.open("openvino") as one, portable.open("onnxruntime") as other:
        assert task.fidelity(one.run(inputs), other.run(inputs)).mean() > 0.97


def test_the_real_race_opens_one_of_them(portable, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    choice = portable.choose()
    assert choice.engine.name == choice.placement.runtime
    assert set(choice.speeds) == ENGINES
    assert all(speed > 0 for speed in choice.speeds.values())
    assert portable.choose().speeds == choice.speeds, "from the cache"


def test_the_fastest_placement_is_opened_and_the_race_is_run_once(raced):
    portable, speeds, races = raced
    first, second = speeds
    speeds[second] = 1.5
    assert portable.choose().placement.runtime == second
    assert portable.choose().engine.name == second
    assert races == [1]
    assert portable.choose(first).placement.runtime == first, "an engine that is named is not raced"


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "OPENBLAS_CORETYPE"])
def test_the_race_is_run_again_where_instructions_are_limited(raced, monkeypatch, variable):
    portable, _, races = raced
    portable.choose()
    monkeypatch.setenv(variable, "AVX2")
    portable.choose()
    portable.choose()
    assert len(races) == 2


def test_the_race_is_run_again_for_other_golden_outputs_of_the_same_graphs(raced):
    portable, _, races = raced
    portable.choose()
    files = portable.manifest.files
    other = {**files, GOLDEN: files[GOLDEN].model_copy(update={"sha256": "0" * 64})}
    Artifact(portable.path, portable.manifest.model_copy(update={"files": other}), portable.measured).choose()
    assert len(races) == 2


def test_a_placement_that_is_hardly_faster_does_not_replace_the_preferred_one(raced):
    portable, speeds, _ = raced
    first, second = speeds
    speeds[second] = 1.04
    assert portable.choose().placement.runtime == first


def test_without_a_cache_to_write_to_the_race_is_run_each_time(raced, monkeypatch):
    portable, _, races = raced
    monkeypatch.setenv(VARIABLE, "/proc/no-folder")
    assert portable.choose().speeds == portable.choose().speeds
    assert len(races) >= 2


def test_a_placement_that_computes_something_else_here_is_out_of_the_race(raced, monkeypatch):
    portable, speeds, races = raced
    first, second = speeds
    opened = portable.open_placement

    def refuse(engine, placement, count=1, *, threads=1):
        if placement.runtime == first:
            raise UnprovenArtifact("does not give its golden outputs")
        return opened(engine, placement, count, threads=threads)

    monkeypatch.setattr(portable, "open_placement", refuse)
    choice = portable.choose()
    assert choice.placement.runtime == second
    assert choice.speeds == {first: 0.0, second: 1.0}
    assert races == [], "nothing is left to time"


def test_with_one_engine_installed_its_placement_is_opened(raced, monkeypatch):
    portable, speeds, races = raced
    _, second = speeds
    monkeypatch.setattr("laconic.artifacts.artifact.is_installed", lambda name: name == second)
    assert portable.choose().placement.runtime == second
    assert races == []
    monkeypatch.setattr("laconic.artifacts.artifact.is_installed", lambda name: False)
    with pytest.raises(MissingPackage, match="no engine of target 'cpu' is on this machine"):
        portable.choose()


def test_the_server_says_which_engine_it_took(raced):
    portable, speeds, _ = raced
    _, second = speeds
    speeds[second] = 2.0
    compute = next(each.compute for each in portable.manifest.placements if each.runtime == second)
    with running(portable.path) as server, server.client() as client:
        assert client.get(f"/v2/models/{portable.name}").json()["platform"] == f"onnx_{second}"
        other = next(each for each in portable.manifest.placements if each.runtime == second)
        assert server.app.repository.get(portable.name).verdict == other.verdict
        assert format_fidelity(other.verdict.drift[0].figures["fidelity"]) in client.get("/page/models").text
        welcome = format_welcome(server.app, Addresses("127.0.0.1", server.port))
    assert f"{portable.name} runs in {second}, {compute}: 2.00 x the speed of" in welcome


def test_placements_of_equal_speed_are_both_named(raced):
    portable, speeds, _ = raced
    _, second = speeds
    assert describe_race(portable.choose()).endswith(f": 1.00 x the speed of {second}")


def test_alternatives_name_files_and_engines_that_are_there(portable, tmp_path):
    content = unseal(portable.path / MANIFEST)
    for changes, message in (
        ({"alternatives": [content["alternatives"][0] | {"model": "other.onnx"}]}, "does not list 'other.onnx'"),
        ({"alternatives": [content["alternatives"][0] | {"runtime": "os:system"}]}, "unknown runtime 'os:system'"),
    ):
        copy = tmp_path / "copy.laconic"
        copy.mkdir(exist_ok=True)
        (copy / MANIFEST).write_bytes(seal(content | changes))
        with pytest.raises(CorruptArtifact, match=message):
            Artifact.load(copy)


def test_portable_and_one_engine_only_exclude_each_other():
    with pytest.raises(RecipeError, match="Leave one out"):
        Recipe.parse({"source": "m", "portable": True, "engine_only": "openvino"})
