"""Models below an address of an object store: followed as in a folder, and each downloaded once."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from artifacts import write_artifact
from served import eventually, running
from test_serve_models import answer, index

from laconic.artifacts.artifact import Artifact
from laconic.artifacts.manifest import MODEL
from laconic.errors import ArtifactError, UsageError
from serve.http.app import create_app
from serve.model_repository.model_store import find_artifacts
from serve.settings.server_settings import Settings

ADDRESS = "memory://bucket/models"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store in memory; what is put there, by the name of its folder."""
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("laconic.artifacts.download.ADDRESS", re.compile("memory://.+"))
    monkeypatch.setattr("serve.model_repository.model_store.LISTED", ("memory://",))
    filesystem = fsspec.filesystem("memory")

    def put(name: str, factor: float, *, broken: bool = False) -> None:
        folder = write_artifact(tmp_path / "drafts" / f"{name}.{factor:g}", factor=factor)
        if broken:
            (folder / MODEL).write_text("{ }")
        for path in folder.iterdir():
            filesystem.pipe_file(f"{ADDRESS}/{name}/{path.name}", path.read_bytes())

    put.filesystem = filesystem  # type: ignore[attr-defined]
    yield put
    filesystem.rm("/bucket", recursive=True)


def test_models_follow_what_lies_below_an_address(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store("twice.laconic", 2)
    loads: list[Path] = []
    load = Artifact.load
    monkeypatch.setattr(Artifact, "load", lambda path: (loads.append(path), load(path))[1])
    with running(models=f"{ADDRESS}/", poll=0.05) as server, server.client() as client:
        assert answer(client) == ("1", 2)
        assert loads[0].parent == tmp_path / "cache"
        store("twice.laconic", 3)
        assert eventually(lambda: answer(client) == ("1", 3))
        store("other/2", 4)
        store("other/1", 5)
        assert eventually(lambda: index(client).get(("other", "2")) == ("READY", ""))
        store("twice.laconic", 6, broken=True)
        assert eventually(lambda: "model.onnx has 3 bytes" in index(client)["twice", "1"][1])
        assert answer(client) == ("1", 3)
        store.filesystem.rm(f"{ADDRESS}/other", recursive=True)
        assert eventually(lambda: ("other", "2") not in index(client))
    assert len(loads) == len(set(loads)) == 3  # what was broken was not even downloaded whole


def test_an_address_that_is_missing_is_an_artifact_or_cannot_be_watched_is_refused(store: Any) -> None:
    store("twice.laconic", 2)
    for address, message in (
        ("memory://bucket/none", "there is nothing at memory://bucket/none"),
        (f"{ADDRESS}/twice.laconic", "is an artifact, and not a place of several"),
        ("https://host/models", "cannot be watched: expected a folder, or an address of"),
    ):
        with pytest.raises(UsageError, match=message):
            create_app([], Settings(models=address))
    store("twice.laconic", 3, broken=True)
    with pytest.raises(ArtifactError, match=r"nothing in memory://bucket/models can be served: .*3 bytes"):
        create_app([], Settings(models=ADDRESS))


def test_folders_of_artifacts_and_their_versions_are_found_among_names() -> None:
    names = ["manifest.json", "a/manifest.json", "a/1/manifest.json", "b/2/manifest.json", "b/x/manifest.json"]
    hidden = [".c/manifest.json", "d/3/4/manifest.json", "e/model.onnx"]
    assert find_artifacts([*names, *hidden]) == {"a": "1", "b/2": "2"}
