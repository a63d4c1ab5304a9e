"""How long a step takes: operations counted, and priced by what the device was measured to do."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.cache import Cache
from train.offload.chunked_loops import chunks, sample_chunks
from train.offload.memory_accounting import account_as
from train.parallel.collective_traffic import find_tensors
from train.planner import device_rates as rates_module
from train.planner.device_rates import (
    DeviceRates,
    RateCurve,
    TimedKernel,
    measure_curve,
    measure_rates,
    spread_over_threads,
)
from train.planner.memory_timeline import AllocationLog
from train.planner.simulate import AllocationTracker, make_fake_mode
from train.planner.step_cost import CostMeter, StepCost, count_bytes

FLAT = {"amounts": (1.0, 1e15), "seconds": (1e-9, 1e6)}
"""A second for 10^9 of anything, from 1 on."""
SECOND = 1e9
RATES = DeviceRates(
    name="steady",
    kind="cpu",
    products={"float32": RateCurve(**FLAT), "bfloat16": RateCurve(amounts=(1.0, 1e15), seconds=(1e-10, 1e5))},
    passes=RateCurve(amounts=(1.0, 1e15), seconds=(1e-12, 1e3)),
    copies=RateCurve(**FLAT),
)


def worked(run, rates=RATES) -> StepCost:
    meter = CostMeter(rates)
    with AllocationTracker(AllocationLog(), torch.device("cpu"), meter):
        run()
    return meter.phases.get("build", StepCost())


def test_products_cost_their_pairs_and_other_operations_their_bytes_and_looks_are_free():
    a, b = torch.ones(30, 20), torch.ones(20, 10)
    work = worked(lambda: a @ b)
    assert work.flops == 2 * 30 * 20 * 10
    assert work.device == pytest.approx(2 * 30 * 20 * 10 / SECOND, rel=1e-6)
    assert (work.copies, work.host) == (0.0, 0.0)
    a = torch.ones(64, 64)
    narrow = a.bfloat16()
    assert worked(lambda: narrow @ narrow).device == pytest.approx(worked(lambda: a @ a).device / 10, rel=1e-6)
    a = torch.ones(1000)
    work = worked(lambda: a + a)
    assert work.flops == 0
    assert work.device == pytest.approx(RATES.passes(3 * 4000.0))
    a = torch.ones(8, 8)
    looks = (lambda: a.view(64), lambda: a.t(), lambda: a[2:], a.detach, lambda: a[None].expand(9, 8, 8))
    assert [worked(look).seconds() for look in (*looks, lambda: torch.empty(5))] == [0.0] * 6


def test_the_question_for_the_device_of_a_fake_tensor_is_no_operation():
    with make_fake_mode():
        a = torch.empty(1000, requires_grad=True)
        assert worked(lambda: a.device).seconds() == 0.0
        assert worked(lambda: a * a).device == pytest.approx(RATES.passes(3 * 4000.0))


@pytest.mark.parametrize("backward", [False, True])
def test_attention_counts_both_of_its_products(backward):
    query, key = (torch.ones(2, 3, length, 8, requires_grad=backward) for length in (5, 7))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, key)
    run = (lambda: out.sum().backward()) if backward else (
        lambda: torch.nn.functional.scaled_dot_product_attention(query, key, key)
    )  # fmt: skip
    products = 4 * 2 * 3 * 5 * 7 * 8
    assert worked(run).flops == pytest.approx(products * (2.5 if backward else 1))


def test_copies_go_on_beside_the_device_and_the_host_works_after_it_at_its_own_speed():
    a = torch.ones(1000)

    def run():
        with account_as(copying=True):
            a.clone()
        with account_as("host"):
            a + a

    work = worked(run)
    assert work.copies == pytest.approx(4000 / SECOND)
    assert work.device == 0
    assert work.host > 0
    assert StepCost(device=2.0, copies=3.0, host=4.0).seconds() == 7.0
    assert StepCost(device=3.0, copies=2.0, host=4.0).seconds() == 7.0
    slow = RATES.model_copy(update={"passes": RateCurve(amounts=(1.0, 1e15), seconds=(1e-9, 1e6))})
    a = torch.ones(1000)

    def run():
        with account_as("host"):
            a + a

    assert worked(run, RATES.model_copy(update={"host": slow})).host == pytest.approx(slow.passes(12000.0))


def test_what_is_left_out_of_a_simulation_is_counted():
    a = torch.ones(16, 16)

    def run():
        for _ in chunks(100, 10):
            a @ a

    with sample_chunks():
        assert worked(run).flops == pytest.approx(10 * 2 * 16**3)
    assert worked(run).flops == pytest.approx(10 * 2 * 16**3)


@given(st.floats(0, 9), st.floats(0, 9), st.floats(0, 9), st.floats(0.1, 9))
def test_work_adds_up(device, copies, host, times):
    one, other = StepCost(device, copies, host, 1.0), StepCost(host, device, copies, 2.0)
    both = one.plus(other, times)
    assert both.device == pytest.approx(device + times * host)
    assert both.flops == pytest.approx(1 + 2 * times)
    assert StepCost().plus(one) == one


def test_tensors_are_found_wherever_they_are():
    a, b = torch.ones(3), torch.ones(2, dtype=torch.int8)
    assert [each is a or each is b for each in find_tensors((a, {"x": [b, None, 3]}))] == [True, True]
    assert count_bytes([a, b, a.expand(10, 3)]) == 12 + 2 + 120


MEASURED = RateCurve(amounts=(10.0, 100.0, 1000.0), seconds=(1.0, 2.0, 16.0))


def test_a_curve_goes_through_what_was_measured():
    assert [MEASURED(amount) for amount in MEASURED.amounts] == pytest.approx(MEASURED.seconds)
    assert MEASURED(1.0) == 1.0
    assert MEASURED(10_000.0) == 160.0


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_more_work_takes_no_less_time(one, other):
    low, high = sorted((one, other))
    assert MEASURED(low) <= MEASURED(high) * (1 + 1e-9)


def make_kernel(work, sizes=(4, 40), make=lambda count: (torch.ones(count),)):
    return TimedKernel(sizes, make, work, float)


def test_a_curve_is_measured_at_each_size_and_never_falls():
    sleepy = SimpleNamespace(calls=0)

    def work(a):
        sleepy.calls += 1
        return a.sum()

    made = measure_curve(torch.device("cpu"), make_kernel(work))
    assert made.amounts == (4.0, 40.0)
    assert sleepy.calls >= 2 * 4
    assert np.all(np.diff(made.seconds) >= 0)


def test_a_size_for_which_there_is_no_room_or_no_time_ends_the_curve(monkeypatch):
    def make(count):
        if count > 10:
            raise MemoryError
        return (torch.ones(count),)

    made = measure_curve(torch.device("cpu"), make_kernel(torch.sum, (4, 8, 40), make))
    assert made.amounts == (4.0, 8.0)
    assert len(made.seconds) == 2
    with pytest.raises(MemoryError):
        measure_curve(torch.device("cpu"), make_kernel(torch.sum, (40,), make))
    monkeypatch.setattr(rates_module, "LONGEST", 0.0)
    assert measure_curve(torch.device("cpu"), make_kernel(torch.sum)).amounts == (4.0,)


def test_what_slows_the_yardstick_too_is_not_the_kernels(monkeypatch):
    """The clock runs at half the speed while the second of the sizes is timed."""
    seconds = {4: 1.0, 40: 3.0}
    now, slow = [0.0], [1.0]

    def work(a):
        slow[0] = 2.0 if len(a) == 40 else 1.0
        now[0] += seconds[len(a)] * slow[0]

    def multiply(*matrices):
        now[0] += 0.5 * slow[0]

    monkeypatch.setattr(rates_module, "make_clock", lambda device: lambda: now[0])
    monkeypatch.setattr(rates_module.torch, "mm", multiply)
    monkeypatch.setattr(rates_module, "LONGEST", 100.0)
    monkeypatch.setattr(rates_module, "SECONDS", 0.0)
    made = measure_curve(torch.device("cpu"), make_kernel(work))
    assert made.seconds == pytest.approx((1.0, 3.0))


def test_on_a_busy_machine_long_calls_are_taken_to_use_all_threads(monkeypatch):
    monkeypatch.setattr(rates_module.torch, "get_num_threads", lambda: 4)
    alone = RateCurve(amounts=(4.0, 40.0), seconds=(1e-5, 1.0))
    assert spread_over_threads(make_kernel(torch.sum), alone, share=0.3).seconds == (1e-5, 0.25)
    timed = spread_over_threads(make_kernel(torch.sum), alone, share=1.0)
    assert all(one / 8 <= both <= one for one, both in zip(alone.seconds, timed.seconds, strict=True))


@pytest.fixture
def shares(monkeypatch):
    """Small measurements, on a machine that leaves the shares that the test puts here, the last one for good."""
    monkeypatch.setattr(rates_module, "MATRIX_SIDES", {"cpu": (8, 16)})
    monkeypatch.setattr(rates_module, "ARRAY_BYTES", {"cpu": (64, 1024)})
    monkeypatch.setattr(rates_module, "SECONDS", 0.001)
    left = [1.0]
    monkeypatch.setattr(rates_module, "measure_share", lambda: left.pop(0) if len(left) > 1 else left[0])
    return left


def test_rates_of_a_busy_machine_are_measured_again_when_it_is_less_busy(tmp_path, shares):
    cache, cpu = Cache(tmp_path), torch.device("cpu")
    shares[:] = [0.3]
    busy = measure_rates(cpu, cache)
    assert busy.is_busy
    assert "30 % of the processor" in busy.explain_busy()
    assert measure_rates(cpu, cache) == busy, "no better moment"
    shares[:] = [0.9, 0.2, 0.2]
    assert measure_rates(cpu, cache) == busy, "the better of two is kept"
    shares[:] = [0.95]
    quiet = measure_rates(cpu, cache)
    assert (quiet.share, quiet.is_busy) == (0.95, False)
    shares[:] = [1.0]
    assert measure_rates(cpu, cache) == quiet
    assert measure_rates(cpu, cache, again=True).share == 1.0
