"""Writing an artifact in a format of another program, whole or not at all."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from export.formats.quantized_model import QuantizedModel, read_quantized_model
from laconic import registry
from laconic.artifacts.artifact import Artifact
from laconic.cache import open_scratch_folder
from laconic.errors import UsageError
from laconic.progress import Steps

Write = Callable[[QuantizedModel, Path], list[str]]
"""Writes a model to a path, and returns what the format stores in another way than the artifact, in sentences."""


@dataclass(frozen=True)
class WrittenFormat:
    """A file or folder that was written. size: bytes. notes: what it stores in another way than the artifact."""

    path: Path
    format: str
    size: int
    notes: tuple[str, ...]


def write_format(artifact: Path, name: str, destination: Path, steps: Steps | None = None) -> WrittenFormat:
    """Write the model of an artifact in a format of the registry; it holds the artifact's integers and scales.

    Raises UsageError for an unknown format and a destination that exists, FormatRefused for a model that the format
    cannot hold.
    """
    write: Write = registry.resolve("export format", name)
    if destination.exists():
        raise UsageError(f"{destination} exists already: it will not be overwritten. Choose another --output")
    steps = steps or Steps()
    with steps.step("read the artifact") as step:
        source = read_quantized_model(Artifact.load(artifact))
        step.note = f"{len(source.layers)} quantized layers"
    with steps.step(f"write {name}"), open_scratch_folder(destination) as scratch:
        written = scratch / destination.name
        notes = write(source, written)
        written.rename(destination)
    files = [destination] if destination.is_file() else sorted(destination.iterdir())
    return WrittenFormat(destination, name, sum(path.stat().st_size for path in files), tuple(notes))
