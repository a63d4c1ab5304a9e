"""Training runs that take turns: each in a process of its own, one step of one run at a time.

So whatever else the machine does hits all of them alike, and each has memory of its own that can be measured.
"""

import json
import os
import re
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from train.callbacks.callback import Callback, RunDescription, RunLog, StepReport

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(name: str = "VmRSS") -> int:
    """Bytes of this process in memory; "VmHWM": the most since `forget_peak`."""
    found = re.search(rf"{name}:\s+(\d+)", STATUS.read_text(encoding="utf-8"))
    assert found is not None
    return 1024 * int(found[1])


def forget_peak() -> None:
    """Let the greatest resident size begin anew (proc_pid_clear_refs(5))."""
    CLEAR_REFS.write_text("5", encoding="utf-8")


class TrainerTurns(Protocol):
    """What a trainer calls: `begin` before its first step, and `end_step` after each."""

    def begin(self) -> None: ...
    def end_step(self) -> None: ...


class NoTurns:
    """The turns of a run that waits for no other."""

    def begin(self) -> None:
        """Go on."""

    def end_step(self) -> None:
        """Go on."""


class StepTurns:
    """The turns of one run. A run calls `begin` before its first step and `end_step` after each; both return when it is
    its turn again, and what it does in between is its step. The run's peak is that of its steps.

    Laconic tells of a step when the next one is over. So that all trainers take the same steps in the same turn, the
    first turn has two steps, and the last none: late is for trainers that tell of a step at once."""

    def __init__(self, connection: Connection, *, late: bool) -> None:
        self._connection = connection
        self._late = late
        self._owes, self._since = False, 0.0
        self.base = self.peak = 0

    def open_model(self) -> None:
        """The model is about to be loaded: the resident size so far is not of training."""
        self.base = resident()

    def begin(self) -> None:
        """Wait for the turn of the first step."""
        forget_peak()
        self._wait(0.0)

    def end_step(self) -> None:
        """Tell the processor time of the step, of all threads, and wait for the next turn."""
        if self._late:
            self._late, self._owes = False, True
            return
        self.peak = resident("VmHWM") - self.base
        self._wait(time.process_time() - self._since)

    def finish(self, result: Mapping[str, object]) -> None:
        """Tell the result, with the peak."""
        if self._owes:
            self._wait(0.0)
        self._connection.send(json.dumps({**result, "peak": self.peak, "process": os.getpid()}))

    def _wait(self, seconds: float) -> None:
        self._connection.send(seconds)
        self._connection.recv()
        self._since = time.process_time()


class Turns(Callback):
    """Laconic's runs take turns by a callback of the recipe: `trainer_turns:Turns`."""

    def open(self, run: RunDescription) -> RunLog:
        assert CURRENT
        return TurnsLog(CURRENT[-1])


CURRENT: list[TrainerTurns] = []
"""The turns of this process."""


class TurnsLog(RunLog):
    """A run begins after the evaluation before training."""

    def __init__(self, turns: TrainerTurns) -> None:
        self._turns = turns

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        if step == 0:
            self._turns.begin()

    def step(self, report: StepReport) -> None:
        self._turns.end_step()
