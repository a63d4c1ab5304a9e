"""Laconic: the same answers, with fewer bits."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.limits.thread_pools import limit_thread_pools

if TYPE_CHECKING:
    from laconic.models.checkpoint import Checkpoint

__version__ = "0.2.0"

__all__ = ["__version__", "load"]


def load(path: str | Path, **options: Any) -> "Checkpoint":
    """Open a checkpoint: a folder written by `laconic compress --to checkpoint` or `laconic finetune`, or by
    transformers. `.module` is the torch module, in evaluation mode, float32, with gradients disabled.

    options: `task`, `builder`, `arguments` and `inputs` describe a module of your own; `trust=True` allows a source to
    execute code that it carries. Raises SourceError, UntrustedSource. Torch is imported on the first call only.
    """
    from laconic.models.source_loading import load_source

    return load_source(Path(path), **options)


NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass"}
"""How the messages to drop begin, by logger: torchao about kernels of other machines, torch about torchao's code."""


def quiet_imports() -> None:
    """Drop these log records, and no others. Called before all imports, since transformers imports torchao."""
    for name in NOISE:
        logging.getLogger(name).addFilter(is_worth_reading)


def is_worth_reading(record: logging.LogRecord) -> bool:
    """Return whether a record of one of these loggers is anything but the noise above."""
    return not str(record.msg).startswith(NOISE[record.name])


quiet_imports()
limit_thread_pools()
