"""The manifest of a training snapshot, a JSON file; and the files in a folder of snapshots.

A file gets its name when it is complete and on the disk; a manifest after all packs that it lists.
"""

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from laconic.errors import CorruptArtifact, SourceError, UnknownFormat
from laconic.hashing import unseal

FORMAT = 1
PACKS = "packs"
MANIFEST_NAME = re.compile(r"step-(\d{9,})\.json")
PACK_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
TEMPORARY_NAME = re.compile(r"\..+\.half")


class TensorChunk(BaseModel):
    """The part of a tensor that one rank saved. offset: in the tensor. key: digest of dtype, shape and values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    key: str


class TensorEntry(BaseModel):
    """A tensor over all ranks. pieces: its chunks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorChunk, ...]


class PackEntry(BaseModel):
    """A file of tensors. size: bytes. keys: of those of its tensors that the snapshot uses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    keys: tuple[str, ...]


class SnapshotManifest(BaseModel):
    """What a snapshot consists of. values: the plain values of the state, by dotted path."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    step: int
    tensors: dict[str, TensorEntry]
    packs: dict[str, PackEntry]
    values: dict[str, Any]

    @field_validator("packs")
    @classmethod
    def _plain_names(cls, packs: dict[str, PackEntry]) -> dict[str, PackEntry]:
        for name in packs:
            if not PACK_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a pack")
        return packs

    @property
    def pack_names(self) -> dict[str, str]:
        """Name of the pack of each chunk, by key."""
        return {key: name for name, pack in self.packs.items() for key in pack.keys}


def list_steps(folder: Path) -> list[int]:
    """List the steps that have a manifest, the newest first."""
    matches = (MANIFEST_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def manifest_path(folder: Path, step: int) -> Path:
    """Return the path of the manifest of a step."""
    return folder / f"step-{step:09d}.json"


def read_manifest(folder: Path, step: int) -> SnapshotManifest:
    """Read the manifest of a step. Raises SourceError for a damaged one, UnknownFormat for one of a newer format."""
    path = manifest_path(folder, step)
    try:
        content = unseal(path)
        if content.get("format") != FORMAT:
            raise UnknownFormat(
                f"{path} is of format {content.get('format')!r}; this version of Laconic reads {FORMAT}. "
                f"Upgrade Laconic, or give another folder"
            )
        return SnapshotManifest.model_validate(content)
    except (CorruptArtifact, ValidationError) as error:
        raise SourceError(f"{path} is not as it was written: {error}") from error


def check_packs(folder: Path, manifest: SnapshotManifest) -> None:
    """Raise SourceError unless the packs of a manifest exist at full size; their content is checked when it is read."""
    for name, pack in manifest.packs.items():
        file = folder / PACKS / name
        if not file.is_file():
            raise SourceError(f"{file} is missing")
        if file.stat().st_size != pack.size:
            raise SourceError(f"{file} has {file.stat().st_size} bytes, expected {pack.size}")


def remove_unused(folder: Path, kept: Collection[int]) -> None:
    """Remove the manifests of steps that are not kept, then packs that no manifest lists, and temporary files."""
    for step in list_steps(folder):
        if step not in kept:
            manifest_path(folder, step).unlink(missing_ok=True)
    sync(folder)
    try:
        listed = {name for step in list_steps(folder) for name in read_manifest(folder, step).packs}
    except SourceError:
        return  # what a damaged manifest lists is unknown
    for path in (*folder.iterdir(), *(folder / PACKS).iterdir()):
        if TEMPORARY_NAME.fullmatch(path.name) or (PACK_NAME.fullmatch(path.name) and path.name not in listed):
            path.unlink(missing_ok=True)


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. After the body the file is at `path`, complete and on disk, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.half")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
