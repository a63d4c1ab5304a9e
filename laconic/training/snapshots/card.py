"""What a training snapshot is, on one card of JSON; and what is in a folder of snapshots.

A file appears under its name when it is whole and on the disk, the card after all that it names.
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
CARD_NAME = re.compile(r"step-(\d{9,})\.json")
PACK_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
HALF_NAME = re.compile(r"\..+\.half")


class Piece(BaseModel):
    """What one rank saved of a tensor. key: digest of dtype, shape and values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    key: str


class Whole(BaseModel):
    """A tensor over all ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Pack(BaseModel):
    """A file of tensors. size: bytes. keys: those of its tensors that the snapshot uses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    keys: tuple[str, ...]


class Card(BaseModel):
    """What a snapshot is. values: the plain part of the state, by dotted path."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    step: int
    tensors: dict[str, Whole]
    packs: dict[str, Pack]
    values: dict[str, Any]

    @field_validator("packs")
    @classmethod
    def _plain_names(cls, packs: dict[str, Pack]) -> dict[str, Pack]:
        for name in packs:
            if not PACK_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a pack")
        return packs

    @property
    def places(self) -> dict[str, str]:
        """The pack of each tensor, by key."""
        return {key: name for name, pack in self.packs.items() for key in pack.keys}


def steps(folder: Path) -> list[int]:
    """The steps that have a card, the newest first."""
    found = (CARD_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def card_path(folder: Path, step: int) -> Path:
    """Where the card of a step is."""
    return folder / f"step-{step:09d}.json"


def read_card(folder: Path, step: int) -> Card:
    """The card of a step. Raises SourceError for one that is damaged, UnknownFormat for one of a newer format."""
    path = card_path(folder, step)
    try:
        content = unseal(path)
        if content.get("format") != FORMAT:
            raise UnknownFormat(
                f"{path} is of format {content.get('format')!r}; this version of Laconic reads {FORMAT}. "
                f"Upgrade Laconic, or give another folder"
            )
        return Card.model_validate(content)
    except (CorruptArtifact, ValidationError) as error:
        raise SourceError(f"{path} is not the card that was written: {error}") from error


def check_packs(folder: Path, card: Card) -> None:
    """Raise SourceError unless the packs of a card are there in full length; their content is checked when read."""
    for name, pack in card.packs.items():
        file = folder / PACKS / name
        if not file.is_file():
            raise SourceError(f"{file} is missing")
        if file.stat().st_size != pack.size:
            raise SourceError(f"{file} has {file.stat().st_size} bytes, expected {pack.size}")


def sweep(folder: Path, kept: Collection[int]) -> None:
    """Remove the cards of other steps, then every pack that no card names, and halves of files."""
    for step in steps(folder):
        if step not in kept:
            card_path(folder, step).unlink(missing_ok=True)
    sync(folder)
    try:
        named = {name for step in steps(folder) for name in read_card(folder, step).packs}
    except SourceError:
        return  # what a damaged card names is not known
    for path in (*folder.iterdir(), *(folder / PACKS).iterdir()):
        if HALF_NAME.fullmatch(path.name) or (PACK_NAME.fullmatch(path.name) and path.name not in named):
            path.unlink(missing_ok=True)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to; in the end it is at `path`, all of it and on the disk, or not at all."""
    half = path.with_name(f".{path.name}.{os.getpid()}.half")
    try:
        yield half
        sync(half)
        half.replace(path)
        sync(path.parent)
    finally:
        half.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
