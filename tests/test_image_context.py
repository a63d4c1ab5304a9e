"""Build contexts of images that hold artifacts."""

import json
import re
import subprocess
from pathlib import Path

import psutil
import pytest
from artifacts import write_artifact, write_keys

from laconic.artifacts.artifact_signature import check_signature, read_public_key, sign_artifact
from laconic.artifacts.image_context import write_context
from laconic.artifacts.manifest import MANIFEST, MODEL
from laconic.errors import CorruptArtifact, UnsignedArtifact, UsageError
from laconic.hashing import digest_file
from serve.http.app import create_app
from serve.settings.server_settings import Settings


def list_context(folder: Path) -> dict[str, tuple[int, float, bytes]]:
    paths = [folder, *sorted(folder.rglob("*"))]
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.stat().st_mtime, path.is_file() and path.read_bytes())
        for path in paths
    }


def test_one_artifact_lies_at_models_and_several_in_folders_and_the_same_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = (write_artifact(tmp_path / name, factor=2.0) for name in ("one.laconic", "two"))
    (one / "README.md").write_text("not of the artifact")
    digest = digest_file(one / MANIFEST).sha256
    assert write_context([one], tmp_path / "image") == {"one": digest}
    before = list_context(tmp_path / "image")
    assert "models/manifest.json" in before
    assert "models/README.md" not in before
    dockerfile = (tmp_path / "image/Dockerfile").read_text()
    assert f'LABEL laconic.model.one="sha256:{digest}"' in dockerfile
    command = json.loads(re.findall(r"^CMD (.*)", dockerfile, re.MULTILINE)[0])
    assert command == ["one=/models", "--sha256", f"one={digest}"]
    (one / MODEL).touch(0o600)
    write_context([one], tmp_path / "image")
    assert list_context(tmp_path / "image") == before
    app = create_app([f"one={tmp_path / 'image/models'}"], Settings(sha256=[f"one={digest}"]))
    app.repository.close()
    write_context([f"first={one}", two], tmp_path / "image")
    assert {path.name for path in (tmp_path / "image/models").iterdir()} == {"first.laconic", "two.laconic"}


def test_an_image_beside_the_server_is_served_through_a_link_to_its_root(tmp_path: Path) -> None:
    """As KServe mounts `oci://`: a link to /proc/PID/root/models of a container whose file system is another one."""
    write_context([write_artifact(tmp_path / "one.laconic")], tmp_path / "image")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    command = f"mount -t tmpfs models {mounted} && cp -r {tmp_path}/image/models {mounted} && echo ready && sleep 60"
    arguments = ["unshare", "--mount", "--kill-child", "--fork", "--pid", "sh", "-c", command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as container:
        assert container.stdout is not None
        try:
            if not container.stdout.readline():
                pytest.skip("this user may not mount file systems")
            (tmp_path / "models").symlink_to(
                f"/proc/{psutil.Process(container.pid).children()[0].pid}/root{mounted}/models"
            )
            app = create_app([f"one={tmp_path / 'models'}"], Settings(workers=1))
            app.repository.close()
        finally:
            container.kill()


def test_what_is_damaged_unsigned_or_of_no_use_as_a_name_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "one.laconic")
    with pytest.raises(UsageError, match="have the same name"):
        write_context([artifact, write_artifact(tmp_path / "else/one")], tmp_path / "image")
    with pytest.raises(UsageError, match="give another, as NAME=ARTIFACT"):
        write_context([write_artifact(tmp_path / 'a "b"')], tmp_path / "image")
    with pytest.raises(UsageError, match="was not written by `laconic package`"):
        write_context([artifact], tmp_path / "else")
    with pytest.raises(UsageError, match="lies inside the artifact"):
        write_context([artifact], artifact / "image")
    (artifact / MODEL).write_text("{}  ")
    with pytest.raises(CorruptArtifact, match=r"model\.onnx"):
        write_context([artifact], tmp_path / "image")
    assert not (tmp_path / "image").exists()


def test_signed_artifacts_keep_their_signatures(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra sign")
    private, public = write_keys(tmp_path)
    artifact = write_artifact(tmp_path / "one.laconic")
    with pytest.raises(UnsignedArtifact, match="is not signed"):
        write_context([artifact], tmp_path / "image", public)
    (artifact / "README.md").write_text("signed, too")
    sign_artifact(artifact, private)
    write_context([artifact], tmp_path / "image", public)
    check_signature(tmp_path / "image/models", read_public_key(public))
