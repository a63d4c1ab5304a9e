"""What other packages log when they are imported, and that is for nobody here."""

import logging

CHATTER = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass"}
"""How it begins, by logger: torchao's kernels for other machines; torch, to torchao's authors."""


def hush() -> None:
    """Leave these records out, and no others. It comes before all imports: transformers brings torchao by itself."""
    for name in CHATTER:
        logging.getLogger(name).addFilter(worth_reading)


def worth_reading(record: logging.LogRecord) -> bool:
    """Whether a record of one of these loggers is something else."""
    return not str(record.msg).startswith(CHATTER[record.name])
