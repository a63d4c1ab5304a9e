"""The command as people use it: what it prints, what it answers to mistakes, and how it stops."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import typer
from artifacts import FAILED, write_artifact

from laconic.artifacts.artifact import Artifact
from laconic.cache import VARIABLE
from laconic.commands.command_line import app
from laconic.progress import Steps

HERE = Path(__file__).parent
COMMANDS = {name: each.load() for name, each in typer.main.get_command(app).commands.items()}
COMMAND = [sys.executable, "-c", "from laconic.cli import main; main()"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def laconic(laconic, cache, monkeypatch):
    """The command, with this module's cache, in the folder of the tests."""
    monkeypatch.setenv(VARIABLE, str(cache))
    monkeypatch.chdir(HERE)
    return laconic


@pytest.fixture
def compress(laconic, trained):
    """Runs `laconic compress` over the digits network."""
    weights, data = trained
    return lambda *given: laconic("compress", weights, "--builder", "digits:DigitsNet", "--data", data, *given)


def one_sentence(message):
    """What a mistake is answered with: one line that begins with the command's name, and no traceback."""
    assert message.startswith("laconic: ")
    assert message.count("\n") == 1
    assert "Traceback" not in message
    return message


def test_the_help_of_all_verbs_imports_none(laconic):
    assert {name: each.help.split("\n\n")[0].replace("\n", " ") for name, each in COMMANDS.items()} == {
        name: each.short_help for name, each in typer.main.get_command(app).commands.items()
    }
    code = "import sys\nfrom laconic.cli import main\ntry: main()\nfinally: print(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert "serve" in done.stdout
    assert not {"'pydantic'", "'yaml'", "'numpy'", "'asyncio'"} & set(done.stderr.strip("[]\n").split(", "))


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_explains_itself(laconic, verb):
    code, out, err = laconic(verb, "--help")
    assert (code, err) == (0, "")
    assert f"laconic {verb}" in out
    assert max(map(len, out.splitlines())) <= 80
    assert f"Example: laconic {'compress' if verb == 'recipes' else verb}" in " ".join(out.split())


def test_the_version_is_that_of_the_package_and_without_a_verb_the_help_is_shown(laconic):
    assert laconic("--version")[:2] == (0, "0.2.0\n")
    code, out, _ = laconic()
    assert code == 2
    assert "compress" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compres"], "compress"),
        (["compress", "--recipies", "x"], "--recipe"),
        (["compress"], "SOURCE"),
        (["compress", "model.onnx"], "--output"),
        (["inspect"], "ARTIFACT"),
        (["bench", "x", "--threads", "0"], "--threads"),
        (["bench", "x", "--batches", "1,two"], "1,8,32"),
        (["serve", "x", "--port", "70000"], "--port"),
        (["compress", "missing", "-o", "out"], "there is no missing"),
        (["compress", "missing", "-o", "out", "--task", "text-embeding"], "Did you mean 'text-embedding'"),
        (["compress", "missing", "-o", "out", "--target", "gpu"], "cpu"),
        (["compress", "--recipe", "missing.yaml", "-o", "out"], "there is no recipe missing.yaml"),
        (["inspect", "missing"], "holds no manifest.json"),
        (["verify", "missing"], "holds no manifest.json"),
        (["bench", "missing"], "holds no manifest.json"),
        (["serve", "missing"], "missing"),
        (["compare", "missing", "missing"], "holds no manifest.json"),
        (["lint", "missing"], "there is no missing"),
        (["lint", str(HERE)], "holds no manifest.json"),
        (["lint", str(HERE / "conftest.py")], "is not an ONNX file"),
        (["lint", "missing", "--target", "cpu"], "Known: tensorrt"),
        (["compress", "missing", "-o", "out", "--to", "tensor"], "to: input should be 'artifact' or 'checkpoint'"),
        (["compress", "missing", "-o", "out", "--to", "checkpoint"], "would be unchanged"),
        (["compress", "missing", "-o", "out", "--max-latency", "3"], "a time with its unit"),
        (["compress", "missing", "-o", "out", "--max-drop", "3"], "a share as 1%"),
        (["compress", "missing", "-o", "out", "--budget", "3"], "30m"),
        (["compress", "missing", "-o", "out", "--executor", "ray"], "Give --budget"),
        (["compress", "missing", "-o", "out", "--recipe", "text-embeding"], "Did you mean 'text-embedding'"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence_with_exit_code_2(laconic, arguments, said):
    code, out, err = laconic(*arguments)
    assert (code, out) == (2, "")
    assert said in one_sentence(err)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("source: m\nstage: [quantize.static]", "Did you mean 'stages'"),
        ("source: m\nstages: [quantise.static]", "Did you mean 'quantize.static'"),
        ("source: m\nstages: [{quantize.static: {sample: 3}}]", "Did you mean 'samples'"),
        ("source: m\ngoal: {max_latency: 3}", "3 ms"),
        ("source: [", "is not valid YAML"),
        ("- a list", "not a recipe"),
    ],
)
def test_a_recipe_that_is_wrong_says_where_and_what_was_meant(laconic, tmp_path, text, said):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    code, _, err = laconic("compress", "--recipe", path, "-o", tmp_path / "out")
    assert code == 2
    assert said in one_sentence(err)
    assert "recipe.yaml" in err


def test_the_recipe_with_the_goal_of_the_command_line_is_shown_and_reads_back(laconic, tmp_path):
    code, out, _ = laconic("compress", "model.onnx", "--data", "x.npz", "--fidelity", "0.999", "--show-recipe")
    assert code == 0
    path = tmp_path / "recipe.yaml"
    path.write_text(out)
    assert laconic("compress", "--recipe", path, "--show-recipe")[0] == 0
    assert "fidelity: 0.999" in out
    assert "quantize.static" in out
    path = tmp_path / "recipe.yaml"
    path.write_text("source: m\ngoal: {max_size: 20 MB, fidelity: 0.9}")
    given = ("--recipe", path, "--max-latency", "3ms", "--fidelity", "0.99", "--max-drop", "1%", "--budget", "30m")
    code, out, _ = laconic("compress", *given, "--show-recipe")
    assert code == 0
    for line in ("max_size: 20000000", "max_latency: 0.003 s", "fidelity: 0.99", "max_drop: 0.01"):
        assert line in out


def test_the_ready_recipes_are_listed_and_good_ones(laconic):
    code, out, _ = laconic("recipes", "--json")
    assert code == 0
    found = json.loads(out)
    tasks = {
        "draft": "text-generation",
        "image-classification": "image-classification",
        "image-text-to-text": "image-text-to-text",
        "text-classification": "text-classification",
        "text-embedding": "text-embedding",
        "text-embedding-small": "text-embedding",
        "text-generation": "text-generation",
        "text-generation-int4": "text-generation",
        "text-generation-small": "text-generation",
    }
    unhealed = ("image-text-to-text", "text-generation", "text-generation-int4")
    assert [each["name"] for each in found] == list(tasks)
    assert all(each["says"] for each in found)
    assert laconic("recipes")[0] == 0
    for each in found:
        code, out, _ = laconic("compress", "my-model", "--recipe", each["name"], "--show-recipe")
        assert code == 0
        assert "source: my-model" in out
        assert f"task: {tasks[each['name']]}" in out
        assert ("distill.heal" in out) == (each["name"] not in unhealed)


def broken_source(folder, trained, kind):
    """A source and its data with one thing wrong: the arguments, and a word of the answer."""
    weights, data = (shutil.copy(path, folder) for path in trained)
    builder = "digits:DigitsNet"
    if kind == "truncated":
        Path(weights).write_bytes(Path(weights).read_bytes()[:-100])
        said = "digits.safetensors"
    elif kind == "no builder":
        return [weights, "--data", data], "--builder"
    elif kind == "another module":
        builder, said = "digits:Nothing", "Nothing"
    elif kind == "no module":
        builder, said = "dgits:DigitsNet", "dgits"
    elif kind == "another architecture":
        builder, said = "models:ResidualNet", "do not fit"
    elif kind == "another shape":
        np.savez(data, image=np.zeros((20, 3, 8, 8), np.float32))
        said = "[batch, 1, 8, 8]"
    elif kind == "another name":
        np.savez(data, picture=np.zeros((20, 1, 8, 8), np.float32))
        said = "picture"
    elif kind == "empty":
        np.savez(data, image=np.zeros((0, 1, 8, 8), np.float32))
        said = "no samples"
    elif kind == "too few":
        np.savez(data, image=np.zeros((2, 1, 8, 8), np.float32))
        said = "different samples"
    elif kind == "no data":
        return [weights, "--builder", builder], "--data"
    else:
        data, said = folder / "missing.npz", "missing.npz"
    return [weights, "--builder", builder, "--data", data], said


@pytest.mark.parametrize(
    "kind",
    [
        "truncated",
        "no builder",
        "another module",
        "no module",
        "another architecture",
        "another shape",
        "another name",
        "empty",
        "too few",
        "no data",
        "missing data",
    ],
)
def test_a_source_or_data_that_is_wrong_leaves_nothing_behind(laconic, trained, tmp_path, kind):
    arguments, said = broken_source(tmp_path, trained, kind)
    out = tmp_path / "new" / "out.laconic"
    code, shown, err = laconic("compress", *arguments, "-o", out)
    assert (code, shown) == (2, "")
    assert said in one_sentence(err)
    assert not out.exists()
    assert not out.parent.exists() or list(out.parent.iterdir()) == []


def test_compress_prints_a_table_and_writes_an_artifact(compress, tmp_path):
    out = tmp_path / "made" / "on" / "the" / "way" / "digits.laconic"
    code, shown, err = compress("-o", out)
    assert code == 0
    for text in ("size", "latency, batch 1", "throughput", "fidelity, mean", "accuracy", "smaller", str(out)):
        assert text in shown
    table = shown.partition("\n\n")[0]
    assert max(map(len, table.splitlines())) <= 80
    steps = err.splitlines()
    assert [line for line in steps if not line.startswith("done ")] == []
    assert len(steps) >= 5
    assert Artifact.load(out).manifest.verdict.failures == []


def test_what_a_step_says_stays_on_one_line_as_it_is(capsys):
    steps = Steps()
    with steps.step("look at [batch, 3]") as step:
        step.note = "x: [batch, 3] " + 100 * "long "
    steps.warn("[onnxruntime] refused " + 100 * "long ")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("done look at [batch, 3]")
    assert "x: [batch, 3] long" in first
    assert second.startswith("note [onnxruntime] refused")


def test_as_json_it_prints_json_alone(compress, tmp_path):
    code, out, _ = compress("-o", tmp_path / "digits.laconic", "--json")
    content = json.loads(out)
    assert code == 0
    assert content["missed"] == []
    assert content["verdict"]["failures"] == []


def test_a_missed_goal_is_exit_code_3_and_the_result_is_kept(compress, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("source: replaced\ngoal: {max_size: 1 kB}")
    out = tmp_path / "digits.laconic"
    code, shown, err = compress("--recipe", recipe, "-o", out)
    assert code == 3
    assert "size is" in err.splitlines()[-1]
    assert "fidelity" in shown
    assert Artifact.load(out).manifest.verdict.failures == []


def test_export_needs_no_samples_and_says_what_it_compared(laconic, trained, tmp_path):
    out = tmp_path / "digits.laconic"
    code, shown, _ = laconic("export", trained[0], "--builder", "digits:DigitsNet", "-o", out)
    assert code == 0
    assert "made-up" in shown
    assert laconic("verify", out)[0] == 0


@pytest.mark.parametrize("place", ["a file", "a folder of something else", "under a file"])
def test_an_output_that_cannot_be_is_refused(compress, tmp_path, place):
    (tmp_path / "notes.txt").write_text("mine")
    out = {"a file": tmp_path / "notes.txt", "under a file": tmp_path / "notes.txt" / "out"}.get(place, tmp_path)
    code, _, err = compress("-o", out)
    assert code == 2
    assert "Choose another --output" in err
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [tmp_path / "notes.txt"]


def test_inspect_and_verify_show_shapes_and_verdict_and_every_check(laconic, tmp_path):
    code, out, err = laconic("inspect", write_artifact(tmp_path / "x.laconic"))
    assert (code, err) == (0, "")
    assert "x: float32 [batch, 3]" in out
    assert "verdict" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, err = laconic("verify", write_artifact(tmp_path / "good.laconic"))
    assert (code, err) == (0, "")
    assert "golden outputs" in out
    code, out, err = laconic("verify", write_artifact(tmp_path / "bad.laconic", verdict=FAILED))
    assert code == 3
    assert "FAILED" in out
    assert "failed verification: verdict" in one_sentence(err)


def test_bench_shows_artifacts_beside_one_another(laconic, tmp_path):
    paths = [write_artifact(tmp_path / f"{name}.laconic") for name in ("one", "two")]
    code, out, _ = laconic("bench", *paths, "--batches", "1,4", "--rounds", "2")
    assert code == 0
    assert out.count("one (fake, float32)") == 2
    assert max(map(len, out.splitlines())) <= 80


def test_bench_against_the_original(compress, laconic, trained, tmp_path):
    out = tmp_path / "digits.laconic"
    compress("-o", out)
    given = ("--original", trained[0], "--builder", "digits:DigitsNet", "--batches", "1", "--rounds", "3", "--json")
    code, shown, _ = laconic("bench", out, *given)
    assert code == 0
    assert [time["engine"].partition(" ")[0] for time in json.loads(shown)] == ["original", "digits"]


@pytest.mark.parametrize("verb", ["inspect", "verify", "bench", "doctor", "schema"])
def test_json_is_json(laconic, tmp_path, verb):
    path = write_artifact(tmp_path / "x.laconic")
    given = {"doctor": ["--json"], "schema": [], "bench": [path, "--rounds", "1", "--json"]}.get(verb, [path, "--json"])
    code, out, _ = laconic(verb, *given)
    assert code == 0
    assert json.loads(out)


def test_doctor_shows_what_works_and_what_to_try(laconic):
    code, out, _ = laconic("doctor")
    assert code == 0
    assert "onnxruntime" in out
    assert "onnxruntime-cuda" in out
    assert "laconic[gpu]" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_reader_that_goes_away_ends_it_quietly():
    done = subprocess.run(
        f"{' '.join(map(repr, COMMAND))} schema | head -c 10", shell=True, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert len(done.stdout) == 10


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 96 kB, where this process may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", path], capture_output=True)
    if made.returncode:
        pytest.skip("mounting takes rights that this process has not")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_is_said_and_nothing_half_written_stays(compress, small_disk):
    out = small_disk / "digits.laconic"
    (small_disk / "filler").write_bytes(bytes(80_000))
    code, shown, err = compress("-o", out)
    assert (code, shown) == (1, "")
    assert "Traceback" not in err
    assert "space" in err.splitlines()[-1]
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_file_that_may_not_grow_is_said_and_nothing_half_written_stays(compress, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    out = tmp_path / "out" / "digits.laconic"
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        code, _, err = compress("-o", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert code == 1, err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("laconic: ")
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_ends_with_130_and_the_next_run_goes_on(compress, tmp_path, number, monkeypatch):
    out = tmp_path / "out" / "digits.laconic"
    step = Steps.step

    @contextmanager
    def stop(steps, title, total=None):
        with step(steps, title, total) as shown:
            if title == "validate":
                os.kill(os.getpid(), number)
            yield shown

    with monkeypatch.context() as patch:
        patch.setattr(Steps, "step", stop)
        code, _, err = compress("-o", out)
    assert code == 130, err
    assert err.splitlines()[-1].startswith("laconic: interrupted")
    assert "Traceback" not in err
    assert list(out.parent.iterdir()) == []
    assert compress("-o", out)[0] == 0
