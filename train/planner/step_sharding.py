"""The sharding of an optimizer's step on a simulated rank, known without a search.

DTensor finds out how the arguments of an operation have to be sharded by comparing all ways to shard all of them. For a
fused optimizer, whose arguments are all weights at once, that took 40 % of the time of a simulation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FUSED_STEPS = frozenset({torch.ops.aten._fused_adam_.default, torch.ops.aten._fused_adamw_.default})
"""Operations whose first four arguments are lists: weights, gradients, and both moments."""


@contextmanager
def keep_aligned_steps(propagator: Any, kept: Any) -> Iterator[None]:
    """Let DTensor take aligned steps as they are in the body. propagator: of DTensor. kept: its answer for arguments
    that need not be sharded in another way, and have no output."""
    propagate = propagator.propagate_op_sharding_non_cached
    propagator.propagate_op_sharding_non_cached = lambda schema: kept if is_aligned_step(schema) else propagate(schema)
    try:
        yield
    finally:
        del propagator.propagate_op_sharding_non_cached


def is_aligned_step(schema: Any) -> bool:
    """Return whether an operation is a fused step in which each weight is sharded as its gradient and its moments are,
    so that nothing is sent. schema: the OpSchema of DTensor."""
    if schema.op not in FUSED_STEPS:
        return False
    return all(len({spec.placements for spec in specs}) == 1 for specs in zip(*schema.args_schema[:4], strict=True))
