"""Laconic: the same answers, with fewer bits."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from laconic.models.checkpoint import load_source

    return load_source(Path(path), **given)


NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass"}
"""How it begins, by logger: torchao's kernels for other machines; torch, to torchao's authors."""


def quiet_imports() -> None:
    """Leave these records out, and no others. It comes before all imports: transformers brings torchao by itself."""
    for name in NOISE:
        logging.getLogger(name).addFilter(is_worth_reading)


def is_worth_reading(record: logging.LogRecord) -> bool:
    """Whether a record of one of these loggers is something else."""
    return not str(record.msg).startswith(NOISE[record.name])


quiet_imports()
