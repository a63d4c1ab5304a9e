"""What ranks measure of themselves: their time, their pipeline, what they send; and the phases that profilers show."""

import json

import pytest
import torch
from rank_processes import by_two_ranks
from test_monitor import report, scalars
from test_tensor_parallel import begin, llama, make_rows
from torch.profiler import ProfilerActivity, profile

from train.callbacks.energy import Energy
from train.callbacks.monitor import Progress, StepMeter
from train.callbacks.rank_figures import RankFigures
from train.callbacks.tensorboard import TensorBoard
from train.callbacks.trace import chain_phases, nvtx_phase
from train.loop import LoopSettings, run_steps
from train.parallel.mesh import Mesh
from train.parallel.rank_meter import RankMeter, StepTimes
from train.parallel.ranks import Ranks, open_ranks

CPU = torch.device("cpu")
MESHES = {
    "replicas": {},
    "shards": {"shard": 2},
    "heads": {"tensor": 2},
    "stages": {"pipeline": 2, "schedule": "zbv"},
}
WEIGHTS = 4 * sum(parameter.numel() for parameter in llama(num_hidden_layers=4).parameters())
SMALL = 1000
"""Bytes that the losses, norms and counts of a step are less than."""
PHASES = {"data", "step", "forward", "backward", "optimizer", "evaluation", "snapshot"}
FIGURES = (RankFigures(0.25, 0.5, None, 2000), RankFigures(0.75, 0.125, 0.2, 3_000_000))


class Batches(list):
    """A loader that waits for nothing."""

    waited = 0.0


def run_meshes(rank, folder):
    """Two steps of the loop on each mesh, and the names that torch's profiler shows of them."""
    found = {}
    with open_ranks(CPU, Mesh()):
        for name, mesh in MESHES.items():
            ranks = Ranks.of(rank, 2, CPU, Mesh(**mesh))
            meter, state = RankMeter(ranks, Energy.of(CPU)), begin("llama", mesh, (), ranks, llama(num_hidden_layers=4))
            loader = Batches(enumerate(make_rows(step, ranks.data_rank, ranks.data_world) for step in range(2)))
            settings = LoopSettings(2, 0, 0.5, eval_every=1)
            with (
                state.observe_phases(chain_phases(meter.phase, nvtx_phase(CPU))),
                profile(activities=[ProfilerActivity.CPU]) as seen,
            ):
                run_steps(state, loader, settings, [], [meter])
            names = {event.key for event in seen.key_averages()}
            found[name] = {"ranks": [vars(figures) for figures in meter.figures], "names": sorted(names)}
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What both ranks have seen, mesh by mesh."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        assert by_two_ranks(run_meshes, folder, patch) == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", MESHES)
def test_each_rank_has_the_figures_of_all_and_a_profiler_the_phases(name, together):
    first, second = (found[name] for found in together)
    assert first["ranks"] == second["ranks"]
    for rank in first["ranks"]:
        assert 0 < rank["busy"] <= 1
        assert rank["waited"] == 0
        assert (rank["bubble"] is not None) == (name == "stages")
    for found in (first, second):
        assert PHASES - {"snapshot"} <= set(found["names"])
    if name == "stages":
        assert all(0 < rank["bubble"] < 1 for rank in first["ranks"])
        assert {"pipeline", "stage 0", "stage 3"} <= set(first["names"])
        assert {"pipeline", "stage 1", "stage 2"} <= set(second["names"])


def test_what_is_sent_is_what_the_axes_of_a_mesh_exchange(together):
    sent = {name: [rank["sent"] for rank in figures["ranks"]] for name, figures in together[0].items()}
    # Of two ranks in a ring, each sends half of what is summed, twice; and half of what is gathered or scattered.
    assert sent["replicas"] == pytest.approx([WEIGHTS, WEIGHTS], abs=SMALL)
    assert all(WEIGHTS < amount <= 1.5 * WEIGHTS + SMALL for amount in sent["shards"])
    # 6 micro-batches of a row of 8 tokens of 16 features: forward to the other rank, and a gradient back to it.
    assert sent["stages"] == pytest.approx([2 * 6 * 8 * 16 * 4] * 2, abs=SMALL)


def test_the_bubble_is_the_time_of_a_schedule_without_a_stage():
    times = StepTimes(CPU)
    assert times.bubble is None
    times.schedule._spans, times.stages._spans = [(0.0, 4.0)], [(1.0, 2.0), (2.5, 4.0)]
    assert times.bubble == pytest.approx(1 - 2.5 / 4)


def test_progress_and_tensorboard_show_the_ranks(tmp_path, capsys):
    meter = StepMeter(CPU, read_ranks=lambda: FIGURES)
    progress = Progress(1, meter)
    progress.step(report(1))
    progress.close()
    assert "waited 10 %  busy 25 % to 75 %  bubble 20 %  sends 3.0 MB" in capsys.readouterr().err
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    board = TensorBoard(tmp_path, meter)
    board.step(report(1))
    board.close()
    shown = scalars(tmp_path)
    assert shown["busy/rank_0"] == [(1, 0.25)]
    assert shown["sent/rank_1"] == [(1, 3_000_000)]
    assert {name for name in shown if name.startswith("bubble")} == {"bubble/rank_1"}
