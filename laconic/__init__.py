"""Laconic: the same answers, with fewer bits."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.quiet_imports import hush

hush()

from laconic import registry  # noqa: E402 - after the hush, which comes before all imports

if TYPE_CHECKING:
    from laconic.models.checkpoint import Checkpoint

__version__ = "0.1.0"

__all__ = ["__version__", "load"]


def load(path: str | Path, **given: Any) -> "Checkpoint":
    """Open a checkpoint that `laconic compress --to checkpoint` or `laconic finetune` wrote, or a folder of
    transformers; `.module` is the torch module, in evaluation mode, float32, without gradients.

    given: `task`, `builder`, `arguments`, `inputs`, for weights of a model of your own; `trust=True` lets a source
    execute code that it carries. Raises SourceError, UntrustedSource. Torch is imported here, and not before.
    """
    checkpoint: Checkpoint = registry.load("laconic.models.checkpoint:load_source")(Path(path), **given)
    return checkpoint
