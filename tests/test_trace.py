import gzip
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from laconic.errors import UsageError
from train.callbacks.callback import StepReport
from train.callbacks.flops import Flops, Peak
from train.callbacks.trace import SNAPSHOT, TABLE, TRACE, MemorySnapshot, Profile, chain_phases, nvtx_phase

CPU = torch.device("cpu")


def train(steps, span, observer, device=CPU):
    module = nn.Linear(16, 4).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        with span("forward"):
            loss = module(torch.ones(8, 16, device=device)).square().mean()
        with span("backward"):
            loss.backward()
        with span("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        observer.step(StepReport(step=step, loss=0.0, lr=0.1, tokens=0, rows=8, seconds=1.0, waited=0.0))
    observer.close()


def events(folder):
    trace = json.loads(gzip.decompress((folder / TRACE).read_bytes()))
    return [event.get("name") for event in trace["traceEvents"]]


def test_a_profile_is_a_trace_of_a_few_steps_with_their_phases_and_a_table(tmp_path):
    profile = Profile(tmp_path / "profile", CPU)
    train(6, profile.phase, profile)
    assert profile.files == [tmp_path / "profile" / TRACE, tmp_path / "profile" / TABLE]
    names = events(tmp_path / "profile")
    assert [names.count(phase) for phase in ("forward", "backward", "optimizer")] == [3, 3, 3]
    assert names.count("aten::addmm") == 3
    table = (tmp_path / "profile" / TABLE).read_text()
    assert "aten::addmm" in table
    assert "Self CPU time total" in table


def test_the_profiler_does_not_talk(tmp_path):
    """In a process of its own: the profiler's library reads its log level once, when it is first used."""
    code = (
        "import sys, torch; from pathlib import Path; from test_trace import train; "
        "from train.callbacks.trace import Profile; "
        "profile = Profile(Path(sys.argv[1]), torch.device('cpu')); train(4, profile.phase, profile)"
    )
    path = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"} | {
        "PYTHONPATH": path
    }
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment, check=True
    )
    assert (tmp_path / TRACE).exists()
    assert "USDT" not in told.stdout + told.stderr


def test_a_run_that_ends_early_is_recorded_as_far_as_it_came_or_leaves_nothing(tmp_path):
    profile = Profile(tmp_path, CPU)
    train(4, profile.phase, profile)
    assert events(tmp_path).count("forward") == 2
    profile = Profile(tmp_path / "none", CPU)
    train(1, profile.phase, profile)
    assert profile.files == []
    assert not (tmp_path / "none").exists() or not list((tmp_path / "none").iterdir())


def test_several_spans_are_left_in_the_reverse_order_and_let_an_error_through():
    seen = []

    def named(who):
        @contextmanager
        def span(name):
            seen.append(f"{who} {name}")
            yield
            seen.append(f"{who} done")

        return span

    with chain_phases(named("a"), named("b"))("forward"):
        seen.append("body")
    assert seen == ["a forward", "b forward", "body", "b done", "a done"]
    with chain_phases()("data"):
        pass
    flops = Flops(Peak(1.0, "FP32", "made up"))
    with pytest.raises(ValueError, match="no such luck"), chain_phases(nvtx_phase(CPU), flops.phase)("forward"):
        raise ValueError("no such luck")


def test_profile_and_flop_count_go_together(tmp_path):
    profile, flops = Profile(tmp_path, CPU), Flops(Peak(1e9, "FP32", "made up"))
    train(4, chain_phases(nvtx_phase(CPU), flops.phase), profile)
    assert flops.utilization(8, 1.0) == pytest.approx(3 * 2 * 8 * 16 * 4 / 1e9)
    assert events(tmp_path).count("backward") == 2


def test_a_memory_snapshot_of_a_cpu_is_refused_with_what_to_use_instead(tmp_path):
    with pytest.raises(UsageError, match=r"needs a CUDA device.*Use the memory time-line instead"):
        MemorySnapshot(tmp_path, CPU)


@pytest.mark.gpu
def test_a_memory_snapshot_is_written_when_the_run_ends(tmp_path):
    device = torch.device("cuda")
    snapshot = MemorySnapshot(tmp_path, device)
    train(2, nvtx_phase(device), snapshot, device)
    assert (tmp_path / SNAPSHOT).stat().st_size > 1000


@pytest.mark.gpu
def test_a_profile_of_a_cuda_run_has_its_kernels(tmp_path):
    device = torch.device("cuda")
    profile = Profile(tmp_path, device)
    train(4, chain_phases(nvtx_phase(device), profile.phase), profile, device)
    assert "gemm" in " ".join(str(name) for name in events(tmp_path)).lower()
