import json
import os
import shutil

import numpy as np
import pytest
from artifacts import FAILED, write_artifact
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save, save_file

from laconic.artifacts.artifact import Artifact, check_destination, publish_artifact
from laconic.artifacts.golden import flatten_golden
from laconic.artifacts.manifest import GOLDEN, MANIFEST, MEASURED, MODEL, REPORT
from laconic.errors import (
    ArtifactError,
    CorruptArtifact,
    MissingPackage,
    RuntimeFailure,
    UnknownFormat,
    UnprovenArtifact,
    UsageError,
)
from laconic.hashing import digest_file, seal, unseal

ASSETS = {"tokenizer.json": b'{"model": {}}', "preprocess.json": b"{}"}
USED = (MANIFEST, MEASURED, MODEL, GOLDEN, REPORT, *ASSETS)


@pytest.fixture
def folder(tmp_path):
    return write_artifact(tmp_path / "twice.laconic", assets=ASSETS, factor=2.0)


def reseal(folder, **changes):
    content = unseal(folder / MANIFEST) | changes
    (folder / MANIFEST).write_bytes(seal(content))


def test_golden_arrays_are_written_as_they_are_read_however_they_lie_in_memory():
    turned = np.arange(6).reshape(3, 2).T
    assert load(save(flatten_golden([({"x": turned}, {"y": np.array(1.0)})])))["0.input.x"].tolist() == turned.tolist()


def test_a_whole_artifact_loads_and_answers_and_a_copy_is_as_good(folder, tmp_path):
    artifact = Artifact.load(folder)
    artifact.require_proof(artifact.manifest.placements[0])
    with artifact.open() as session:
        assert session.run({"x": np.ones((2, 3), np.float32)})["y"].tolist() == [[2] * 3] * 2
    assert artifact.name == "twice"
    assert artifact.size == sum((folder / name).stat().st_size for name in (MODEL, *ASSETS))
    assert artifact.choose().engine.name == "fake"
    Artifact.load(shutil.copytree(folder, tmp_path / "copy")).open().close()


@pytest.mark.parametrize("name", USED)
def test_one_flipped_byte_is_found_and_the_file_is_named(name, folder):
    whole = (folder / name).read_bytes()
    for position in np.linspace(0, len(whole) - 1, 25).astype(int):
        if whole[position : position + 1].isspace() and name in (MANIFEST, MEASURED):
            continue
        damaged = bytearray(whole)
        damaged[position] ^= 1
        (folder / name).write_bytes(damaged)
        with pytest.raises(ArtifactError, match=name):
            Artifact.load(folder)


@pytest.mark.parametrize("name", [MEASURED, MODEL, GOLDEN, REPORT, *ASSETS])
def test_a_missing_file_is_named(name, folder):
    (folder / name).unlink()
    with pytest.raises(CorruptArtifact, match=name):
        Artifact.load(folder)


@pytest.mark.parametrize("name", USED)
def test_a_file_cut_short_is_named(name, folder):
    (folder / name).write_bytes((folder / name).read_bytes()[:-3])
    with pytest.raises(CorruptArtifact, match=name):
        Artifact.load(folder)


def test_a_report_that_was_never_written_is_not_missed(folder):
    (folder / REPORT).unlink()
    (folder / MEASURED).write_bytes(seal(unseal(folder / MEASURED) | {"report": None}))
    assert Artifact.load(folder).measured.report is None


@pytest.mark.parametrize("change", ["link", "text", "pipe"])
def test_a_report_that_was_replaced_after_the_artifact_was_loaded_is_not_read(change, folder, tmp_path):
    artifact = Artifact.load(folder)
    whole = artifact.read_report()
    (folder / REPORT).unlink()
    if change == "link":
        (tmp_path / "secret").write_bytes(whole)
        (folder / REPORT).symlink_to(tmp_path / "secret")
    elif change == "text":
        (folder / REPORT).write_text("secret")
    else:
        os.mkfifo(folder / REPORT)
    with pytest.raises(CorruptArtifact, match=REPORT):
        artifact.read_report()


@pytest.mark.parametrize("name", [".", "elsewhere", "twice.laconic/model.onnx"])
def test_what_is_no_artifact_is_refused_with_the_way_to_make_one(name, folder):
    with pytest.raises(ArtifactError, match="`laconic compress` makes one"):
        Artifact.load(folder.parent / name)


@pytest.mark.parametrize("number", [0, 4, "1", None])
def test_another_format_is_refused_by_name(number, folder):
    reseal(folder, format=number, what_only_a_newer_version_knows=1)
    with pytest.raises(UnknownFormat, match=f"format {number!r}; this version of Laconic reads formats 1 to 3"):
        Artifact.load(folder)


def test_a_manifest_that_lacks_a_key_is_refused(folder):
    content = unseal(folder / MANIFEST)
    del content["task"]
    (folder / MANIFEST).write_bytes(seal(content))
    with pytest.raises(CorruptArtifact, match="task"):
        Artifact.load(folder)


def test_a_manifest_cannot_reach_out_of_its_folder(folder, tmp_path):
    (tmp_path / "secret").write_text("x")
    files = unseal(folder / MANIFEST)["files"] | {"../secret": digest_file(tmp_path / "secret").model_dump()}
    reseal(folder, files=files)
    with pytest.raises(CorruptArtifact, match=r"\.\./secret"):
        Artifact.load(folder)


@pytest.mark.parametrize(("verdict", "message"), [(None, "has no verdict"), (FAILED, "mean is 0.5, required 0.9")])
def test_an_artifact_without_proof_is_refused_when_proof_is_asked_for(verdict, message, tmp_path):
    artifact = Artifact.load(write_artifact(tmp_path / "a", verdict=verdict))
    with pytest.raises(UnprovenArtifact, match=message):
        artifact.require_proof(artifact.manifest.placements[0])


@pytest.mark.parametrize("answer", [-1.0, np.nan])
def test_an_engine_that_answers_otherwise_is_refused_when_it_opens(answer, tmp_path):
    folder = write_artifact(tmp_path / "a")
    x = np.ones((1, 3), np.float32)
    save_file({"0.input.x": x, "0.output.y": x * np.float32(answer)}, folder / GOLDEN)
    files = unseal(folder / MANIFEST)["files"] | {GOLDEN: digest_file(folder / GOLDEN).model_dump()}
    reseal(folder, files=files)
    with pytest.raises(UnprovenArtifact, match="does not give its golden outputs in fake"):
        Artifact.load(folder).open()


def test_an_unknown_engine_is_refused_and_without_any_the_way_to_one_is_named(folder, monkeypatch):
    with pytest.raises(UsageError, match="Did you mean 'openvino'"):
        Artifact.load(folder).open("openvin")
    pytest.importorskip("onnxruntime")
    with pytest.raises(RuntimeFailure, match=MODEL):
        Artifact.load(folder).open("onnxruntime")

    def absent(name):
        raise MissingPackage(name)

    monkeypatch.setattr("laconic.artifacts.artifact.make_runtime", absent)
    with pytest.raises(MissingPackage, match=r"pip install 'laconic\[cpu\]'"):
        Artifact.load(folder).choose()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=8,
)
contents = st.dictionaries(st.text(st.characters(codec="utf-8")).filter(lambda key: key != "sha256"), json_values)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=contents)
def test_what_is_sealed_unseals(content, tmp_path):
    path = tmp_path / "sealed.json"
    path.write_bytes(seal(content))
    assert unseal(path) == content
    assert seal(content) == path.read_bytes()
    assert seal(dict(reversed(content.items()))) == path.read_bytes()


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"sha256": "0"}', "\xff", '{"sha256": ["x"], "a": 1}'])
def test_what_was_never_sealed_does_not_unseal(text, tmp_path):
    (tmp_path / "m.json").write_text(text, encoding="latin-1")
    with pytest.raises(CorruptArtifact, match=r"m\.json"):
        unseal(tmp_path / "m.json")


def test_an_artifact_takes_the_place_of_an_earlier_one_or_of_nothing(folder, tmp_path):
    fresh = write_artifact(tmp_path / "work", factor=3.0)
    publish_artifact(fresh, folder)
    assert not fresh.exists()
    assert json.loads(Artifact.load(folder).model.read_text()) == {"factor": 3.0}
    assert not (folder / "tokenizer.json").exists(), "nothing of the earlier one stays"
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name]
    publish_artifact(write_artifact(tmp_path / "work"), tmp_path / "new.laconic")
    (tmp_path / "empty.laconic").mkdir()
    publish_artifact(write_artifact(tmp_path / "work"), tmp_path / "empty.laconic")
    Artifact.load(tmp_path / "new.laconic")
    Artifact.load(tmp_path / "empty.laconic")


@pytest.mark.parametrize("failing", ["rename", "second rename"])
def test_an_interrupted_publication_never_leaves_half(failing, folder, tmp_path, monkeypatch):
    """Wherever it stops, a whole artifact, the old or the new one, is still on disk."""
    fresh = write_artifact(tmp_path / "work", factor=3.0)
    calls = []
    rename = type(folder).rename

    def interrupted(path, target):
        calls.append(path)
        if len(calls) == (1 if failing == "rename" else 2):
            raise OSError("the disk went away")
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(type(folder), "rename", interrupted)
        with pytest.raises(OSError, match="went away"):
            publish_artifact(fresh, folder)
    Artifact.load(fresh)
    assert Artifact.load(folder).manifest.files, "the earlier artifact is back in its place"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_artifact_is_never_overwritten(kind, tmp_path):
    place = tmp_path / "thesis"
    if kind == "file":
        place.write_text("years of work")
    else:
        place.mkdir()
        (place / "chapter.txt").write_text("years of work")
    with pytest.raises(UsageError, match="it will not be overwritten"):
        check_destination(place)
    with pytest.raises(UsageError, match="it will not be overwritten"):
        publish_artifact(write_artifact(tmp_path / "work"), place)
