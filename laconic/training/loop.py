"""The one training loop: for fine-tuning, distillation, quantization-aware training and pruning schedules."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from laconic.errors import OutOfMemory, TrainingFailure
from laconic.training.callbacks.monitor import Observer, StepReport
from laconic.training.data.batch_loader import Feed
from laconic.training.step.parts import Kit
from laconic.training.step.step import step

Event = Callable[[int], bool | None]
"""Called after each step with the steps done so far: a pruning schedule, a change of the quantizer's ranges. True ends
the run, as if it had been no longer."""


@dataclass(frozen=True)
class Run:
    """What goes on round the steps.

    keep: writes a snapshot after so many steps; the second argument says whether to wait until it is on the disk.
    every: steps between two snapshots. judge: is told after each `epoch` steps how many are done, save after the last.
    seed: of dropout and of whatever else draws numbers in a step.
    """

    steps: int
    seed: int
    clip: float | None = None
    every: int = 0
    keep: Callable[[int, bool], None] = lambda steps, wait: None
    epoch: int = 0
    judge: Callable[[int], None] = lambda steps: None
    observers: Sequence[Observer] = ()
    events: Sequence[Event] = field(default=())


def train(kit: Kit, feed: Feed, schedule: LRScheduler, run: Run, losses: list[float]) -> None:
    """Take the steps that the feed has batches for, and add the loss of each to `losses`.

    The numbers that a step draws depend on the seed and the step's number alone, so that a run which was interrupted
    and resumed has the same losses as one that was not. SIGTERM and Ctrl-C end the run after the step under way, with a
    snapshot, as KeyboardInterrupt. Raises TrainingFailure where the loss is not a number, OutOfMemory.
    """
    pending: tuple[Tensor, Callable[[float], StepReport]] | None = None

    def settle() -> None:
        nonlocal pending
        if pending is not None:
            loss, told = pending
            pending = None
            losses.append(tell(run.observers, told(float(loss))))

    with stopping() as stop:
        begin, waited = time.perf_counter(), feed.waited
        for number, batch in feed:
            torch.manual_seed(seed_of(run.seed, number))
            rate = float(kit.optimizer.param_groups[0]["lr"])
            with short_of_memory():
                loss = step(kit, batch, clip=run.clip)
            schedule.step()
            enough = [event(number + 1) for event in run.events]
            settle()  # a step late: reading a loss at once would make the device wait for the host
            now = time.perf_counter()
            pending = loss, report(kit, batch, number, rate, now - begin, feed.waited - waited)
            if run.epoch and (number + 1) % run.epoch == 0 and number + 1 < run.steps:
                settle()
                run.judge(number + 1)
                now = time.perf_counter()
            begin, waited = now, feed.waited
            asked = kit.any(stop.is_set())
            due = run.every and (number + 1) % run.every == 0
            if due or asked:
                settle()
                run.keep(number + 1, asked)
            if asked:
                raise KeyboardInterrupt
            if kit.any(any(enough)):
                break
        settle()


def report(
    kit: Kit, batch: dict[str, Tensor], number: int, rate: float, seconds: float, waited: float
) -> Callable[[float], StepReport]:
    """What is said of a step, as soon as its loss is known."""
    tokens, rows, norm = kit.objective.tokens(batch), next(iter(batch.values())).shape[0], kit.norm

    def told(loss: float) -> StepReport:
        return StepReport(
            step=number + 1,
            loss=loss,
            lr=rate,
            tokens=tokens,
            rows=rows,
            seconds=seconds,
            waited=waited,
            norm=None if norm is None else full(norm),
        )

    return told


def full(norm: Tensor) -> float:
    """A norm over all ranks, where each has its share of the weights."""
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def tell(observers: Sequence[Observer], report: StepReport) -> float:
    """Tell everybody who watches. Raises TrainingFailure where the loss is not a number."""
    for observer in observers:
        observer.step(report)
    if not math.isfinite(report.loss):
        raise TrainingFailure(
            f"the loss is {report.loss} at step {report.step}; expected a number. Try a lower learning rate, a clip, "
            f"or bf16 in the place of fp16"
        )
    return report.loss


def seed_of(seed: int, number: int) -> int:
    """The seed of a step."""
    return (seed * 1_000_003 + number) % 2**63


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that is set when the process is asked to stop, which then happens at the end of a step."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(signum: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt  # asked twice: at once
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def short_of_memory() -> Iterator[None]:
    """Raise OutOfMemory for what torch raises when there is no memory, on a GPU or on the host."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"the device ran out of memory: {first_line(error)}") from error
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise OutOfMemory(f"the machine ran out of memory: {first_line(error)}") from error
        raise


def first_line(error: BaseException) -> str:
    """What an error says, without the stack that some of torch's carry."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
