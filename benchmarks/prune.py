"""Transformers cut without any training: how alike the answers stay, by what is cut and how it is decided.

    python benchmarks/prune.py MODEL TEXTS [--samples 1024] [--only WORD]

Each row is a model of its own, cut from the original; texts that it is judged by are not those that it is cut on.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from results import Results, make_parser

from compress.prune.layers import Layers
from compress.prune.unit_pruning import Ffn, Heads
from laconic.arrays import Array
from laconic.cache import Cache
from laconic.data.dataset import Dataset, split
from laconic.data.reader import read
from laconic.metrics import cosine, cosine_matrix, spearman
from laconic.models.anatomy import anatomy
from laconic.models.checkpoint import Checkpoint
from laconic.models.source_loading import load_source
from laconic.models.torch_session import TorchSession
from laconic.progress import Steps
from laconic.recipes.stage import TorchContext, TorchStage
from laconic.runtimes.predict import predict

PLAIN: dict[str, Any] = {"compensate": False}
BY: dict[str, dict[str, Any]] = {name: {"criterion": name} for name in ("magnitude", "activation")}
APART: dict[str, Any] = {"allocate": "sensitivity"}

ROWS: dict[str, Sequence[TorchStage]] = {
    "FFN 0.5, sensitivity": [Ffn(keep=0.5, **APART)],
    "FFN 0.5": [Ffn(keep=0.5)],
    "FFN 0.5, magnitude, plain": [Ffn(keep=0.5, **BY["magnitude"], **PLAIN)],
    "FFN 0.5, activation, plain": [Ffn(keep=0.5, **BY["activation"], **PLAIN)],
    "FFN 0.5, activation": [Ffn(keep=0.5, **BY["activation"])],
    "heads 0.75, activation, plain": [Heads(keep=0.75, **BY["activation"], **PLAIN)],
    "heads 0.75, sensitivity": [Heads(keep=0.75, **APART)],
    "heads 0.75": [Heads(keep=0.75)],
    "heads 0.75 and FFN 0.5, sensitivity": [Heads(keep=0.75, **APART), Ffn(keep=0.5, **APART)],
    "FFN 0.75, sensitivity": [Ffn(keep=0.75, **APART)],
    "FFN 0.35, sensitivity": [Ffn(keep=0.35, **APART)],
    "heads 0.5, sensitivity": [Heads(keep=0.5, **APART)],
    "layers 5 of 6": [Layers(keep=0.84)],
    "layers 5 of 6, plain": [Layers(keep=0.84, **PLAIN)],
    "FFN 0.5, sensitivity, 3 steps": [Ffn(keep=0.5, steps=3, **APART)],
    "heads 0.5 and FFN 0.5, sensitivity": [Heads(keep=0.5, **APART), Ffn(keep=0.5, **APART)],
    "heads 0.75, FFN 0.5, layers 5 of 6": [Layers(keep=0.84), Heads(keep=0.75, **APART), Ffn(keep=0.5, **APART)],
}


def ask(checkpoint: Checkpoint, dataset: Dataset) -> Array:
    """The embeddings."""
    with TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs) as session:
        return next(iter(predict(session, checkpoint.task, dataset).values()))


def context_of(checkpoint: Checkpoint, calibrate: Dataset, choose: Dataset, folder: Path) -> TorchContext:
    """What the stages are given."""
    reference = ask(checkpoint, choose)
    return TorchContext(
        task=checkpoint.task,
        key="benchmark",
        seed=0,
        folder=folder,
        cache=Cache(folder / "cache"),
        steps=Steps(quiet=True),
        train=calibrate,
        calibrate=calibrate,
        choose=choose,
        original=checkpoint,
        fidelity=lambda one: cosine(reference, ask(one, choose)),
        work=folder / "work",
    )


def main() -> None:
    """Print the table, a row as soon as it is there."""
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    results = Results(publish=given.publish)
    original = load_source(given.model)
    parts = split(read(given.texts, original.task), {"calibrate": 0.8, "choose": 0.1, "evaluate": 0.1})
    unseen = parts["evaluate"].take(300)
    reference = ask(original, unseen)
    pairs = np.triu_indices(len(reference), 1)
    results.begin("cuts", ["cut", "cosine", "Spearman", "units left, by block", "seconds"])
    with tempfile.TemporaryDirectory() as folder:
        context = context_of(original, parts["calibrate"], parts["choose"].take(64), Path(folder))
        for name, stages in ROWS.items():
            if given.only not in name:
                continue
            start, one = time.perf_counter(), original
            for stage in stages:
                one = stage.model_copy(update={"samples": given.samples}).apply(one, replace(context, key=name))
            seconds = time.perf_counter() - start
            found = ask(one, unseen)
            alike = spearman(cosine_matrix(reference)[pairs], cosine_matrix(found)[pairs])
            left = ", ".join(
                " ".join(str(site.units) for site in anatomy(one.module).of(kind)) for kind in ("heads", "ffn")
            )
            mean = float(cosine(reference, found).mean())
            results.add("cuts", [name, f"{mean:.4f}", f"{alike:.4f}", left, f"{seconds:.0f}"])


if __name__ == "__main__":
    main()
