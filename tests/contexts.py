"""What a stage is given when it is tried without a pipeline."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import numpy as np
from safetensors.torch import save_file
from torch import nn

from laconic.arrays import Array
from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.data.reader import make_dataset
from laconic.models.checkpoint import Checkpoint
from laconic.models.signature import probe_module
from laconic.models.source_loading import load_source
from laconic.models.torch_session import TorchSession
from laconic.progress import Step, Steps
from laconic.recipes.stage import TorchContext
from laconic.runtimes.predict import predict
from laconic.tasks.tensors import Tensors
from train.finetune.finetune import FinetuneResult, finetune
from train.observers import ObserverSettings
from train.settings import TrainingRecipe


def dataset_for(checkpoint: Checkpoint, count: int = 48, seed: int = 0) -> Dataset:
    """Samples that the checkpoint's task makes up."""
    return make_dataset(checkpoint.task.examples(count, seed), checkpoint.task, name="made-up samples")


def torch_context(
    checkpoint: Checkpoint, folder: Path, *, dataset: Dataset | None = None, key: str = "key", seed: int = 0
) -> TorchContext:
    """A context for a torch stage on this checkpoint, which is the original too.

    folder: for scratch, cache and work. dataset: what to learn from, to look at and to choose by; made up where it is
    not given.
    """
    data = dataset or dataset_for(checkpoint)
    choose = data.take(16, seed)

    def ask(one: Checkpoint) -> dict[str, Array]:
        with TorchSession(one.module, one.inputs, one.outputs) as session:
            return predict(session, one.task, choose)

    reference = ask(checkpoint)
    for name in ("scratch", "work"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return TorchContext(
        task=checkpoint.task,
        key=key,
        seed=seed,
        folder=folder / "scratch",
        cache=Cache(folder / "cache"),
        steps=Steps(quiet=True),
        train=data,
        calibrate=data,
        choose=choose,
        original=checkpoint,
        fidelity=lambda one: np.asarray(checkpoint.task.fidelity(reference, ask(one))),
        work=folder / "work" / key,
    )


def checkpoint_of(module: nn.Module) -> Checkpoint:
    """A checkpoint of a module that is here already."""
    return Checkpoint.of(
        module.eval(),
        Tensors(module.inputs),
        outputs=probe_module(module, module.inputs),
        source={"kind": "builder", "builder": "nobody:knows", "arguments": {}},
        size=0,
    )


def opened(folder: Path, builder: str = "ResidualNet", **arguments: Any) -> Checkpoint:
    """A checkpoint that can be saved: random weights in a file, and what builds the module."""
    path = folder / "model.safetensors"
    save_file(models.randomize(getattr(models, builder)(**arguments)).state_dict(), path)
    return load_source(path, builder=f"models:{builder}", arguments=arguments, trust=True)


def tune(source: Path, rows: Path, folder: Path, cache: Cache, *, lr: float = 0.003, **settings: Any) -> FinetuneResult:
    """Fine-tune a model of a folder with AdamW, in this process, quietly."""
    optimizer = {"name": "adamw", "config": {"lr": lr}}
    given = {"data": {"train": str(rows)}, "loader": {"workers": 0}, "optimizer": optimizer, **settings}
    recipe = TrainingRecipe.load(None, source=str(source), **given)
    return finetune(recipe, folder, observers=ObserverSettings(quiet=True), steps=Steps(quiet=True), cache=cache)


class Interrupted(Steps):
    """Ctrl-C while a step is under way."""

    def __init__(self, title: str) -> None:
        super().__init__(quiet=True)
        self.title = title

    @contextmanager
    def step(self, title: str, total: int | None = None) -> Iterator[Step]:
        with super().step(title, total) as step:
            if title.startswith(self.title):
                signal.raise_signal(signal.SIGINT)
            yield step


class Messages(Steps):
    """What is said to the user."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.warnings: list[str] = []
        self.reports: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def report(self, title: str, note: str) -> None:
        self.reports.append(f"{title}: {note}")
