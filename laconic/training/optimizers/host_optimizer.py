"""An optimizer that steps on the host, where the weights and its state lie."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer

from laconic.offload.memory_accounting import accounted
from laconic.training.optimizers.optimizer import Groups


def make_host_optimizer(
    make: Callable[[Groups], Optimizer], groups: Groups, after: Callable[[], None] = lambda: None
) -> Optimizer:
    """Make an optimizer whose memory is accounted to the host. after: called after each of its steps."""
    optimizer = make(groups)
    stack = ExitStack()

    def begin(*_: Any) -> None:
        stack.enter_context(accounted("host"))

    def end(*_: Any) -> None:
        after()
        stack.close()

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)
    return optimizer
