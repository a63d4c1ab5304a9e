"""What opening a model's folder gives, whichever library saved it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from laconic.tasks.task import Task


@dataclass(frozen=True)
class Loaded:
    """A module, its task, and how to build the same module again. output: the name of the module's output. size: bytes
    of the weights in files. files: those that the weights came from."""

    module: nn.Module
    task: "Task"
    output: str
    source: dict[str, Any]
    size: int
    files: tuple[Path, ...]
