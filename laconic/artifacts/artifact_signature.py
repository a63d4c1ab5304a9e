"""Signatures of artifacts in the format of OpenSSF model signing, so that `model_signing` verifies ours and we verify
its: a sigstore bundle (v0.3) in `model.sig`, whose DSSE envelope holds an in-toto statement with the SHA-256 of every
file of the folder. Keys are elliptic curve keys (P-256) in PEM.

The manifest's own digests show damage; only a signature shows that a file was exchanged and the manifest written anew.
"""

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.artifacts.artifact_files import SUFFIXES, open_plain, read_plain
from laconic.errors import UnsignedArtifact, UsageError
from laconic.files import parse_json, read_bounded, replace_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

SIGNATURE = "model.sig"
UNSIGNED = (SIGNATURE, ".git", ".gitattributes", ".github", ".gitignore")
"""What no signature covers: itself, and what `model_signing` leaves out."""
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://model_signing/signature/v1.0"
SERIALIZATION = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
KEY_BYTES = 1 << 16
EXPECTED = (
    "expected an elliptic curve key (P-256) in PEM: `openssl ecparam -name prime256v1 -genkey -noout` makes a private "
    "one, and `openssl ec -in KEY -pubout` prints its public one"
)


def sign_artifact(path: Path, key: Path) -> Path:
    """Write the signature of an artifact beside its files, and return where it is. key: the private one's file.

    Raises UsageError for a key that cannot be used, and where a folder has the signature's name; CorruptArtifact for a
    file that is not plain.
    """
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    private = read_private_key(key)
    if (path / SIGNATURE).is_dir():
        raise UsageError(f"{path / SIGNATURE} is a folder, where the signature is to be. Move it elsewhere")
    payload = json.dumps(describe_files(path), separators=(",", ":")).encode()
    signature = private.sign(encode_envelope(payload), ECDSA(SHA256(), deterministic_signing=True))
    bundle = {
        "mediaType": BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": make_hint(private.public_key())}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    replace_file(path / SIGNATURE, json.dumps(bundle, separators=(",", ":")).encode())
    return path / SIGNATURE


def check_signature(path: Path, key: "EllipticCurvePublicKey") -> None:
    """Raise UnsignedArtifact unless the files of an artifact are those that the owner of a key signed: each of them,
    and no other. Nothing of them is parsed."""
    signed, ignored = read_statement(path / SIGNATURE, key)
    names = set(list_files(path, ignored))
    for name in sorted(signed.keys() | names):
        if name not in names:
            raise UnsignedArtifact(f"{path / name} is missing, and was signed. Copy the artifact again")
        if name not in signed:
            raise UnsignedArtifact(f"{path / name} was not there when the artifact was signed. Move it elsewhere")
        if digest_plain(path / name) != signed[name]:
            raise UnsignedArtifact(f"{path / name} differs from the file that was signed. Copy the artifact again")


def describe_files(path: Path) -> dict[str, Any]:
    """Make the in-toto statement of the files of a folder."""
    digests = {name: digest_plain(path / name) for name in sorted(list_files(path, UNSIGNED))}
    root = hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests.values())).hexdigest()
    return {
        "_type": STATEMENT,
        "subject": [{"name": path.resolve().name, "digest": {"sha256": root}}],
        "predicateType": PREDICATE,
        "predicate": {
            "serialization": {**SERIALIZATION, "ignore_paths": sorted(UNSIGNED)},
            "resources": [{"algorithm": "sha256", "digest": digest, "name": name} for name, digest in digests.items()],
        },
    }


def read_statement(path: Path, key: "EllipticCurvePublicKey") -> tuple[dict[str, str], list[str]]:
    """Read a signature: the digests of the signed files by name, and what was left out. Raises UnsignedArtifact unless
    it was made with the private key of this public one."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    if not os.path.lexists(path):
        raise UnsignedArtifact(f"there is no {path}: the artifact is not signed. `laconic sign` signs it")
    try:
        bundle = parse_json(read_plain(path))
        if bundle["mediaType"] != BUNDLE or bundle["dsseEnvelope"]["payloadType"] != PAYLOAD:
            raise ValueError(f"expected {BUNDLE} that holds {PAYLOAD}")
        hint = bundle["verificationMaterial"]["publicKey"].get("hint")
        payload = base64.b64decode(bundle["dsseEnvelope"]["payload"], validate=True)
        signature = base64.b64decode(bundle["dsseEnvelope"]["signatures"][0]["sig"], validate=True)
        if hint not in (None, make_hint(key)):
            raise UnsignedArtifact(f"{path} was made with another key (its public key has the SHA-256 {hint[:12]}...)")
        key.verify(signature, encode_envelope(payload), ECDSA(SHA256()))
        statement = parse_json(payload)
        predicate = statement["predicate"]
        serialization = predicate["serialization"]
        if statement["_type"] != STATEMENT or statement["predicateType"] != PREDICATE:
            raise ValueError(f"expected a statement of the kind {PREDICATE}")
        if serialization["method"] != "files" or serialization["hash_type"] != "sha256":
            raise ValueError("expected the SHA-256 of whole files")
        digests = {str(each["name"]): str(each["digest"]) for each in predicate["resources"]}
        return digests, [*UNSIGNED, *map(str, serialization.get("ignore_paths", ()))]
    except InvalidSignature:
        raise UnsignedArtifact(f"{path} is not a signature of this key. Verify with the key of who signed it") from None
    except (ValueError, TypeError, LookupError, AttributeError, binascii.Error) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else error
        raise UnsignedArtifact(f"{path} is no signature of a model: {reason}. `laconic sign` makes one") from None


def list_files(folder: Path, ignored: Iterable[str]) -> Iterator[str]:
    """List the files of a folder by their names relative to it, whatever their kind; links are not followed. A name
    that an artifact reads is never ignored."""
    ignored = set(ignored)
    for place, folders, files in os.walk(folder):
        inside = Path(place).relative_to(folder)
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in (inside / file for file in (*files, *links)):
            is_read = len(name.parts) == 1 and name.suffix.lower() in SUFFIXES and not name.name.startswith(".")
            if is_read or not {name, *name.parents} & {Path(each) for each in ignored}:
                yield name.as_posix()


def digest_plain(path: Path) -> str:
    """Compute the SHA-256 of a plain file. Raises CorruptArtifact for any other."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def encode_envelope(payload: bytes) -> bytes:
    """Encode what a DSSE envelope's signature is over: the kind of the payload, and the payload."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD), PAYLOAD.encode(), len(payload), payload)


def make_hint(key: "EllipticCurvePublicKey") -> str:
    """Compute what a bundle names a key by: the SHA-256 of its PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def read_public_key(path: Path) -> "EllipticCurvePublicKey":
    """Read a public key. Raises UsageError for what is none, MissingPackage."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    content = read_key(path)
    if b"PRIVATE KEY" in content:
        raise UsageError(f"{path} is a private key; expected the public one, which `openssl ec -pubout` prints")
    try:
        key = load_pem_public_key(content)
    except Exception as error:  # noqa: BLE001 - unsupported algorithms have an exception of their own
        raise UsageError(f"{path} is no public key that can be read ({type(error).__name__}): {EXPECTED}") from None
    check_curve(path, key)
    return key


def read_private_key(path: Path) -> "EllipticCurvePrivateKey":
    """Read a private key. Raises UsageError for what is none, or is encrypted; MissingPackage."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = read_key(path)
    try:
        key = load_pem_private_key(content, None)
    except TypeError:
        raise UsageError(f"{path} is encrypted. Decrypt it, as with `openssl ec -in {path}`") from None
    except Exception as error:  # noqa: BLE001 - unsupported algorithms have an exception of their own
        raise UsageError(f"{path} is no private key that can be read ({type(error).__name__}): {EXPECTED}") from None
    check_curve(path, key)
    return key


def read_key(path: Path) -> bytes:
    """Read the file of a key. Raises UsageError."""
    try:
        return read_bounded(path, KEY_BYTES)
    except OSError as error:
        raise UsageError(f"the key {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is no key: {error}") from None


def check_curve(path: Path, key: Any) -> None:
    """Raise UsageError for a key of another kind, or of another curve."""
    curve = getattr(getattr(key, "curve", None), "name", None)
    if curve != "secp256r1":
        kind = f"of the curve {curve}" if curve else f"of another kind ({type(key).__name__.strip('_')})"
        raise UsageError(f"{path} is a key {kind}: {EXPECTED}")
