"""Ranks that a launcher starts: those that are killed or told to stop cost the steps since the last snapshot."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from slurm_cluster import ask, missing_programs, run_cluster, wait_until
from torch import Tensor, nn

from laconic.cli import INTERRUPTED
from laconic.errors import UsageError
from laconic.progress import Steps
from laconic.tensor import TensorSpec
from train.callbacks.journal import read_lines
from train.finetune.finetune import finetune
from train.launchers.ray_agents import launch_on_ray
from train.launchers.torchrun import LaunchSettings, launch_ranks
from train.settings import TrainingRecipe

HERE = Path(__file__).parent
SCRIPT = "SCRIPT"
"""The variable that names the file with what happens to ranks: by step, the rank and the signal."""
STEPS = 8


class Struck(nn.Module):
    """[batch, 8] to [batch, 3]; at some steps a signal arrives, once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = (TensorSpec(name="x", dtype="float32", shape=("batch", 8)),)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and SCRIPT in os.environ:
            self.passes += 1
            strike(Path(os.environ[SCRIPT]), int(self.passes))
        return self.layers(x)


def strike(script: Path, step: int) -> None:
    """Send the signal of a step to this rank, or to what has started it, unless it was sent before."""
    for line in json.loads(script.read_text()):
        done = script.with_suffix(f".{line['step']}")
        if line["step"] == step and str(line["rank"]) == os.environ["RANK"] and not done.exists():
            done.touch()
            while not list(script.parent.glob(f"*/snapshots/step-*{(step - 1) // 2 * 2}.json")):  # written meanwhile
                time.sleep(0.01)
            if line["to"] == "preempted":  # the step goes on until the run is told to stop
                while not signal.getsignal(signal.SIGTERM).__self__.is_set():
                    time.sleep(0.1)
                return
            agent = psutil.Process().parent()
            receivers = {"rank": os.getpid(), "launcher": agent.pid, "actor": agent.ppid()}
            os.kill(receivers[line["to"]], signal.Signals[line["signal"]])
            if line["to"] == "actor":
                time.sleep(60)  # this rank ends with it


@pytest.fixture
def folder(tmp_path):
    """A recipe with its source and its data."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=values, label=values[:, :3].argmax(axis=1))
    torch.save(Struck().state_dict(), tmp_path / "weights.pt")
    (tmp_path / "recipe.yaml").write_text(
        f"source: {tmp_path}/weights.pt\nbuilder: test_launchers:Struck\ndata: {tmp_path}/data.npz\nbatch_size: 8\n"
        f"steps: {STEPS}\nsnapshot_every: 2\neval_every: 100\noptimizer: {{adamw: {{lr: 0.02}}}}\n"
        "loader: {workers: 0}\n"
    )
    return tmp_path


def check_losses(folder):
    """Go on with the run of a folder alone, and compare its losses with those of a run that was never interrupted."""
    recipe = TrainingRecipe.load(folder / "recipe.yaml", trust=True)
    resumed = [finetune(recipe, folder / name, trust=True, steps=Steps(quiet=True)) for name in ("tuned", "alone")]
    losses = [result.training.losses for result in resumed]
    assert len(read_lines(folder / "tuned" / "training" / "train.jsonl")) == len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_rank_that_is_killed_and_a_run_that_is_told_to_stop_go_on_from_their_snapshots(folder):
    events = [
        {"step": 4, "rank": 1, "signal": "SIGKILL", "to": "rank"},
        {"step": 6, "rank": 0, "signal": "SIGTERM", "to": "launcher"},
    ]
    (folder / "script.json").write_text(json.dumps(events))
    environment = os.environ | {SCRIPT: f"{folder}/script.json", "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    options = ("--trust", "--recipe", folder / "recipe.yaml", "-o", folder / "tuned")
    command = (sys.executable, "-m", "laconic", "finetune", *options, "--on", "torchrun", "--nproc-per-node", "2")
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == INTERRUPTED, run.stderr
    assert "from the first step, no snapshot" in run.stderr
    assert "rank 1 was killed by SIGKILL: all ranks start again, from the last snapshot" in run.stderr
    assert "from the snapshot after step 2" in run.stderr
    assert "is damaged" not in run.stderr
    assert re.search(r"waited .* busy .* to .* sends \d", run.stderr)
    check_losses(folder)
    lines = read_lines(folder / "tuned" / "training" / "train.jsonl")
    assert [len(line["ranks"]) for line in lines] == [2] * 6 + [0] * 2


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_on_a_ray_cluster_a_lost_machine_costs_a_start_and_the_command_can_be_stopped(folder):
    events = [
        {"step": 4, "rank": 1, "signal": "SIGKILL", "to": "actor"},
        {"step": 6, "rank": 0, "signal": "SIGTERM", "to": "preempted"},
    ]
    (folder / "script.json").write_text(json.dumps(events))
    environment = os.environ | {SCRIPT: f"{folder}/script.json", "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    options = ("--trust", "--recipe", folder / "recipe.yaml", "-o", folder / "tuned")
    command = (sys.executable, "-m", "laconic", "finetune", *options, "--on", "ray", "--nproc-per-node", "2")
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as run:
        wait_until(lambda: (folder / "script.6").exists(), 200)
        run.terminate()
        said = run.stderr.read()
        assert run.wait(100) == INTERRUPTED, said
    assert "a machine of the cluster was lost: all ranks start again, from the last snapshot" in said
    assert "from the snapshot after step 2" in said
    check_losses(folder)


def test_an_error_that_ranks_would_have_again_is_said_once_and_ends_the_run(capfd):
    assert launch_ranks(["finetune"], LaunchSettings(nproc_per_node=2), run="none") == UsageError.exit_code
    said = capfd.readouterr().err
    assert 1 <= said.count("nothing to train") <= 2  # once by each rank
    assert "start again" not in said


def test_a_number_of_machines_is_a_number_or_a_range():
    assert [LaunchSettings(nnodes=nnodes).node_range for nnodes in ("2", "1:4")] == [(2, 2), (1, 4)]
    for nnodes in ("0", "3:2", "a", ""):
        with pytest.raises(UsageError, match="expected a number of machines"):
            _ = LaunchSettings(nnodes=nnodes).node_range
    with pytest.raises(UsageError, match="on a Ray cluster expected a number of machines, as 1"):
        launch_on_ray(["finetune"], LaunchSettings(nnodes="1:4"))


MISSING = missing_programs()


@pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: there is no {', '.join(MISSING)}")
def test_a_job_of_slurm_that_is_preempted_is_queued_again_and_goes_on(folder, tmp_path_factory):
    events = [{"step": 4, "rank": 1, "signal": "SIGTERM", "to": "preempted"}]
    (folder / "script.json").write_text(json.dumps(events))
    environment = {SCRIPT: f"{folder}/script.json", "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    options = ("--trust", "--recipe", folder / "recipe.yaml", "-o", folder / "tuned", "--on", "slurm", "--nnodes", "2")
    with run_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        command = (sys.executable, "-m", "laconic", "finetune", *options)
        run = subprocess.run(command, env=cluster | environment, capture_output=True, text=True, timeout=100)
        assert run.returncode == 0, run.stderr
        wait_until(lambda: (folder / "script.4").exists(), 120)
        ask(cluster, "sbatch", "--partition=high", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=sleep 1")
        wait_until(lambda: ask(cluster, "squeue", "-h", "-o", "%i %r") == "1 BeginTime", 100)
        ask(cluster, "scontrol", "update", "JobId=1", "StartTime=now")  # else in two minutes
        wait_until(lambda: not ask(cluster, "squeue", "-h"), 120)
    said = (folder / "tuned.slurm.log").read_text()
    assert "from the first step, no snapshot" in said
    assert "from the snapshot after step 4" in said
    assert len(read_lines(folder / "tuned" / "training" / "train.jsonl")) == STEPS
