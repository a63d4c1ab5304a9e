"""The one training loop: for fine-tuning, distillation, quantization-aware training and pruning schedules."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.errors import OutOfMemory, RecipeError, TrainingFailure
from train.callbacks.callback import RunLog, StepReport
from train.data.batch_loader import BatchLoader
from train.step.objective import Batch
from train.step.train_state import StepCallback, TrainState
from train.step.train_step import train_step


@dataclass(frozen=True)
class LoopSettings:
    """What happens in a run besides its steps.

    steps: of the whole run. seed: of dropout and whatever else draws random numbers in a step. max_grad_norm: of
    gradient clipping; None does not clip. snapshot_every: steps between two snapshots; 0 writes none. save: writes the
    snapshot after a number of steps; its second argument says whether to wait until it is on the disk. eval_every:
    steps between two evaluations; 0 makes none. evaluate: called with the steps done, not after the last step; True
    ends the run as if it had been no longer. callbacks: called after each step.
    """

    steps: int
    seed: int
    max_grad_norm: float | None = None
    snapshot_every: int = 0
    save: Callable[[int, bool], None] = lambda steps, wait: None
    eval_every: int = 0
    evaluate: Callable[[int], bool] = lambda steps: False
    callbacks: Sequence[StepCallback] = ()


def run_steps(
    state: TrainState,
    loader: BatchLoader,
    settings: LoopSettings,
    losses: list[float],
    observers: Sequence[RunLog] = (),
) -> None:
    """Take a step for each batch of the loader, and append the loss of each to `losses`; NaN for a batch without a
    single loss term, from which nothing is learned.

    The random numbers of a step depend on the seed and the step's number alone, so that a run which was interrupted
    and resumed has the same losses as one that was not. SIGTERM and Ctrl-C end the run after the current step, with a
    snapshot, as KeyboardInterrupt. Raises TrainingFailure where the loss is not finite, and at the end where no batch
    had a loss term; OutOfMemory.
    """
    pending = PendingReport(observers, losses)
    with catch_signals() as stop:
        begin, waited = time.perf_counter(), loader.waited
        for number, batch in loader:
            torch.manual_seed(step_seed(settings.seed, number))
            rate = float(state.optimizer.param_groups[0]["lr"])
            with translate_memory_errors():
                loss = train_step(state, batch, max_grad_norm=settings.max_grad_norm)
            state.scheduler.step()
            finished = [callback(number + 1) for callback in settings.callbacks]
            pending.publish()
            now = time.perf_counter()
            waiting = loader.waited - waited
            report = make_report(state, batch, number, rate, now - begin, waiting, is_skipped=loss is None)
            pending.put(loss, report)
            if settings.eval_every and (number + 1) % settings.eval_every == 0 and number + 1 < settings.steps:
                pending.publish()
                finished.append(settings.evaluate(number + 1))
                now = time.perf_counter()
            begin, waited = now, loader.waited
            interrupted = state.strategy.any(stop.is_set())
            due = settings.snapshot_every and (number + 1) % settings.snapshot_every == 0
            if due or interrupted:
                pending.publish()
                settings.save(number + 1, interrupted)
            if interrupted:
                raise KeyboardInterrupt
            if state.strategy.any(any(finished)):
                break
        pending.publish()
    check_learned(losses)


class PendingReport:
    """The report of the last step, published a step late: reading a loss at once would make the device wait."""

    def __init__(self, observers: Sequence[RunLog], losses: list[float]) -> None:
        self._observers, self._losses = observers, losses
        self._pending: tuple[Tensor | None, Callable[[float], StepReport]] | None = None

    def put(self, loss: Tensor | None, make: Callable[[float], StepReport]) -> None:
        """Keep a step's loss, None for a batch that was skipped, and what makes its report of it."""
        self._pending = loss, make

    def publish(self) -> None:
        """Read the loss, append it to the losses, tell the observers. Raises TrainingFailure unless it is finite."""
        if self._pending is not None:
            (loss, make), self._pending = self._pending, None
            self._losses.append(notify(self._observers, make(math.nan if loss is None else float(loss))))


def make_report(
    state: TrainState, batch: Batch, number: int, rate: float, seconds: float, waited: float, *, is_skipped: bool
) -> Callable[[float], StepReport]:
    """Make a function from the loss of a step, which is not known yet, to the step's report."""
    rows, norm = next(iter(batch.values())).shape[0], None if is_skipped else state.gradient_norm
    make = partial(
        StepReport,
        step=number + 1,
        lr=rate,
        tokens=state.objective.count_tokens(batch),
        rows=rows,
        seconds=seconds,
        waited=waited,
        is_skipped=is_skipped,
    )
    return lambda loss: make(loss=loss, norm=None if norm is None else float(norm))


def notify(observers: Sequence[RunLog], report: StepReport) -> float:
    """Tell all observers of a step, and return its loss. Raises TrainingFailure unless it is finite, or skipped."""
    for observer in observers:
        observer.step(report)
    if not (report.is_skipped or math.isfinite(report.loss)):
        raise TrainingFailure(
            f"the loss is {report.loss} at step {report.step}; expected a number. Try a lower learning rate, gradient "
            f"clipping (max_grad_norm), or bf16 in the place of fp16"
        )
    return report.loss


def check_learned(losses: Sequence[float]) -> None:
    """Raise TrainingFailure where there were batches, and all of them were skipped."""
    if losses and all(map(math.isnan, losses)):
        raise TrainingFailure(
            f"nothing was learned: none of {len(losses)} batches had a loss term, since all labels are masked, ignored "
            f"or empty. Look at the labels, and at the length that samples are cut to (max_length)"
        )


def step_seed(seed: int, number: int) -> int:
    """Derive the seed of a step from the seed of the run and the step's number."""
    return (seed * 1_000_003 + number) % 2**63


@contextmanager
def catch_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and Ctrl-C set in the body, for the loop to stop at the end of a step."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(signum: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt  # the second time: at once
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def translate_memory_errors() -> Iterator[None]:
    """Raise OutOfMemory in place of the errors of torch and Python when memory runs out, on a GPU or on the host."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"the device ran out of memory: {first_line(error)}") from error
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise OutOfMemory(f"the machine ran out of memory: {first_line(error)}") from error
        raise


@contextmanager
def translate_batch_norm_errors() -> Iterator[None]:
    """Raise RecipeError in place of batch normalization's error about a batch, or a micro-batch, of one row."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise RecipeError(
            "batch normalization cannot train on one row alone. Give batches (batch_size), and micro-batches (rows), "
            "of two or more rows, and more than one sample"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message: some of torch's carry a stack trace."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
