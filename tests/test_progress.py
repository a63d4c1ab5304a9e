"""Steps of a run on the console, one within another."""

import io
from itertools import count
from types import SimpleNamespace

import pytest
from rich.console import Console

from laconic import progress
from laconic.progress import Steps


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def steps(request, monkeypatch):
    found = Steps()
    monkeypatch.setattr(found, "_console", Console(file=io.StringIO(), force_terminal=request.param))
    return found


def printed(steps):
    return steps._console.file.getvalue()


def test_a_step_within_a_step_is_printed_and_its_time_counts_once(steps, monkeypatch):
    clock = count()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    with steps.step("outer", 2) as outer:
        outer.advance()
        with steps.step("inner") as inner:
            inner.note = "found"
        outer.advance()
    assert steps.seconds == {"inner": 1.0, "outer": 2.0}
    said = printed(steps)
    assert said.index("inner") < said.rindex("outer")
    assert "found" in said


def test_a_step_that_fails_leaves_the_steps_around_it_running(steps):
    with steps.step("outer", 1):
        with pytest.raises(ValueError, match="missing"), steps.step("inner", 3):
            raise ValueError("missing")
        with steps.step("next", 1) as step:
            step.advance()
    assert set(steps.seconds) == {"outer", "next"}
