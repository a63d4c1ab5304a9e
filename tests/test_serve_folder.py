"""What may lie in a watched folder beside good artifacts: entries that cannot be read, names that collide."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from artifacts import write_artifact
from served import eventually, running
from test_serve_models import answer, index, serving

from laconic.artifacts.artifact import Artifact
from laconic.errors import ArtifactError, UsageError
from serve.model_repository.watched_folder import WatchedFolder

LOST = "lost+found"


def make_unreadable(path: Path) -> Path:
    """Make an entry that cannot be looked into, not even by root: a link to a name that no file system takes."""
    path.symlink_to("x" * 300)
    return path


def publish(path: Path, factor: float) -> Path:
    """Put an artifact in place as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = write_artifact(path.with_name(f".{path.name}.{factor:g}"), factor=factor)
    if path.exists():
        path.rename(path.with_name(f".{path.name}.old"))
    return draft.rename(path)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A list that grows with each look at the folder."""
    seen: list[int] = []
    synchronize = WatchedFolder._synchronize

    def count(folder: WatchedFolder, *arguments: object, **options: object) -> None:
        synchronize(folder, *arguments, **options)  # type: ignore[arg-type]
        seen.append(len(seen))

    monkeypatch.setattr(WatchedFolder, "_synchronize", count)
    return seen


def test_an_entry_that_cannot_be_read_is_unavailable_and_keeps_nothing_else_from_being_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, looks: list[int]
) -> None:
    make_unreadable(tmp_path / LOST)
    publish(tmp_path / "twice.laconic", 2)
    with caplog.at_level(logging.ERROR, "laconic.serve"), serving(tmp_path) as (_, client):
        assert answer(client) == ("1", 2)
        state, reason = index(client)[LOST, "1"]
        assert state == "UNAVAILABLE"
        assert reason == f"{tmp_path / LOST} cannot be read: File name too long"
        assert client.get("/v2/health/ready").status_code == 200
        publish(tmp_path / "twice.laconic", 3)
        assert eventually(lambda: answer(client) == ("1", 3))
        refused = client.post(f"/v2/repository/models/{LOST}/load")
        assert (refused.status_code, "cannot be read" in refused.json()["error"]) == (400, True)
        count = len(looks)
        assert eventually(lambda: len(looks) > count + 3)
        assert [record.message for record in caplog.records] == [f"model {LOST} is not loaded: {reason}"]
        (tmp_path / LOST).unlink()
        assert eventually(lambda: list(index(client)) == [("twice", "1")])


def test_a_model_whose_folder_cannot_be_read_any_more_is_served_as_before(tmp_path: Path, looks: list[int]) -> None:
    publish(tmp_path / "twice" / "1", 1)
    publish(tmp_path / "twice" / "2", 2)
    with serving(tmp_path) as (_, client):
        (tmp_path / "twice").rename(tmp_path / ".aside")
        make_unreadable(tmp_path / "twice")
        assert eventually(lambda: "cannot be read" in index(client)["twice", "2"][1])
        count = len(looks)
        assert eventually(lambda: len(looks) > count + 3)
        assert answer(client) == ("2", 2)
        (tmp_path / "twice").unlink()
        (tmp_path / ".aside").rename(tmp_path / "twice")
        assert eventually(lambda: index(client) == {("twice", "2"): ("READY", "")})


def test_a_version_that_cannot_be_read_leaves_the_older_one_served(tmp_path: Path) -> None:
    publish(tmp_path / "twice" / "1", 1)
    with serving(tmp_path) as (_, client):
        make_unreadable(tmp_path / "twice" / "2")
        assert eventually(lambda: index(client).get(("twice", "2"), ("",))[0] == "UNAVAILABLE")
        assert "File name too long" in index(client)["twice", "2"][1]
        assert answer(client) == ("1", 1)


def test_a_volume_that_holds_nothing_but_lost_and_found_is_an_empty_one(tmp_path: Path) -> None:
    make_unreadable(tmp_path / LOST)
    with serving(tmp_path) as (_, client):
        assert client.get("/v2/health/live").status_code == 200
        refused = client.get("/v2/health/ready")
        assert refused.status_code == 503
        assert f"model '{LOST}' is not ready: " in refused.json()["error"]
        publish(tmp_path / "twice.laconic", 2)
        assert eventually(lambda: client.get("/v2/health/ready").status_code == 200)


def test_a_folder_that_cannot_be_read_for_a_while_is_reported_once_and_watched_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []

    def fail(path: Path) -> None:
        looked.append(path)
        raise SystemExit if len(looked) > 4 else OSError(5, "Input/output error")

    publish(tmp_path / "twice.laconic", 2)
    with caplog.at_level(logging.ERROR, "laconic.serve"), serving(tmp_path) as (_, client):
        with monkeypatch.context() as patch:
            patch.setattr("serve.model_repository.model_store.list_models", fail)
            assert eventually(lambda: len(looked) > 8)
        assert [record.message for record in caplog.records] == [
            f"{tmp_path} cannot be read: Input/output error",
            f"the change of {tmp_path} failed: SystemExit",
        ]
        publish(tmp_path / "twice.laconic", 3)
        assert eventually(lambda: answer(client) == ("1", 3))


def test_only_the_suffix_laconic_is_left_out_of_a_name(tmp_path: Path) -> None:
    for factor, name in enumerate(("bge-v1.0", "bge-v1.5.laconic", "llama.v1", "llama.v2"), 2):
        publish(tmp_path / name, factor)
    with serving(tmp_path) as (_, client):
        names = ("bge-v1.0", "bge-v1.5", "llama.v1", "llama.v2")
        assert [answer(client, f"/v2/models/{name}/infer")[1] for name in names] == [2, 3, 4, 5]
        assert list(index(client)) == [(name, "1") for name in names]
    with running(tmp_path / "llama.v1", tmp_path / "llama.v2", tmp_path / "bge-v1.5.laconic") as server:
        assert sorted(model.name for model in server.app.repository) == ["bge-v1.5", "llama.v1", "llama.v2"]
    assert Artifact.load(tmp_path / "bge-v1.0").name == "bge-v1.0"
    assert Artifact.load(tmp_path / "bge-v1.5.laconic").name == "bge-v1.5"


def test_two_folders_of_one_name_are_refused_and_both_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    both = [publish(folder / "twice", 2), publish(folder / "twice.laconic", 3)]
    for refused in (running(*both), running(models=folder)):
        with pytest.raises((UsageError, ArtifactError)) as caught, refused:
            pass
        assert all(f"{path} " in str(caught.value) for path in both)
        assert "would both be served as 'twice'. Rename one" in str(caught.value)
    publish(folder / "other.laconic", 4)
    with serving(folder) as (_, client):
        assert answer(client, "/v2/models/other/infer") == ("1", 4)
        state, reason = index(client)["twice", "1"]
        assert state == "UNAVAILABLE"
        assert all(str(path) in reason for path in both)


def test_a_model_stays_served_when_another_folder_of_its_name_appears(tmp_path: Path) -> None:
    publish(tmp_path / "twice.laconic", 2)
    with serving(tmp_path) as (_, client):
        second = publish(tmp_path / "twice" / "7", 7).parent
        assert eventually(lambda: "would both be served" in index(client)["twice", "1"][1])
        assert answer(client) == ("1", 2)
        second.rename(tmp_path / "thrice")
        assert eventually(lambda: index(client) == {("thrice", "7"): ("READY", ""), ("twice", "1"): ("READY", "")})


def test_a_folder_in_the_way_of_a_model_given_by_path_is_named_with_it(tmp_path: Path) -> None:
    given = write_artifact(tmp_path / "given" / "twice.laconic")
    other = publish(tmp_path / "models" / "twice.laconic", 3)
    with serving(tmp_path / "models", given) as (_, client):
        assert answer(client) == ("1", 2)
        reason = index(client)["twice", "1"][1]
        assert f"{given} and {other} would both be served as 'twice'" in reason


def test_a_folder_whose_name_is_not_utf_8_is_unavailable(tmp_path: Path) -> None:
    publish(tmp_path / "twice.laconic", 2)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/na\xffme.laconic"))
    write_artifact(tmp_path / ".draft").rename(odd)
    with serving(tmp_path) as (_, client):
        assert answer(client) == ("1", 2)
        state, reason = index(client)["na\\udcffme", "1"]
        assert (state, "is not UTF-8. Rename the folder" in reason) == ("UNAVAILABLE", True)
    with pytest.raises(UsageError, match="not UTF-8"), running(odd):
        pass
