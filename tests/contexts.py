"""What a stage is given when it is tried without a pipeline."""

from pathlib import Path

import numpy as np

from laconic.arrays import Array
from laconic.cache import Cache
from laconic.data.dataset import Dataset
from laconic.data.reader import make_dataset
from laconic.models.checkpoint import Checkpoint
from laconic.models.torch_session import TorchSession
from laconic.progress import Steps
from laconic.recipes.stage import TorchContext
from laconic.runtimes.predict import predict


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
