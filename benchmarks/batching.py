"""Shuffled batches against batches of similar length: the held-out loss, and the time of training with each.

    python benchmarks/batching.py [--seeds 7] [--cache .cache/bench]

A BERT of two layers, 64 wide, learns from random weights which of ten packages of Python's standard library a
docstring is from. For each seed both are trained, in turns, from the same weights. Small: 400 rows, which
`group_by_length` leaves shuffled; here they are sorted. Large: 2,000 rows, two and a half windows of 50 batches. Times
are processor time of one thread.
"""

import json
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from inputs import model_folder, texts
from results import Results, make_parser
from scipy import stats

from laconic.progress import Steps
from train import trainer
from train.finetune.finetune import finetune
from train.observers import ObserverSettings
from train.settings import TrainingRecipe

LABELS, HELD = 10, 500
"""Packages, those with the most docstrings; texts that are held out."""
SIZES = {"small": (400, 8), "large": (2000, 5)}
"""Rows to train with, and epochs."""
HEAD = {"loss": "held-out loss", "accuracy": "accuracy", "seconds": "processor s"}
TRAINING: dict[str, Any] = {
    "task": "text-classification",
    "max_length": 48,
    "batch_size": 16,
    "optimizer": {"adamw": {"lr": 2e-3, "weight_decay": 0.01}},
    "precision": "fp32",
    "loader": {"workers": 0},
    "snapshot_every": 10**6,
    "eval_every": 10**6,
}


def write_rows(folder: Path) -> dict[str, Path]:
    """The files of the held-out rows, and of the rows of each size."""
    texts(folder)
    rows = [json.loads(line) for line in (folder / "docstrings.jsonl").read_text(encoding="utf-8").splitlines()]
    largest = {label for label, _ in Counter(row["label"] for row in rows).most_common(LABELS)}
    kept = [row for row in rows if row["label"] in largest]
    order = np.random.default_rng(0).permutation(len(kept))
    parts = {"held": order[:HELD]} | {name: order[HELD : HELD + count] for name, (count, _) in SIZES.items()}
    paths = {}
    for name, chosen in parts.items():
        paths[name] = folder / f"batching-{name}.jsonl"
        paths[name].write_text("".join(f"{json.dumps(kept[index])}\n" for index in chosen), encoding="utf-8")
    return paths


def write_model(folder: Path, seed: int) -> Path:
    """A small BERT with random weights, and the tokenizer of MiniLM."""
    source, path = model_folder(folder), folder / f"batching-bert-{seed}"
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, num_labels=LABELS
    )
    labels = sorted({json.loads(line)["label"] for line in (folder / "batching-held.jsonl").read_text().splitlines()})
    config.id2label, config.label2id = dict(enumerate(labels)), {label: index for index, label in enumerate(labels)}
    transformers.BertForSequenceClassification(config).save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(path)
    return path


def train(source: Path, paths: dict[str, Path], size: str, seed: int, *, grouped: bool) -> dict[str, float]:
    """The figures on the held-out rows after a run, and its processor seconds."""
    _, epochs = SIZES[size]
    data = {"train": str(paths[size]), "evaluate": str(paths["held"])}
    run = {"source": str(source), "data": data, "epochs": epochs, "seed": seed, "group_by_length": grouped}
    with tempfile.TemporaryDirectory() as folder:
        begin, quiet = time.process_time(), ObserverSettings(quiet=True)
        recipe = TrainingRecipe.model_validate(TRAINING | run)
        found = finetune(recipe, Path(folder) / "out", observers=quiet, steps=Steps(quiet=True))
        return {**found.after, "seconds": time.process_time() - begin}


def describe(values: list[float]) -> str:
    """A mean and its 95 % interval, from Student's t."""
    half = float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def compare(found: Mapping[tuple[str, bool], list[dict[str, float]]], names: Sequence[str]) -> list[list[str]]:
    """Return the rows of each size: both kinds of batches, and their difference. names: of figures."""
    rows = []
    for size, (count, _) in SIZES.items():
        shuffled, grouped = found[size, False], found[size, True]
        apart = [{name: b[name] - a[name] for name in names} for a, b in zip(shuffled, grouped, strict=True)]
        kinds = {"shuffled": shuffled, "by length": grouped, "by length minus shuffled, seed by seed": apart}
        for kind, runs in kinds.items():
            rows.append([f"{count:,}", kind, *(describe([run[name] for run in runs]) for name in names)])
    return rows


def main() -> None:
    """Train, and print a row for each size and kind of batches."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where the model and the texts go")
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    torch.set_num_threads(1)
    trainer.LEAST_WINDOWS = 0  # the small set is sorted, too
    arguments.cache.mkdir(parents=True, exist_ok=True)
    paths = write_rows(arguments.cache)
    found: dict[tuple[str, bool], list[dict[str, float]]] = defaultdict(list)
    for seed in range(arguments.seeds):
        source = write_model(arguments.cache, seed)
        for size in SIZES:
            for grouped in (seed % 2 == 0, seed % 2 == 1):
                found[size, grouped].append(train(source, paths, size, seed, grouped=grouped))
                print(seed, size, "by length" if grouped else "shuffled", found[size, grouped][-1], flush=True)
    for title, names in (("learned", ("loss", "accuracy")), ("time", ("seconds",))):
        results.table(title, ["rows", "batches", *(HEAD[name] for name in names)], compare(found, names))


if __name__ == "__main__":
    main()
