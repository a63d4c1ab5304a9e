"""A stage that changes weights at random, and runs that die on the way: one process that forks, so that torch is loaded
once.

Run as a program: FOLDER MOMENT...: a run that kills itself at each of the moments in turn, over one cache."""

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from models import Perceptron, randomize
from safetensors.torch import save_file

from compress.pipeline import compress_checkpoint
from laconic.artifacts.record import Record
from laconic.cache import Cache
from laconic.hashing import hash_of
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.recipes.stage import TorchStage

LOG = "NUDGES"
"""The variable that names the file where each run of a stage leaves a line."""


class Perturb(TorchStage):
    """Add noise to all weights."""

    size: float = 0.01

    def apply(self, checkpoint, context):
        note(f"begin {self.size}")
        die_at(f"perturb {self.size}")
        state = {
            name: value + self.size * torch.randn_like(value) for name, value in checkpoint.module.state_dict().items()
        }
        module = Perceptron([6, 8, 3])
        module.load_state_dict(state)
        note(f"end {self.size}")
        key = hash_of(context.key, checkpoint.key)
        return checkpoint.after(Record(stage="killed_runs:Perturb", config=self.model_dump(), key=key), module)

    @staticmethod
    def rebuild(module, record):
        """Nothing: no shape changes."""


class Dying(Steps):
    """Shows nothing, and dies where it is told to."""

    def __init__(self):
        super().__init__(quiet=True)

    def report(self, title, note):
        die_at(f"after {title}")

    @contextmanager
    def step(self, title, total=None):
        die_at(title)
        with super().step(title, total) as step:
            yield step


def die_at(moment):
    if os.environ.get("DIE") == moment:
        os.kill(os.getpid(), signal.SIGKILL)


def note(line):
    with Path(os.environ[LOG]).open("a") as file:
        file.write(line + "\n")


def prepare(folder):
    """A source, its samples, and the recipe."""
    module = randomize(Perceptron([6, 8, 3]))
    save_file(module.state_dict(), folder / "net.safetensors")
    np.savez(folder / "data.npz", x=np.random.default_rng(0).normal(size=(80, 6)).astype(np.float32))
    return recipe(folder)


def recipe(folder, **changes):
    heal = {"distill.heal": {"steps": 12, "batch_size": 8, "snapshot_every": 2, "eval_every": 4, "patience": 9}}
    stages = [{"killed_runs:Perturb": {"size": 0.05}}, heal, {"killed_runs:Perturb": {"size": 0.02}}]
    return Recipe.parse(
        {
            "source": str(folder / "net.safetensors"),
            "builder": "models:Perceptron",
            "arguments": {"widths": [6, 8, 3]},
            "data": str(folder / "data.npz"),
            "to": "checkpoint",
            "stages": stages,
            **changes,
        },
        trust=True,
    )


def run(folder, name="out"):
    return compress_checkpoint(
        recipe(folder), folder / name, trust=True, steps=Dying(), cache=Cache(folder / f"{name}-cache")
    )


def watch(cache):
    """Die as soon as training has left a snapshot."""
    while not list(cache.glob("work-*/snapshots/step-*.json")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    folder = Path(sys.argv[1])
    for moment in sys.argv[2:]:
        child = os.fork()
        if not child:
            os.environ["DIE"] = moment
            if moment == "snapshot":
                threading.Thread(target=watch, args=(folder / "out-cache",), daemon=True).start()
            run(folder)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(moment, os.WTERMSIG(status) if os.WIFSIGNALED(status) else "lived", flush=True)


if __name__ == "__main__":
    sys.modules["killed_runs"] = sys.modules["__main__"]  # the recipe names it so
    main()
