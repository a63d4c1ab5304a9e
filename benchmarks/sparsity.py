"""What half of the weights are worth: a small language model without them, by what chose them.

    python benchmarks/sparsity.py [--seeds 3] [--steps 1000] [--cache .cache/bench]

A GPT-2 of three layers learns the docstrings of the standard library. Then half of the weights of its blocks are taken
at once, and nothing is trained again: in each layer as many, anywhere or two of every four. Calibrated on texts that it
has learned from, with several draws of them; perplexity on texts that it has not. The trained model is kept in the
cache.
"""

import copy
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from inputs import texts
from results import Results, make_parser
from studies import make_gpt2, make_task
from torch import nn

from laconic.cache import Cache
from laconic.config import NamedSettings
from laconic.data.dataset import Dataset, split
from laconic.data.reader import make_dataset
from laconic.hashing import hash_of
from laconic.models.checkpoint import Checkpoint, prepare
from laconic.models.weights import fill, read_safetensors, write_weights
from laconic.progress import Steps
from laconic.recipes.recipe import NamedStage
from laconic.recipes.stage import TorchContext, TorchStage
from laconic.tasks.text_generation import TextGeneration
from train.data.loader_settings import LoaderSettings
from train.finetune.evaluate import evaluate
from train.objectives.next_token import NextToken
from train.observers import ObserverSettings
from train.parallel.ranks import Ranks
from train.settings import Training
from train.trainer import train

LAYERS, LENGTH = 3, 48
HELD = 0.1
CPU = torch.device("cpu")
CRITERIA = ("magnitude", "wanda", "sparsegpt")
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "50 %": ("prune.unstructured", {"sparsity": 0.5}),
    "2:4": ("prune.two-four", {}),
}


def corpus(folder: Path) -> tuple[TextGeneration, Dataset, Dataset]:
    """The task, the texts to learn from, and those held back."""
    given, _ = texts(folder)
    lines = [str(json.loads(line)["text"]) for line in given.read_text(encoding="utf-8").splitlines()]
    task = make_task(lines, LENGTH)
    long = [line for line in lines if len(task.tokenizer.encode(line).ids) > 1]
    parts = split(make_dataset(long, task, name="docstrings"), {"learn": 1 - HELD, "held": HELD})
    return task, parts["learn"], parts["held"]


def trained(task: TextGeneration, learn: Dataset, steps: int, folder: Path) -> Checkpoint:
    """The model, from the cache where it is there."""
    torch.manual_seed(0)
    module: nn.Module = make_gpt2(LAYERS, LENGTH)
    start = Checkpoint.of(module, task, outputs=(), source={"kind": "benchmark"}, size=0)
    training = Training(
        steps=steps,
        batch_size=16,
        optimizer=NamedSettings(name="adamw", config={"lr": 3e-3, "weight_decay": 0.01}),
        schedule=NamedSettings(name="cosine"),
        loader=LoaderSettings(workers=0),
        snapshot_every=10**6,
    )
    kept = folder / f"sparsity-{hash_of(start.key, learn.fingerprint, training.model_dump(mode='json'))}.safetensors"
    if not kept.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            taught = train(start, learn, training, Path(scratch), ranks=Ranks(), observers=ObserverSettings(quiet=True))
        module = prepare(taught.module)
        write_weights(module, kept)
    module = prepare(module)
    fill(module, read_safetensors(kept), kept)
    return Checkpoint.of(module, task, outputs=(), source={"kind": "benchmark"}, size=0)


def perplexity(checkpoint: Checkpoint, task: TextGeneration, held: Dataset) -> float:
    """On texts that nothing has learned from."""
    return evaluate(checkpoint.module, NextToken(task), held, CPU)["perplexity"]


def pruned(checkpoint: Checkpoint, learn: Dataset, name: str, config: dict[str, Any], seed: int) -> Checkpoint:
    """The model after one stage."""
    stage: TorchStage = NamedStage(name=name, config=config).make_stage()  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        context = TorchContext(
            task=checkpoint.task, key="benchmark", seed=seed, folder=folder, cache=Cache(folder),
            steps=Steps(quiet=True), train=learn, calibrate=learn, choose=learn, original=checkpoint,
            fidelity=lambda one: np.ones(1), work=folder,
        )  # fmt: skip
        return stage.apply(replace(checkpoint, module=copy.deepcopy(checkpoint.module)), context)


def main() -> None:
    """Train, prune and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="draws of the calibration samples")
    parser.add_argument("--samples", type=int, default=128, help="texts to calibrate with")
    parser.add_argument("--steps", type=int, default=1000, help="of the training")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where inputs and results go")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    arguments.cache.mkdir(parents=True, exist_ok=True)
    task, learn, held = corpus(arguments.cache)
    checkpoint = trained(task, learn, arguments.steps, arguments.cache)
    tokens = sum(learn.take(arguments.samples).lengths)
    print(
        f"{len(learn)} texts to learn from, {len(held)} held back; calibrated with {arguments.samples} texts, about "
        f"{tokens} tokens\nperplexity as it was: {perplexity(checkpoint, task, held):.2f}\n"
    )
    results.begin("perplexity", ["perplexity", *SHAPES])
    for criterion in CRITERIA:
        cells = []
        for name, config in SHAPES.values():
            settings = config | {"criterion": criterion, "samples": arguments.samples}
            found = [
                perplexity(pruned(checkpoint, learn, name, settings, seed), task, held)
                for seed in range(arguments.seeds if criterion != "magnitude" else 1)
            ]
            spread = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
            cells.append(f"{mean(found):.2f}{spread}")
        results.add("perplexity", [criterion, *cells])


if __name__ == "__main__":
    main()
