"""A rank that runs and no longer answers, as one that is stopped: the others end with a sentence, and go on later."""

import json
import os
import signal
import socket
import subprocess
import sys

import rank_processes
from rank_processes import by_two_ranks
from test_launchers import HERE, SCRIPT, check_losses, folder
from test_tensor_parallel import CPU, begin, learn, llama

from laconic.errors import TrainingFailure
from laconic.models.repeated_layers import find_layers
from train.callbacks.journal import read_lines
from train.parallel.mesh import Mesh
from train.parallel.ranks import open_ranks

__all__ = ["folder"]
SECONDS = 8
SENTENCE = f"has waited {SECONDS} s (mesh.timeout) for another rank, which does not answer"
STAGES = {"pipeline": 2, "schedule": "zbv", "timeout": SECONDS}


def stop_between_stages(rank, folder):
    """The second rank is stopped in a layer, for which the first waits to send and receive, not for all ranks."""
    try:
        with open_ranks(CPU, Mesh(**STAGES)) as ranks:
            state, losses, norms = begin("llama", STAGES, (), ranks, llama(num_hidden_layers=4)), [], []
            learn(state, ranks, losses, norms, 1)
            for layer in find_layers(state.module) if rank else ():
                layer.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
            learn(state, ranks, losses, norms, 2)
    except TrainingFailure as error:
        (folder / f"{rank}.txt").write_text(str(error))
        sys.exit(error.exit_code)


def test_a_rank_does_not_wait_for_a_stage_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_processes, "SECONDS", 60)
    monkeypatch.setattr(rank_processes, "GRACE", 1)
    assert by_two_ranks(stop_between_stages, tmp_path, monkeypatch) == [TrainingFailure.exit_code, -signal.SIGKILL]
    assert f"rank 0 {SENTENCE}" in (tmp_path / "0.txt").read_text()


def test_a_run_with_a_rank_that_is_stopped_ends_in_a_sentence_and_goes_on(folder):
    with (folder / "recipe.yaml").open("a") as recipe:
        recipe.write(f"mesh: {{timeout: {SECONDS}}}\n")
    (folder / "script.json").write_text(json.dumps([{"step": 4, "rank": 1, "signal": "SIGSTOP", "to": "rank"}]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    place |= {SCRIPT: f"{folder}/script.json", "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    options = ("--trust", "--recipe", folder / "recipe.yaml", "-o", folder / "tuned")
    ranks = [
        subprocess.Popen(
            (sys.executable, "-m", "laconic", "finetune", *options),
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, printed = ranks[0].communicate(timeout=200)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == TrainingFailure.exit_code, printed
    assert printed.count(f"rank 0 {SENTENCE}") == 1
    assert "Traceback" not in printed
    check_losses(folder)
    lines = read_lines(folder / "tuned" / "training" / "train.jsonl")
    assert [len(line["ranks"]) for line in lines] == [2] * 2 + [0] * 6
