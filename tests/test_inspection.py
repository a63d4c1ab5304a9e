"""What is said of artifacts: whole ones, damaged ones, several side by side."""

import json
import subprocess
import sys

import pytest
from artifacts import FAILED, X, write_artifact

from laconic.artifacts.artifact import Artifact
from laconic.artifacts.bench import bench
from laconic.artifacts.inspection import count_kernels, summarize, verify
from laconic.artifacts.manifest import GOLDEN, MANIFEST, MEASURED, MODEL, REPORT, Manifest
from laconic.commands.artifacts import parse_sizes
from laconic.errors import ArtifactError, UsageError
from laconic.hashing import digest_file, seal, unseal


def verdicts(checks):
    return {check.check: check.passed for check in checks}


def flip(path, place=-2):
    """One bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_summary_is_json_and_says_what_the_artifact_is(tmp_path):
    artifact = Artifact.load(write_artifact(tmp_path / "twice.laconic"))
    found = json.loads(json.dumps(summarize(artifact)))
    assert found["name"] == "twice"
    assert found["task"] == "tensors"
    assert found["size"] == artifact.size
    assert found["verdict"]["state"] == "passed"
    assert found["verdict"]["failures"] == []
    assert found["inputs"][0]["shape"] == ["batch", 3]
    assert found["measured"]["knee"] == 4
    assert "files" not in found
    assert summarize(Artifact.load(write_artifact(tmp_path / "x.laconic", verdict=None)))["verdict"] is None


def test_an_engine_that_refuses_the_model_or_tells_nothing_of_its_kernels_is_not_guessed_at(tmp_path):
    path = write_artifact(tmp_path / "x.laconic")
    content = unseal(path / MANIFEST) | {"precision": {"a": "int8", "b": "int8", "c": "float32"}}
    (path / MANIFEST).write_bytes(seal(content))
    assert count_kernels(Artifact.load(path)) == {
        "engine": "fake 1",
        "layers": {"int8": {"not told": 2}, "float32": {"not told": 1}},
        "audit": None,
    }
    artifact = Artifact.load(write_artifact(tmp_path / "x.laconic"))
    found = count_kernels(artifact, "onnxruntime")
    assert found["layers"] == {}
    assert "onnxruntime refused" in found["error"]


def test_a_whole_artifact_passes_every_check_in_another_version_of_the_engine_too(tmp_path):
    path = write_artifact(tmp_path / "x.laconic")
    assert verdicts(verify(path)) == dict.fromkeys(
        (MANIFEST, MODEL, GOLDEN, MEASURED, REPORT, "other files", "weights", "golden outputs", "engine", "verdict"),
        True,
    )
    path = write_artifact(tmp_path / "x.laconic")
    (path / MANIFEST).write_bytes(seal(unseal(path / MANIFEST) | {"versions": {"fake": "0.9"}}))
    (engine,) = [check for check in verify(path) if check.check == "engine"]
    assert engine.passed
    assert engine.found == "fake 1; recorded: 0.9"


@pytest.mark.parametrize("name", [MODEL, GOLDEN, MEASURED, REPORT])
def test_one_flipped_bit_fails_the_check_of_that_file(tmp_path, name):
    path = write_artifact(tmp_path / "x.laconic")
    flip(path / name)
    failed = [name for name, passed in verdicts(verify(path)).items() if not passed]
    assert failed == [name, "golden outputs"]


def test_every_damage_is_named_unless_it_is_of_the_manifest(tmp_path):
    path = write_artifact(tmp_path / "x.laconic")
    flip(path / MODEL)
    (path / GOLDEN).unlink()
    (path / REPORT).unlink()
    found = verdicts(verify(path))
    assert {name for name, passed in found.items() if not passed} == {MODEL, GOLDEN, REPORT, "golden outputs"}
    path = write_artifact(tmp_path / "x.laconic")
    flip(path / MANIFEST, 40)
    (check,) = verify(path)
    assert (check.check, check.passed) == (MANIFEST, False)
    path = write_artifact(tmp_path / "x.laconic")
    (path / MANIFEST).write_bytes(seal(unseal(path / MANIFEST) | {"format": 7}))
    (check,) = verify(path)
    assert "format 7" in check.found
    with pytest.raises(ArtifactError, match=r"no manifest\.json"):
        verify(tmp_path)


def test_other_answers_than_the_golden_ones_and_a_failed_verdict_fail(tmp_path):
    path = write_artifact(tmp_path / "x.laconic")
    (path / MODEL).write_text(json.dumps({"factor": -2.0}))
    content = unseal(path / MANIFEST)
    content["files"][MODEL] = digest_file(path / MODEL).model_dump()
    (path / MANIFEST).write_bytes(seal(content))
    (check,) = [check for check in verify(path) if not check.passed]
    assert check.check == "golden outputs"
    assert "agreement of y -" in check.found
    (check,) = [check for check in verify(write_artifact(tmp_path / "x.laconic", verdict=FAILED)) if not check.passed]
    assert check.check == "verdict"
    assert "mean is 0.5" in check.found


def test_batch_sizes_are_whole_numbers():
    assert parse_sizes("--batches", "1,8, 32,8") == (1, 8, 32)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1;2", "-4", "1.5", "many"])
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match="1,8,32"):
        parse_sizes("--batches", text)


def test_artifacts_of_like_inputs_are_timed_side_by_side_under_names_that_tell_them_apart(tmp_path):
    paths = [
        write_artifact(tmp_path / "fast.laconic"),
        write_artifact(tmp_path / "slow.laconic", seconds=0.02),
        write_artifact(tmp_path / "elsewhere" / "fast.laconic"),
    ]
    found = bench(paths, batches=(1, 2), rounds=3)
    assert [(time.engine, time.batch) for time in found] == [
        (name, batch)
        for batch in (1, 2)
        for name in ("fast (fake, float32)", "slow (fake, float32)", f"{paths[2]} (fake, float32)")
    ]
    fast, slow = found[:2]
    assert fast.speedup == 1
    assert slow.seconds > 0.02
    assert slow.speedup < 0.5
    first, other = (write_artifact(tmp_path / name) for name in ("a.laconic", "b.laconic"))
    content = Manifest.model_validate(unseal(other / MANIFEST))
    free = X.model_copy(update={"shape": ("batch", "width")})
    (other / MANIFEST).write_bytes(seal(content.model_copy(update={"inputs": (free,)}).model_dump(mode="json")))
    with pytest.raises(UsageError, match=r"takes \['\[batch, width\]'\]"):
        bench([first, other])


def test_without_the_original_torch_is_not_loaded(tmp_path):
    path = write_artifact(tmp_path / "x.laconic")
    code = (
        "import sys, pathlib; from laconic.artifacts.artifact import Artifact;"
        "from laconic.artifacts.bench import bench;"
        "from laconic.artifacts.inspection import verify, count_kernels;"
        f"p = pathlib.Path({str(path)!r}); bench([p], rounds=1); verify(p); count_kernels(Artifact.load(p));"
        "assert not {'torch', 'onnx', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True)
