"""Artifacts by name and by address: named, downloaded once, and refused where they are not what they should be."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from artifacts import write_artifact, write_keys
from served import request_of, running

from laconic.artifacts.artifact_signature import read_public_key, sign_artifact
from laconic.artifacts.download import fetch_artifact
from laconic.artifacts.manifest import MANIFEST
from laconic.errors import ArtifactError, CorruptArtifact, LaconicError, MissingPackage, UnsignedArtifact, UsageError
from laconic.hashing import digest_file
from serve.http.app import create_app
from serve.model_repository.artifact_sources import locate_artifacts
from serve.settings.server_settings import Settings


class Store(SimpleHTTPRequestHandler):
    """A web server's folder, which notes what it sends, and fails as it is told to."""

    sent: list[str]
    faults: dict[str, str]
    """By the end of a path: `cut`, `short`, `stall` or `once` (cut the first time)."""

    def do_GET(self) -> None:
        self.sent.append(self.path)
        fault = next((fault for name, fault in self.faults.items() if self.path.endswith(name)), "")
        if fault == "stall":
            time.sleep(3)
            return
        if fault in ("cut", "once", "short"):
            content = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content) - (fault == "short")))
            self.end_headers()
            self.wfile.write(content[:-1])
            self.close_connection = True
            self.faults.clear() if fault == "once" else None
            return
        super().do_GET()

    def log_message(self, *args: Any) -> None:
        pass

    def end_headers(self) -> None:
        if self.command == "HEAD" and Path(path := self.translate_path(self.path)).is_file():
            self.send_header("ETag", digest_file(Path(path)).sha256)
        super().end_headers()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[str, Path, type[Store]]]:
    """The address of an artifact on a server, its folder, and the server's notes and faults."""
    folder = write_artifact(tmp_path / "store" / "twice.laconic")
    handler = type("Store", (Store,), {"sent": [], "faults": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path / "store")))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/twice.laconic", folder, handler
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def digest(folder: Path) -> str:
    return digest_file(folder / MANIFEST).sha256


def test_an_artifact_is_served_under_the_name_that_it_is_given(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "a=b.laconic")
    settings = Settings(require=("minilm",))
    assert locate_artifacts([f"minilm={path}", path, str(path.parent / "x.y")], settings) == {
        "minilm": path,
        "a=b": path,
        "x.y": path.parent / "x.y",
    }
    for name in ("a b", "n" * 129, "-a"):
        with pytest.raises(UsageError, match=r"cannot be the name of a model\. A name has up to 128 letters"):
            locate_artifacts([f"{name}={path}"], settings)
    with pytest.raises(UsageError, match=r"both be served as 'a=b'.*NAME=ARTIFACT"):
        locate_artifacts([path, str(path)], Settings())
    with pytest.raises(UsageError, match="--require names 'other'"):
        create_app([f"minilm={path}"], Settings(require=("other",)))
    app = create_app([f"minilm={path}"])
    assert [model.name for model in app.repository] == ["minilm"]
    app.repository.close()


def test_a_downloaded_artifact_is_served_and_nothing_is_downloaded_twice(store: Any, cache: Path) -> None:
    address, folder, notes = store
    with running(f"named={address}", sha256=digest(folder)) as server, server.client() as http:
        assert http.post("/v2/models/named/infer", json=request_of([[1, 2, 3]])).status_code == 200
    assert len(notes.sent) == len(set(notes.sent)) == len(list(folder.iterdir()))
    before = list(notes.sent)
    again = fetch_artifact(address, sha256=digest(folder), timeout=5)
    assert again == cache / f"artifact-{digest(folder)}"
    assert notes.sent == before
    assert {path.name for path in again.iterdir()} == {path.name for path in folder.iterdir()}


def test_without_a_digest_the_store_says_whether_the_artifact_is_still_the_same(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder, notes = store
    monkeypatch.setattr("laconic.artifacts.download.UNENCRYPTED", "none")
    assert fetch_artifact(address, sha256=None, timeout=5).name == f"artifact-{digest(folder)}"
    before = list(notes.sent)
    assert len(before) == len(set(before))
    assert fetch_artifact(f"{address}/", sha256=None, timeout=5).name == f"artifact-{digest(folder)}"
    assert notes.sent == before


@pytest.mark.parametrize(
    ("file", "fault", "error", "message"),
    [
        (MANIFEST, "stall", ArtifactError, "manifest.json cannot be downloaded: no byte came within 0.1 s .3 tries"),
        ("model.onnx", "stall", ArtifactError, "model.onnx cannot be downloaded: no byte came"),
        ("model.onnx", "cut", ArtifactError, "model.onnx cannot be downloaded: .*3 tries"),
        ("model.onnx", "short", CorruptArtifact, "bytes; expected"),
    ],
)
def test_what_stalls_or_is_truncated_is_refused_in_time_and_leaves_nothing(
    store: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, file: str, fault: str, error: type, message: str
) -> None:
    address, folder, notes = store
    monkeypatch.setattr("laconic.artifacts.download.PAUSE", 0.01)
    notes.faults[file] = fault
    started = time.monotonic()
    with pytest.raises(error, match=message):
        fetch_artifact(address, sha256=digest(folder), timeout=0.3)
    assert time.monotonic() - started < 2.5
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_server_whose_certificate_is_unknown_or_that_is_not_there_is_named(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.artifacts.download.PAUSE", 0.01)
    with pytest.raises(ArtifactError, match=r"manifest.json cannot be downloaded: .*SSL"):
        fetch_artifact(store[0].replace("http:", "https:"), sha256=None, timeout=5)
    with pytest.raises(ArtifactError, match=r"manifest.json cannot be downloaded: .*Connect"):
        fetch_artifact("http://127.0.0.1:9/twice.laconic", sha256="0" * 64, timeout=5)


def test_a_download_that_breaks_off_is_tried_again(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    address, folder, notes = store
    monkeypatch.setattr("laconic.artifacts.download.PAUSE", 0.01)
    notes.faults["model.onnx"] = "once"
    assert fetch_artifact(address, sha256=digest(folder), timeout=5).is_dir()
    assert len(notes.sent) == len(set(notes.sent)) + 1


@pytest.mark.parametrize(
    ("address", "settings", "message"),
    [
        ("{store}/nothing", {"sha256": "0" * 64}, "is no artifact: there is no manifest.json"),
        ("{store}", {"sha256": "0" * 64}, "is another artifact: the sha256 of its manifest is"),
        ("{store}", {}, "is not encrypted: give the digest"),
        ("ftp://host/twice.laconic", {}, "is no address of an artifact: expected s3://"),
        ("https://host/twice.laconic?token=1", {}, "without a query"),
        ("{folder}", {"sha256": "0" * 64}, "is another artifact than --sha256 says"),
        ("{folder}", {"sha256": {"other": "0" * 64}}, "--sha256 names 'other'"),
        ("{folder}", {"sha256": "0" * 64, "models": "/tmp"}, "--sha256 has a digest without a name"),
    ],
)
def test_what_is_no_artifact_or_another_one_is_refused_with_exit_code_2(
    store: Any, address: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaconicError, match=message) as caught:
        create_app([address.format(store=store[0], folder=store[1])], Settings(**settings))
    assert caught.value.exit_code == 2


def test_a_digest_holds_for_versions_and_in_the_watched_folder(tmp_path: Path) -> None:
    first, second = (write_artifact(tmp_path / "models/twice" / version, factor=float(version)) for version in "12")
    with pytest.raises(CorruptArtifact, match=r"twice/2 is another artifact than --sha256 says"):
        create_app([tmp_path / "models/twice"], Settings(sha256=digest(first)))
    settings: Any = {"models": tmp_path / "models", "poll": 0.05}
    with running(sha256={"twice": digest(second)}, **settings) as server:
        assert server.app.repository.get("twice").version == "2"
    with running(sha256={"twice": digest(first)}, **settings) as server:
        assert server.app.repository.get("twice").version == "1"


def test_a_file_system_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingPackage, match="gs:// needs the package gcsfs"):
        fetch_artifact("gs://bucket/twice.laconic", sha256=None, timeout=5)


def test_a_signed_artifact_is_downloaded_with_every_file_that_was_signed(
    store: Any, cache: Path, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography", reason="the extra sign")
    private, public = write_keys(tmp_path)
    address, folder, notes = store
    options: Any = {"sha256": digest(folder), "timeout": 5, "signer": read_public_key(public)}
    with pytest.raises(UnsignedArtifact, match=r"is not signed: there is no model.sig"):
        fetch_artifact(address, **options)
    fetch_artifact(address, sha256=digest(folder), timeout=5)  # an unsigned copy is another one
    (folder / "README.md").write_text("signed, too")
    sign_artifact(folder, private)
    path = fetch_artifact(address, **options)
    assert {each.name for each in path.iterdir()} == {each.name for each in folder.iterdir()}
    before = list(notes.sent)
    app = create_app([address], Settings(sha256=digest(folder), require_signature=public))
    app.repository.close()
    assert notes.sent == before
    write_artifact(folder, factor=3)
    with pytest.raises(UnsignedArtifact, match="differs from the file that was signed"):
        fetch_artifact(address, **options | {"sha256": digest(folder)})
    assert [each for each in cache.iterdir() if each.is_dir() and digest(folder) in each.name] == []


def test_an_artifact_in_the_cache_needs_neither_network_nor_fsspec(store: Any) -> None:
    address, folder, _ = store
    path = fetch_artifact(address, sha256=digest(folder), timeout=5)
    code = (
        "import sys; sys.modules['fsspec'] = None; from laconic.artifacts.download import fetch_artifact;"
        "print(fetch_artifact('s3://bucket/x', sha256=sys.argv[1], timeout=1))"
    )
    command = [sys.executable, "-c", code, digest(folder)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == str(path)


def test_digests_are_read_from_options_and_a_variable() -> None:
    assert Settings(sha256=["a=" + "0" * 64]).sha256 == Settings(sha256="a=" + "0" * 64).sha256 == {"a": "0" * 64}
    assert Settings(sha256="0" * 64).sha256 == {"": "0" * 64}
