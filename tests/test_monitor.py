import io
import itertools
import json
import math
import sys
import types

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional

from laconic.cache import Cache
from laconic.errors import MissingPackage
from train.callbacks import flops as flops_module
from train.callbacks.callback import StepReport
from train.callbacks.energy import DeviceSample, Energy, NvmlDevice, summarize
from train.callbacks.flops import Flops, Peak, datasheet, device_peak
from train.callbacks.journal import Journal, read_lines
from train.callbacks.monitor import MovingAverage, Progress, StepMeter, peak_memory
from train.callbacks.run_estimate import RunEstimate, format_estimate
from train.callbacks.tensorboard import TensorBoard

CPU = torch.device("cpu")
PEAK = Peak(1e9, "FP32", "made up")


def report(step, **changes):
    given = {"loss": 2.0, "lr": 1e-3, "tokens": 1000, "rows": 8, "seconds": 0.5, "waited": 0.05}
    return StepReport(step=step, **{**given, **changes})


class Fixed:
    """FLOPs known beforehand: half of the peak."""

    peak = PEAK

    def utilization(self, units, seconds):
        return 0.5


@pytest.fixture
def meter():
    return StepMeter(CPU)


# What follows from a report


def test_a_reading_is_in_tokens_where_there_are_any_else_in_rows(meter):
    reading = meter.read(report(1))
    assert (reading.speed, reading.unit, reading.mfu) == (2000, "tokens", None)
    assert reading.idle == pytest.approx(0.1)
    for tokens in (0, 8):
        rows = meter.read(report(1, tokens=tokens))
        assert (rows.speed, rows.unit) == (16, "rows")


def test_the_peak_of_a_cpu_run_is_what_the_process_holds_and_says_so(meter):
    before = peak_memory(CPU)
    block = torch.ones(64 * 2**20 // 4)
    assert peak_memory(CPU) >= before > 2**20
    assert peak_memory(CPU) > block.nbytes
    assert any("resident" in note for note in meter.notes())


@pytest.mark.gpu
def test_the_peak_of_a_cuda_run_is_that_of_its_tensors():
    device = torch.device("cuda")
    meter = StepMeter(device)
    start = meter.read(report(1)).memory
    del_me = torch.ones(2**20, device=device)
    assert meter.read(report(2)).memory >= start + del_me.nbytes


def test_the_average_forgets_slowly_and_has_no_bias_to_zero():
    average = MovingAverage()
    assert math.isnan(average.value)
    assert average.add(4.0) == pytest.approx(4.0)
    assert average.add(2.0) == pytest.approx((0.9 * 4 + 2) / 1.9)
    assert average.add(math.inf) == pytest.approx((0.9 * 4 + 2) / 1.9)


# Progress


def test_without_a_terminal_a_line_is_said_for_every_tenth_of_the_steps_unless_quiet(capsys):
    observer = Progress(50, StepMeter(CPU, Fixed()))
    for step in range(1, 51):
        observer.step(report(step))
    observer.close()
    err = capsys.readouterr().err.splitlines()
    said = [line for line in err if line.startswith("step")]
    assert [line.split()[1] for line in said] == [f"{n}/50" for n in (1, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50)]
    assert "loss 2.0000  2.00k tokens/s  MFU 50 %  peak" in said[1]
    assert "waited 10 %  0:22 left" in said[1]
    assert "left" not in said[-1]
    assert any("0.001 TFLOP/s in FP32 (made up)" in line for line in err)
    observer = Progress(1, StepMeter(CPU), quiet=True)
    observer.step(report(1))
    observer.close()
    assert capsys.readouterr().err == ""


def test_the_first_step_counts_for_nothing_and_a_resumed_run_goes_on_from_its_step(capsys):
    observer = Progress(4, StepMeter(CPU))
    observer.step(report(1, seconds=100.0))
    observer.step(report(2))
    assert "2.00k tokens/s" in capsys.readouterr().err.splitlines()[-1]
    observer = Progress(100, StepMeter(CPU), start=60)
    for step in range(61, 65):
        observer.step(report(step, seconds=9.0 if step == 61 else 0.5))
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in said if line.startswith("step")] == ["61/100"]


def test_a_loss_that_is_no_number_is_shown_and_spoils_no_later_one(capsys):
    observer = Progress(3, StepMeter(CPU))
    for step, loss in enumerate((1.0, math.nan, 1.0), 1):
        observer.step(report(step, loss=loss))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert ["loss nan" in line for line in said] == [False, True, False]
    assert "loss 1.0000" in said[-1]


def test_on_a_terminal_one_line_lives():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160, highlight=False)
    observer = Progress(10, StepMeter(CPU, Fixed()), console=console)
    for step in range(1, 11):
        observer.step(report(step))
    observer.close()
    shown = screen.getvalue()
    assert "10/10" in shown
    assert "MFU 50 %" in shown
    assert "step 1/10" not in shown


# The journal


def test_the_journal_has_a_line_of_json_for_each_step(tmp_path, meter):
    journal = Journal(tmp_path / "out" / "train.jsonl", meter)
    journal.step(report(1, norm=0.5))
    journal.step(report(2, loss=math.nan))
    journal.close()
    first, second = map(json.loads, (tmp_path / "out" / "train.jsonl").read_text().splitlines())
    assert (first["step"], first["loss"], first["norm"], first["waited"], first["idle"]) == (1, 2.0, 0.5, 0.05, 0.1)
    assert (first["speed"], first["unit"]) == (2000, "tokens")
    assert second["loss"] is None


def test_a_resumed_journal_cuts_what_came_after_and_half_a_line(tmp_path, meter):
    path = tmp_path / "train.jsonl"
    journal = Journal(path, meter)
    for step in (1, 2, 3, 4):
        journal.step(report(step))
    journal.close()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')
    again = Journal(path, meter, start=2)
    again.step(report(3, loss=7.0))
    again.close()
    assert [(line["step"], line["loss"]) for line in read_lines(path)] == [(1, 2.0), (2, 2.0), (3, 7.0)]
    assert path.read_text().count("\n") == 3
    Journal(path, meter).close()
    assert path.read_text() == ""


# FLOPs


def forward(flops, module, x, name="forward"):
    with flops.phase(name):
        return module(x)


def test_flops_are_those_of_the_model_three_times_forward(tmp_path):
    flops = Flops(PEAK)
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    for _ in range(2):  # two micro-batches of one step
        forward(flops, module, torch.ones(8, 32)).sum().backward()
    with flops.phase("optimizer"):
        pass
    forward(flops, module, torch.ones(8, 32))
    step = 3 * 2 * 16 * (32 * 64 + 64 * 16)
    assert flops.utilization(16, 1.0) == pytest.approx(step / 1e9)
    assert flops.utilization(8, 0.25) == pytest.approx(2 * step / 1e9)


def test_frozen_parameters_take_no_gradient_and_nothing_counted_is_no_utilisation():
    counted = {}
    for learning in (0.0, 1.0):
        flops = Flops(PEAK, trainable=learning)
        forward(flops, nn.Linear(4, 4), torch.ones(2, 4))
        counted[learning] = flops.utilization(2, 1.0)
    assert counted[0.0] == pytest.approx(counted[1.0] * 2 / 3)
    assert Flops(PEAK).utilization(8, 1.0) is None


def test_what_is_computed_again_is_not_counted_and_the_loss_stays_the_same():
    module, x = nn.Linear(16, 16), torch.randn(4, 16)
    plain = module(x)
    flops = Flops(PEAK)
    with flops.phase("forward"):
        y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    with flops.phase("backward"):
        y.sum().backward()
    assert torch.equal(plain, y)
    assert flops.utilization(4, 1.0) == pytest.approx(3 * 2 * 4 * 16 * 16 / 1e9)


def test_attention_is_counted_on_a_cpu():
    q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for n in (8, 12, 12))
    flops = Flops(PEAK)
    with flops.phase("forward"):
        functional.scaled_dot_product_attention(q, k, v)
    assert flops.utilization(1, 1.0) == pytest.approx(3 * 2 * (2 * 2 * 4 * 8 * 12 * 16) / 1e9)


def test_a_product_with_4_bit_weights_is_counted():
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    layer = bitsandbytes.nn.Linear4bit(64, 32, quant_type="nf4", compute_dtype=torch.float32).to(CPU)
    flops = Flops(PEAK, trainable=0)
    forward(flops, layer, torch.ones(8, 64, requires_grad=True))
    assert flops.utilization(8, 1.0) == pytest.approx(2 * 2 * 8 * 64 * 32 / 1e9)


def test_a_compiled_model_is_counted_and_compiled_after_the_first_step():
    met, counts = [], []

    def compiler(graph, inputs):
        met.append(graph)
        return graph.forward

    compiled = torch.compile(nn.Linear(16, 16), backend=compiler)
    flops = Flops(PEAK)
    for _ in range(2):
        forward(flops, compiled, torch.ones(4, 16)).sum().backward()
        with flops.phase("optimizer"):
            counts.append(len(met))
    assert counts == [0, 1]
    assert flops.utilization(4, 1.0) == pytest.approx(3 * 2 * 4 * 16 * 16 / 1e9)


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "BF16", 989.4),
        ("NVIDIA H100 PCIe", "BF16", 756),
        ("NVIDIA H200 NVL", "FP16", 835.5),
        ("NVIDIA A100-SXM4-80GB", "FP32", 19.5),
        ("NVIDIA L4", "BF16", 121),
        ("NVIDIA L40S", "BF16", 362.05),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "BF16", None),
        ("NVIDIA A10G", "BF16", None),
        ("NVIDIA GH200 480GB", "BF16", None),
        ("NVIDIA H200", "float64", None),
    ],
)
def test_the_data_sheet_gives_dense_figures_of_the_devices_that_it_knows_by_name(name, precision, tera):
    assert datasheet(name, precision) == (tera and pytest.approx(tera * 1e12))


def test_the_peak_is_measured_once_and_kept(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    first = device_peak(CPU, torch.float32, cache)
    assert first.flops > 1e8
    assert (first.precision, first.source.startswith("measured here")) == ("FP32", True)
    monkeypatch.setattr(flops_module, "measure_peak", lambda *_: pytest.fail("measured again"))
    assert device_peak(CPU, torch.float32, cache) == first
    assert "TFLOP/s in FP32 (measured here" in str(first)


@pytest.mark.parametrize(("seconds", "products"), [(0.01, 21), (0.9, 3), (50.0, 1)])
def test_a_slow_precision_is_timed_by_fewer_products(monkeypatch, seconds, products):
    clock = itertools.count()
    monkeypatch.setattr(flops_module, "PATIENCE", 2.0)
    monkeypatch.setattr(flops_module, "processor_time", lambda: next(clock) * seconds)
    assert flops_module.measure_peak(CPU, torch.float32) == pytest.approx(2 * 1024**3 / seconds)
    assert next(clock) == 2 * products


@pytest.mark.gpu
def test_a_measured_peak_does_not_exceed_the_data_sheet():
    device = torch.device("cuda")
    stated = device_peak(device, torch.bfloat16, Cache()).flops
    assert 0.3 * stated < flops_module.measure_peak(device, torch.bfloat16) < 1.02 * stated


# Energy


class NvmlError(Exception):
    pass


def nvml(counter=(), power=(), busy=(), knows=True, starts=True):
    """The module pynvml, with the answers to give: a device that does not know a figure raises."""
    fake = types.ModuleType("pynvml")
    answers = {"energy": iter(counter), "power": iter(power), "busy": iter(busy)}
    fake.NVMLError = NvmlError
    fake.running = 0

    def init():
        if not starts:
            raise NvmlError("NVML Shared Library Not Found")
        fake.running += 1

    def shut():
        fake.running -= 1

    def find(uuid):
        if not knows:
            raise NvmlError("Not Found")
        return uuid

    def ask(name):
        def answer(handle):
            assert handle == "GPU-1"
            try:
                return next(answers[name])
            except StopIteration:
                raise NvmlError("Not Supported") from None

        return answer

    fake.nvmlInit, fake.nvmlShutdown, fake.nvmlDeviceGetHandleByUUID = init, shut, find
    fake.nvmlDeviceGetTotalEnergyConsumption = ask("energy")
    fake.nvmlDeviceGetPowerUsage = ask("power")
    fake.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=ask("busy")(handle))
    return fake


def test_energy_is_the_difference_of_the_device_s_counter():
    fake = nvml(counter=(5_000, 65_000), power=(200_000,) * 999, busy=(50,) * 999)
    energy = Energy(NvmlDevice(fake, "1"))
    energy.step(report(1, tokens=40))
    energy.close()
    usage = energy.usage
    assert (usage.joules, usage.source, usage.joules_per_unit) == (60.0, "counter", 1.5)
    assert (usage.busy, fake.running) == (0.5, -1)
    assert (energy.read_busy(), energy.read_busy()) == (0.5, None)
    energy.close()
    assert energy.usage is usage


def test_the_device_is_sampled_while_the_run_goes_on():
    energy = Energy(NvmlDevice(nvml(counter=(1, 2)), "1"))
    waiting = energy._closed
    waiting.wait(0.35)
    energy.close()
    assert len(energy._samples) >= 3
    assert energy.usage.busy is None


def test_without_a_counter_energy_is_summed_up_from_power_where_that_is_known():
    samples = [DeviceSample(0.0, None, 100.0), DeviceSample(2.0, 0.25, 300.0), DeviceSample(3.0, 0.75, 100.0)]
    usage = summarize(samples, None, 0)
    assert (usage.joules, usage.source, usage.joules_per_unit) == (600.0, "power", None)
    assert usage.busy == 0.5
    assert summarize(samples[:1], None, 0).joules is None
    usage = summarize([DeviceSample(0.0, None, None), DeviceSample(1.0, None, None)], None, 7)
    assert (usage.busy, usage.joules, usage.source) == (None,) * 3


def test_on_a_cpu_or_without_its_package_there_is_no_energy_and_a_reason(monkeypatch, tmp_path, meter):
    energy = Energy.of(CPU)
    energy.step(report(1))
    energy.close()
    assert energy.usage is None
    assert "NVIDIA" in energy.reason
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingPackage, match="pynvml"):
        Energy.of(torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingPackage, match="tensorboard"):
        TensorBoard(tmp_path, meter)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without NVML")
def test_without_nvml_there_is_a_reason():
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    energy = Energy.of(torch.device("cuda"))
    energy.close()
    assert energy.usage is None
    assert "NVML" in energy.reason


@pytest.mark.gpu
def test_a_cuda_device_tells_its_energy():
    device = torch.device("cuda")
    energy = Energy.of(device)
    a = torch.randn(4096, 4096, device=device)
    for _ in range(200):
        a = (a @ a).tanh()
    torch.cuda.synchronize()
    energy.close()
    assert energy.usage is not None, energy.reason
    assert energy.usage.joules > 0


# TensorBoard


def scalars(folder):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_every_figure_and_a_resumed_run_hides_what_was_lost(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it phones home"))
    first = TensorBoard(tmp_path, StepMeter(CPU, Fixed()))
    for step in (1, 2, 3):
        first.step(report(step, norm=1.5))
    first.close()
    second = TensorBoard(tmp_path, StepMeter(CPU, Fixed()), start=1)
    second.step(report(2, loss=9.0, norm=1.5))
    second.close()
    found = scalars(tmp_path)
    assert found["train/loss"] == [(1, 2.0), (2, 9.0)]
    assert set(found) == {
        f"train/{name}"
        for name in ("loss", "lr", "gradient_norm", "tokens_per_second", "mfu", "peak_memory_gib", "waited")
    }


# How long the run will take


def pace(seconds, total=100, start=0):
    """What is told when steps take so many seconds."""
    told = []
    estimate = RunEstimate(total, lambda each, left: told.append((each, left)), start=start)
    for step, each in enumerate(seconds, start + 1):
        estimate.step(report(step, seconds=each))
    estimate.close()
    return told


def test_the_pace_is_told_once_without_the_step_that_warms_up_unless_the_run_is_over_soon():
    assert pace([30.0, *[0.5] * 9]) == [(0.5, 96)]
    assert pace([30.0, *[0.5] * 9], start=40) == [(0.5, 56)], "a resumed run warms up again"
    assert pace([30.0, 8.0, 8.0]) == [(8.0, 98)], "steps that take long are timed once"
    assert not pace([0.1] * 8)
    assert not pace([0.5] * 4, total=4)


@pytest.mark.parametrize(
    ("seconds", "left", "evaluating", "text"),
    [
        (0.5, 60, 0.0, "about 30 s: 60 steps of 0.50 s"),
        (1.0, 690, 30.0, "about 12 min: 690 steps of 1.00 s, and 30 s of evaluations"),
        (36.0, 1000, 0.2, "about 10.0 h: 1000 steps of 36.00 s"),
    ],
)
def test_an_estimate_is_a_duration_and_what_it_is_made_of(seconds, left, evaluating, text):
    assert format_estimate(seconds, left, evaluating) == text
