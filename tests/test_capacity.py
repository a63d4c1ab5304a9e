"""The queue against formulas, sizes of loads, and the command that measures a server."""

import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from artifacts import write_artifact
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from laconic.capacity.pace import Pace, PacedClock, measure_pace
from laconic.capacity.service_times import ServiceTimes, pool
from laconic.commands.capacity import parse_limit, parse_rate
from laconic.commands.command_line import app
from laconic.errors import UsageError
from laconic.loadtest.traffic import find_percentile

pytest.importorskip("simpy", reason="simpy is not installed: the extra size brings it")
from laconic.capacity import sizing
from laconic.capacity.queue_simulation import simulate
from laconic.capacity.sizing import find_replicas

MEAN, REQUESTS = 0.01, 20_000


def one_server(times: list[float], **changes: Any) -> ServiceTimes:
    return ServiceTimes(1, 1, {1: (tuple(times),)}, {1: (tuple(times),)}, **{"cpu": 0.0} | changes)


@pytest.mark.parametrize("where", ["engine", "cpu"])
def test_one_executor_with_a_constant_time_is_an_m_d_1_queue_and_so_is_the_servers_own_loop(where: str) -> None:
    times = one_server([MEAN]) if where == "engine" else one_server([MEAN / 10], cpu=MEAN)
    latencies = simulate(times, 0.6 / MEAN, requests=REQUESTS)
    if where == "engine":
        assert fmean(latencies) == pytest.approx(MEAN + 0.6 * MEAN / (2 * (1 - 0.6)), rel=0.05)
    else:  # half of it is taken before the engine, half behind it
        assert MEAN < fmean(latencies) < MEAN + 0.6 * MEAN / (1 - 0.6)


def test_batches_raise_the_capacity_and_several_executors_share_a_queue() -> None:
    batched = ServiceTimes(1, 4, *[{1: ((0.01,),), 4: ((0.016,),)}] * 2, 0.0)
    assert batched.capacity == pytest.approx(250)
    assert find_percentile(simulate(batched, 200, requests=4000), 99) < 0.06
    assert batched.work(2, together=False) == pytest.approx(0.012)
    pair = ServiceTimes(2, 1, {1: ((0.01,),)}, {1: ((0.02,),)}, 0.0)
    slow = simulate(pair, 1, requests=400)
    assert fmean(slow) == pytest.approx(0.01, rel=0.05)
    assert pair.capacity == pytest.approx(100)


def test_a_batch_behind_one_of_another_size_takes_longer() -> None:
    same, changing = (
        ServiceTimes(1, 2, *[{1: ((0.01,),), 2: ((0.01,),)}] * 2, 0.0, change=change) for change in (0, 0.005)
    )
    assert fmean(simulate(changing, 1, requests=400)) == pytest.approx(fmean(simulate(same, 1, requests=400)), rel=0.02)
    assert fmean(simulate(changing, 100, requests=4000)) > fmean(simulate(same, 100, requests=4000)) + 0.003


def test_replicas_are_the_fewest_that_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "REQUESTS", 2000)
    times = one_server([MEAN], delay=0.001)
    replicas = find_replicas(times, 450, 0.05)
    assert replicas is not None
    assert find_percentile(simulate(times, 450 / replicas, requests=2000), 99) <= 0.05
    assert find_percentile(simulate(times, 450 / (replicas - 1), requests=2000), 99) > 0.05
    assert find_replicas(times, 450, 0.005) is None
    slower = one_server([1.5 * MEAN])
    monkeypatch.setattr(sizing, "REQUESTS", 1000)
    monkeypatch.setattr(sizing, "SHARES", (0.5,))
    result = sizing.size_replicas([times, slower], 450, 0.06, cores=2)
    low, high = result.replicas_range
    assert low is not None
    assert high is not None
    assert low < high
    assert pool([times, slower]).alone[1] == ((MEAN,), (1.5 * MEAN,))


def test_all_that_arrive_in_a_pause_of_the_machine_wait_for_its_end() -> None:
    times = ([0.001] * 999 + [0.101]) * 2
    paused = one_server(times)
    assert paused.capacity == pytest.approx(1000 * 2.0 / 2.2)
    latencies = simulate(paused, 100, requests=REQUESTS)
    slow = sum(latency > 0.05 for latency in latencies) / len(latencies)
    assert slow == pytest.approx(2 / 2.2 * 0.05, rel=0.3), "pauses of 0.1 s, 2 in 2.2 s: half of who arrives in one"
    assert min(simulate(paused, 0.2, requests=500)) == pytest.approx(0.001), "pauses between requests are past"
    assert pool([paused, paused]).pace.mean == pytest.approx(2.0 / 2.2)


def test_a_slow_phase_through_several_sizes_stays_whole() -> None:
    fast, slow = (0.01, 0.01), (0.02, 0.02)
    first, second = (
        ServiceTimes(1, 2, {1: (times,), 2: (times,)}, {1: (times,), 2: (times,)}, 0.0) for times in (fast, slow)
    )
    paces = [[stretch.pace for stretch in series] for series in pool([first, second]).pace.series]
    assert paces == [[pytest.approx(1.5)] * 4, [pytest.approx(0.75)] * 4]


def test_a_machine_that_is_slow_for_a_while_makes_a_longer_queue_than_one_that_is_slow_now_and_then() -> None:
    phases, mixed = [0.005] * 100 + [0.015] * 100, [0.005, 0.015] * 100
    slow, even = (find_percentile(simulate(one_server(times), 70, requests=8000), 99) for times in (phases, mixed))
    assert slow > 1.5 * even


@given(st.lists(st.floats(0.005, 1.0), min_size=1, max_size=9), st.lists(st.floats(0.001, 2.0), min_size=1, max_size=9))
def test_work_takes_its_time_at_the_pace_of_the_machine(times: list[float], works: list[float]) -> None:
    clock = PacedClock(Pace((measure_pace(0.1, times),)), random.Random(1))
    now = 0.0
    for work in works:
        end = clock.finish(now, work)
        assert work * min(times) / 0.1 <= (end - now) * 1.000001
        assert (end - now) <= work * max(times) / 0.1 * 1.000001
        now = end
    whole = clock.finish(0.0, 0.1 * len(times))
    assert whole == pytest.approx(sum(times)), "a series of services takes as long as it took"
    assert PacedClock(Pace(), random.Random(1)).finish(3.0, 0.5) == 3.5


@pytest.mark.parametrize("text", ["2000", "2000/h", "0/s", "-1/s", "2e3/s", "2000 /s", "/s", "nan/s"])
def test_a_rate_has_its_unit(text: str) -> None:
    with pytest.raises(UsageError, match="as 2000/s or 300/min"):
        parse_rate(text)
    assert (parse_rate("2000/s"), parse_rate("30/min"), parse_limit("50ms")) == (2000, 0.5, 0.05)
    with pytest.raises(UsageError, match="as 50ms or"):
        parse_limit("50")


def test_the_command_measures_a_server_and_draws_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "REQUESTS", 500)
    artifact = write_artifact(tmp_path / "twice.laconic", seconds=0.002)
    limits = ["--rate", "1000/s", "--p99", "200ms", "--threads", "2", "--seconds", "0.1", "--rounds", "1", "--json"]
    done = CliRunner().invoke(app, ["size", str(artifact), *limits, "--chart", str(tmp_path / "curve.svg")])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["replicas"] >= 1
    assert result["cores"] == 2
    assert len(result["curve"]) == len(sizing.SHARES)
    assert "<svg" in (tmp_path / "curve.svg").read_text()
