"""Samples of files with what a model is to write for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, eq=False)
class Targeted:
    """A sample with its target. sample: as a task's `parse` takes it, or as it returns it. target: the ids of the
    tokens to write, the end token included. name: of the sample's file."""

    sample: Any
    target: tuple[int, ...]
    name: str = ""

    def __str__(self) -> str:
        return self.name or "a recording"


def strip_target(sample: Any) -> Any:
    """The sample itself, without its target if it has one."""
    return sample.sample if isinstance(sample, Targeted) else sample


def is_file(source: Any) -> bool:
    """Whether a sample is the path or the content of a file that is decoded at each access, with or without target."""
    return isinstance(strip_target(source), (Path, bytes))
