"""One step of training: the gradient of a batch's mean loss, clipped, and the optimizer's update."""

from collections.abc import Sequence

from torch import Tensor

from train.step.gradient_norm import clip_gradients
from train.step.objective import Batch
from train.step.train_state import TrainState
from train.step.trained_modules import trainable_parameters


def train_step(state: TrainState, batch: Batch, *, max_grad_norm: float | None = None) -> Tensor | None:
    """Train on one batch, and return its mean loss before the update, [] float32 without a gradient.

    Gradient accumulation: each micro-batch contributes the sum of its loss terms, divided by the number of terms of
    the whole batch over all ranks. So a ragged batch has the same mean loss and gradient however it is split. A batch
    without a single term on any rank has no mean loss: it changes nothing, on all ranks alike, and None is returned.
    max_grad_norm: the norm that the gradient is clipped to; None does not clip.
    """
    parts = state.split(batch)
    total = state.strategy.reduce_terms(sum(state.objective.count_terms(part) for part in parts))
    return update_weights(state, parts, total, max_grad_norm) if total else None


def update_weights(
    state: TrainState, parts: Sequence[Batch], total: float, max_grad_norm: float | None = None
) -> Tensor:
    """Step the optimizer by the gradient of the summed loss of micro-batches over `total`, and return that loss."""
    loss = state.strategy.accumulate_gradients(state, parts, total)
    with state.phase("optimizer"):
        state.scaler.unscale_(state.optimizer)
        if max_grad_norm is not None:
            parameters = trainable_parameters(state.module)
            state.gradient_norm = state.strategy.measure_norm(parameters)
            clip_gradients(parameters, max_grad_norm, state.gradient_norm)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
    return state.strategy.average(loss)
