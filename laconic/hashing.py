"""Digests of values, of files, and of the code and libraries that compute results; and sealed JSON files, which
contain their own digest."""

import hashlib
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from laconic.arrays import Array
from laconic.errors import CorruptArtifact
from laconic.files import parse_json, read_bounded

HOME_PACKAGES = tuple(
    str(Path(__file__).resolve().parents[1] / name) for name in ("laconic", "train", "compress", "export")
)
"""The folders of the packages of ours that results depend on."""

LIBRARIES = (
    "accelerate", "ml-dtypes", "numpy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "onnxscript", "openvino",
    "optuna", "peft", "pillow", "pyarrow", "safetensors", "scipy", "soundfile", "soxr", "tensorrt-cu13", "timm",
    "tokenizers", "torch", "torch-pruning", "torchao", "transformers", "triton",
)  # fmt: skip
"""The distributions that results are computed, or samples decoded, with."""

ARITHMETIC_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "DNNL_CPU_ISA_HINTS", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS", "NPY_DISABLE_CPU_FEATURES", "NVIDIA_TF32_OVERRIDE", "ONEDNN_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
"""The environment variables by which users limit a processor's instructions, or the precision of products."""
MANY = 1000
"""Names from which on another way to encode them is worth a look at their characters."""


def hash_of(*parts: Any) -> str:
    """Return the hex digest (SHA-256, first 32 digits) of JSON-ready values; the same values give the same digest."""
    text = ",".join(map(encode_part, parts))
    return hashlib.sha256(f"[{text}]".encode()).hexdigest()[:32]


def encode_part(part: Any) -> str:
    """Encode a value as JSON; many names that JSON has as they are, such as digests, in a fifth of its time."""
    if isinstance(part, (list, tuple)) and len(part) >= MANY and set(map(type, part)) == {str}:
        text = '","'.join(part)
        if text.isascii() and text.isprintable() and "\\" not in text and text.count('"') == 2 * (len(part) - 1):
            return f'["{text}"]'
    return json.dumps(part, sort_keys=True, separators=(",", ":"), default=str)


def environment_digest() -> str:
    """Return the digest of all that a result of this process depends on besides its inputs: Laconic's code, libraries,
    and the arithmetic that the environment asks for. Part of cache keys: other results are never taken from the cache.
    """
    return hash_of(code_version(), library_digest())


def library_digest() -> str:
    """Return the digest of what measurements of other people's code depend on: `environment_digest` without Laconic's
    code. For what takes long to measure, whose key states a version of its own."""
    return hash_of(library_versions(), read_arithmetic_variables())


@cache
def library_versions() -> dict[str, str]:
    """Return the version of each installed library, by its distribution, and of Python. Imports none of them."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def read_arithmetic_variables() -> dict[str, str]:
    """Return the variables of `ARITHMETIC_VARIABLES` that are set."""
    return {name: os.environ[name] for name in ARITHMETIC_VARIABLES if os.environ.get(name)}


def digest_own_code(modules: Iterable[str]) -> list[str]:
    """Return the digest of the file of each of these modules that is the user's own: no library, whose version stands
    for it, and no part of Laconic. A module may have other names, as the one that is run as a script."""
    covered = tuple(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")) + HOME_PACKAGES
    files = {getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return sorted(
        digest_file(Path(file)).sha256
        for file in files
        if file and Path(file).is_file() and not file.startswith(tuple(f"{folder}{os.sep}" for folder in covered))
    )


@cache
def code_version() -> str:
    """Return the digest of Laconic's own sources."""
    digest = hashlib.sha256()
    for package in HOME_PACKAGES:
        for path in sorted(Path(package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def digest_arrays(arrays: Mapping[str, Array]) -> str:
    """Return the digest of arrays with their names, dtypes and shapes, in whatever order."""
    return hash_of(
        sorted(
            (name, array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest())
            for name, array in arrays.items()
        )
    )


class FileDigest(BaseModel):
    """SHA-256 and size in bytes of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size: int = Field(ge=0)


def digest_file(path: Path) -> FileDigest:
    """Compute the digest of a file on disk."""
    with path.open("rb") as file:
        return FileDigest(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=path.stat().st_size)


def seal(content: Mapping[str, Any]) -> bytes:
    """Serialize to JSON that contains the digest of its other keys, so that a single flipped byte is detected."""
    body = json.dumps(content, sort_keys=True, ensure_ascii=False)
    sealed = {"sha256": hashlib.sha256(body.encode()).hexdigest(), **content}
    return (json.dumps(sealed, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def unseal(path: Path) -> dict[str, Any]:
    """Read the content of a sealed file. Raises CorruptArtifact if it was changed after it was written."""
    try:
        return parse_sealed(read_bounded(path), path)
    except (OSError, ValueError) as error:
        raise make_unreadable(path, error) from None


def parse_sealed(text: bytes, path: Path) -> dict[str, Any]:
    """Parse the content of a sealed file. Raises CorruptArtifact if it was changed after it was written."""
    try:
        content = parse_json(text)
        body = json.dumps(content, sort_keys=True, ensure_ascii=False).encode()
    except ValueError as error:
        raise make_unreadable(path, error) from None
    if not isinstance(content, dict) or "sha256" not in content:
        raise CorruptArtifact(
            f"{path} is not sealed: expected a JSON object with its own digest under 'sha256'. Copy the artifact again"
        )
    expected = content.pop("sha256")
    body = json.dumps(content, sort_keys=True, ensure_ascii=False).encode()
    if hashlib.sha256(body).hexdigest() != expected:
        raise CorruptArtifact(f"{path} was changed after it was written. Copy the artifact again, or compress again")
    return content


def make_unreadable(path: Path, error: Exception) -> CorruptArtifact:
    """Make the error for a file that is not sealed JSON."""
    return CorruptArtifact(f"{path} cannot be read: {error}. Copy the artifact again")
