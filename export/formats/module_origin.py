"""What the module of a model is built from, for engines that read a file of their own beside the graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laconic.artifacts.record import Record


@dataclass(frozen=True)
class ModuleOrigin:
    """source: how the module is built without its weights, as a manifest has it. history: the stages since."""

    source: Mapping[str, Any]
    history: tuple[Record, ...]
