"""The one training loop: for fine-tuning, distillation, quantization-aware training and pruning schedules."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.errors import OutOfMemory, RecipeError, TrainingFailure
from train.callbacks.callback import RunLog, StepReport
from train.data.batch_loader import BatchLoader
from train.step.objective import Batch
from train.step.train_state import Interrupted, StepCallback, TrainState
from train.step.train_step import train_step

REPEAT_SECONDS = 10.0
"""Within which a second SIGTERM is the first one over again: Slurm sends it to all processes of a job, and the agent of
the ranks passes it on to these."""


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


@translate_batch_norm_errors()
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
    and resumed has the same losses as one that was not. SIGTERM and Ctrl-C end the run after the current step, or in a
    wait for data or an evaluation, with a snapshot, as KeyboardInterrupt. There is a snapshot after the last step, too:
    the evaluation that follows may be interrupted. Raises TrainingFailure where the loss is not finite, and at the end
    where no batch had a loss term; OutOfMemory.
    """
    pending, first = PendingReport(observers, losses), len(losses)
    with catch_signals() as stop, state.watch_for_stop(stop.is_set):
        batches, done, is_ended = iter(loader), first, False
        begin, waited = time.perf_counter(), loader.waited
        while True:
            batch = None if is_ended else wait_for_batch(state, batches, stop)
            is_interrupted = state.strategy.any(stop.is_set())
            if is_interrupted or batch is None:
                break
            rate = float(state.optimizer.param_groups[0]["lr"])
            loss = take_step(state, batch, settings, done)
            done += 1
            finished = [callback(done) for callback in settings.callbacks]
            pending.publish()
            times = time.perf_counter() - begin, loader.waited - waited
            pending.put(loss, make_report(state, batch, done, rate, *times, is_skipped=loss is None))
            if settings.eval_every and done % settings.eval_every == 0 and done < settings.steps:
                pending.publish()
                # All ranks leave the evaluation at once, and stop before the next step.
                with suppress(Interrupted), state.phase("evaluation"):
                    finished.append(settings.evaluate(done))
            begin, waited = time.perf_counter(), loader.waited
            if settings.snapshot_every and done % settings.snapshot_every == 0:
                pending.publish()
                settings.save(done, False)
            is_ended = state.strategy.any(any(finished))
        pending.publish()
        if not is_interrupted:
            check_learned(losses)
        if settings.snapshot_every and done > first and (is_interrupted or done % settings.snapshot_every):
            settings.save(done, is_interrupted)
        if is_interrupted:
            raise KeyboardInterrupt


def take_step(state: TrainState, batch: Batch, settings: LoopSettings, number: int) -> Tensor | None:
    """Take the step with a number, counted from 0, and return its loss."""
    torch.manual_seed(step_seed(settings.seed, number))
    with translate_memory_errors(), state.phase("step"):
        loss = train_step(state, batch, max_grad_norm=settings.max_grad_norm)
    state.scheduler.step()
    return loss


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
    state: TrainState, batch: Batch, step: int, rate: float, seconds: float, waited: float, *, is_skipped: bool
) -> Callable[[float], StepReport]:
    """Make a function from the loss of a step, which is not known yet, to the step's report."""
    rows, norm = next(iter(batch.values())).shape[0], None if is_skipped else state.gradient_norm
    make = partial(
        StepReport,
        step=step,
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


class StopRequest:
    """Whether SIGTERM or Ctrl-C has asked the run to stop."""

    def __init__(self) -> None:
        self._is_set = self._is_waiting = False
        self._since = 0.0

    def is_set(self) -> bool:
        return self._is_set

    def receive(self, signum: int, frame: Any) -> None:
        """Handle a signal: note the first, and end a wait; raise KeyboardInterrupt for a second."""
        if self._is_set:
            if signum == signal.SIGTERM and time.monotonic() < self._since + REPEAT_SECONDS:
                return
            raise KeyboardInterrupt
        self._is_set, self._since = True, time.monotonic()
        if self._is_waiting:
            raise Interrupted

    @contextmanager
    def end_wait(self) -> Iterator[None]:
        """Raise Interrupted in the body as soon as the run is asked to stop."""
        self._is_waiting = True
        try:
            if self._is_set:
                raise Interrupted
            yield
        finally:
            self._is_waiting = False


@contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Yield what SIGTERM and Ctrl-C set in the body, for the loop to stop before the next step."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for_batch(state: TrainState, batches: Iterator[tuple[int, Batch]], stop: StopRequest) -> Batch | None:
    """Return the next batch; None after the last one, and where a request to stop ends the wait."""
    try:
        with state.phase("data"), stop.end_wait():
            _, batch = next(batches, (0, None))
            return batch
    except Interrupted:
        return None


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


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message: some of torch's carry a stack trace."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
