"""How long the collectives of a run wait, which torch does not hand on to further groups: they have its own default."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group


def find_timeout() -> timedelta | None:
    """Return the timeout of the default group; None without a group, and for ranks that are simulated."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    timeout: timedelta = _get_default_group()._get_backend(torch.device("cpu")).options._timeout
    return timeout
