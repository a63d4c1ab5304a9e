"""Signatures: model_signing verifies ours and we its, and what was not signed is refused before it is opened."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from artifacts import write_artifact, write_keys
from served import eventually, request_of, running

from laconic.artifacts.artifact import Artifact
from laconic.artifacts.artifact_signature import (
    SIGNATURE,
    check_signature,
    read_private_key,
    read_public_key,
    sign_artifact,
)
from laconic.artifacts.inspection import verify
from laconic.artifacts.manifest import MODEL
from laconic.commands import artifacts as commands
from laconic.commands.verification import verify as run_verify
from laconic.errors import GoalMissed, LaconicError, UnsignedArtifact, UsageError
from serve.http.app import create_app
from serve.settings.server_settings import Settings

pytest.importorskip("cryptography", reason="the extra sign")
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption

SIGNED = Path(__file__).parent / "formats" / "0.2.0.laconic"
"""Signed by model-signing 1.1.1, in place: `model_signing sign key`, with the private key of `0.2.0.pem`."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def signed(tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    artifact = write_artifact(tmp_path / "models/twice.laconic")
    (artifact / "README.md").write_text("not read, and signed all the same")
    sign_artifact(artifact, keys[0])
    return artifact


def change(path: Path, name: str) -> None:
    content = bytearray((path / name).read_bytes())
    content[-2] ^= 1
    (path / name).write_bytes(bytes(content))


def recompute(path: Path) -> None:
    """Another model, and the manifest written anew to match."""
    write_artifact(path, factor=3)


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "changed byte": (lambda path: change(path, MODEL), "model.onnx differs from the file that was signed"),
    "changed file that is not read": (lambda path: change(path, "README.md"), "README.md differs"),
    "extra file": (lambda path: (path / "new.txt").write_text("x"), "new.txt was not there when"),
    "extra file in a folder": (
        lambda path: ((path / "new").mkdir(), (path / "new/x").touch()),
        "new/x was not there when",
    ),
    "missing file": (lambda path: (path / "README.md").unlink(), "README.md is missing, and was signed"),
    "link": (
        lambda path: ((path / "README.md").unlink(), (path / "README.md").symlink_to("manifest.json")),
        "README.md is a symbolic link",
    ),
    "recomputed manifest": (recompute, "golden.safetensors differs from the file that was signed"),
    "no signature": (lambda path: (path / SIGNATURE).unlink(), "model.sig: the artifact is not signed"),
    "broken signature": (lambda path: (path / SIGNATURE).write_text("{}"), "is no signature of a model"),
    "changed signature": (lambda path: change_statement(path), "model.sig is not a signature of this key"),
}


def change_statement(path: Path) -> None:
    bundle = json.loads((path / SIGNATURE).read_text())
    payload = bundle["dsseEnvelope"]["payload"]
    bundle["dsseEnvelope"]["payload"] = payload.replace(payload[40], "A" if payload[40] != "A" else "B", 1)
    (path / SIGNATURE).write_text(json.dumps(bundle))


def test_a_signed_artifact_is_served_and_the_same_files_have_the_same_signature(
    signed: Path, keys: tuple[Path, Path]
) -> None:
    before = (signed / SIGNATURE).read_bytes()
    assert sign_artifact(signed, keys[0]).read_bytes() == before
    with running(signed, require_signature=keys[1]) as server, server.client() as http:
        assert http.post("/v2/models/twice/infer", json=request_of([[1, 2, 3]])).status_code == 200
    assert verify(signed, key=keys[1])[0].passed


@pytest.mark.parametrize("fault", FAULTS)
def test_what_differs_from_what_was_signed_is_refused_before_anything_of_it_is_read(
    signed: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    break_artifact, message = FAULTS[fault]
    break_artifact(signed)
    if fault == "recomputed manifest":
        Artifact.load(signed)  # to the digests of the manifest alone, nothing is wrong
    monkeypatch.setattr(Artifact, "load", lambda path: pytest.fail("the artifact was read"))
    with pytest.raises(LaconicError, match=message) as caught:
        create_app([signed], Settings(require_signature=keys[1]))
    assert caught.value.exit_code == 2
    (check,) = verify(signed, key=keys[1])
    assert not check.passed


def test_another_key_is_refused_by_its_name_or_by_its_signature(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    _, other = write_keys(tmp_path, "other")
    with pytest.raises(UnsignedArtifact, match=r"model.sig was made with another key"):
        check_signature(signed, read_public_key(other))
    bundle = json.loads((signed / SIGNATURE).read_text())
    bundle["verificationMaterial"]["publicKey"] = {}
    (signed / SIGNATURE).write_text(json.dumps(bundle))
    check_signature(signed, read_public_key(keys[1]))
    with pytest.raises(UnsignedArtifact, match=r"model.sig is not a signature of this key"):
        check_signature(signed, read_public_key(other))


def test_a_signer_cannot_leave_out_what_is_read(signed: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(signed, copied)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("laconic.artifacts.artifact_signature.UNSIGNED", (SIGNATURE, MODEL, "README.md"))
        patch.setattr("laconic.artifacts.artifact_signature.SUFFIXES", frozenset())
        sign_artifact(copied, keys[0])
    change(copied, "README.md")
    with pytest.raises(UnsignedArtifact, match=r"model.onnx was not there when"):
        check_signature(copied, read_public_key(keys[1]))


def test_in_the_watched_folder_an_unsigned_artifact_waits_for_its_signature(
    tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    folder = tmp_path / "models"
    sign_artifact(write_artifact(folder / "one.laconic"), keys[0])
    two = write_artifact(folder / "two.laconic")
    with running(models=folder, poll=0.05, require_signature=keys[1]) as server:
        repository = server.app.repository
        assert [model.name for model in repository] == ["one"]
        assert "the artifact is not signed" in repository.absent["two", "1"].reason
        sign_artifact(two, keys[0])
        assert eventually(lambda: {model.name for model in repository} == {"one", "two"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none", "cannot be read: No such file"),
        (lambda folder: (folder / "text").write_text("key") and folder / "text", "is no public key .* -pubout"),
        (lambda folder: write_keys(folder, "ed", ed25519.Ed25519PrivateKey.generate())[1], "of another kind .Ed25519"),
        (
            lambda folder: write_keys(folder, "big", ec.generate_private_key(ec.SECP384R1()))[1],
            "of the curve secp384r1",
        ),
        (lambda folder: write_keys(folder, "own")[0], "is a private key; expected the public one"),
    ],
)
def test_a_key_that_cannot_be_used_is_named_in_a_sentence(
    signed: Path, tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        create_app([], Settings(models=signed.parent, require_signature=make(tmp_path)))


def test_a_folder_in_the_place_of_the_signature_is_named_in_a_sentence(signed: Path, tmp_path: Path) -> None:
    (signed / SIGNATURE).unlink()
    (signed / SIGNATURE).mkdir()
    with pytest.raises(UsageError, match=r"model\.sig is a folder"):
        sign_artifact(signed, write_keys(tmp_path, "own")[0])


def test_an_encrypted_private_key_and_one_of_another_kind_are_named_in_a_sentence(tmp_path: Path) -> None:
    encrypted, _ = write_keys(tmp_path, "encrypted", encryption=BestAvailableEncryption(b"secret"))
    other, public = write_keys(tmp_path, "other", ed25519.Ed25519PrivateKey.generate())
    for key, message in ((encrypted, "is encrypted"), (other, "of another kind"), (public, "is no private key that")):
        with pytest.raises(UsageError, match=message):
            read_private_key(key)


def test_the_commands_sign_and_verify(
    tmp_path: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = write_artifact(tmp_path / "twice.laconic")
    commands.sign(artifact, keys[0])
    run_verify(artifact, key=keys[1])
    assert f"Signed: {artifact / SIGNATURE}" in capsys.readouterr().out
    change(artifact, MODEL)
    with pytest.raises(GoalMissed, match="failed verification: signature"):
        run_verify(artifact, key=keys[1])


def test_a_large_artifact_is_verified_in_no_time(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    """24 MB in less than 0.2 s of processor time, since other tests run beside this one."""
    (tmp_path / "weights.data").write_bytes(bytes(24_000_000))
    sign_artifact(tmp_path, keys[0])
    key, start = read_public_key(keys[1]), time.process_time()
    check_signature(tmp_path, key)
    assert time.process_time() - start < 0.2


def test_an_artifact_of_version_0_2_0_is_read_and_was_signed_by_model_signing() -> None:
    check_signature(SIGNED, read_public_key(SIGNED.with_suffix(".pem")))


def test_model_signing_verifies_our_signatures_and_we_its(signed: Path, keys: tuple[Path, Path]) -> None:
    if find_spec("model_signing") is None:
        pytest.skip("model_signing is not installed: pip install model-signing pyopenssl")
    command = [sys.executable, "-m", "model_signing"]
    files = [str(signed), "--signature", str(signed / SIGNATURE)]
    check = [*command, "verify", "key", *files, "--public_key", str(keys[1])]
    subprocess.run(check, check=True, capture_output=True)
    change(signed, MODEL)
    assert subprocess.run(check, capture_output=True).returncode == 1
    subprocess.run([*command, "sign", "key", *files, "--private_key", str(keys[0])], check=True, capture_output=True)
    check_signature(signed, read_public_key(keys[1]))
