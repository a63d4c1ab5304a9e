"""A classifier of docstrings, made of all-MiniLM-L6-v2 by `laconic finetune`: which package is a text from?"""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from corpus import corpus
from inputs import model_folder, text_of, texts
from minilm import LACONIC

LABELS = 20
"""The packages with the most docstrings."""
UNLABELLED = 12_000
"""Texts to heal with, beside those that the classifier was trained with."""
LENGTH = 64
TRAINING = {
    "task": "text-classification",
    "length": LENGTH,
    "batch": 16,
    "epochs": 4,
    "optimizer": {"adamw": {"lr": 1.0e-4}},
    "schedule": {"onecycle": {}},
    "techniques": ["bf16"],
}


def classifier(folder: Path) -> dict[str, Any]:
    """What a recipe says of it: the checkpoint, and the samples.

    Half of the labelled texts, by the digest of their content, have trained it; the others are those that a search
    calibrates, chooses and judges with. Those that trained it heal it too, with texts without labels.
    """
    tuned, trained, labelled, unlabelled = (
        folder / name for name in ("tuned", "train.jsonl", "labelled.jsonl", "unlabelled.jsonl")
    )
    if not unlabelled.exists():
        parted(folder, trained, labelled)
        lines = corpus_lines(folder)
        mine = [json.dumps({"text": text_of(line)}) for line in trained.read_text(encoding="utf-8").splitlines()]
        write(unlabelled, [*mine, *lines])
    if not tuned.exists():
        recipe = folder / "finetune.yaml"
        recipe.write_text(yaml.safe_dump(TRAINING, sort_keys=False), encoding="utf-8")
        command = [LACONIC, "finetune", model_folder(folder), "--data", trained, "--recipe", recipe, "-o", tuned]
        if subprocess.run(command).returncode:
            sys.exit("bench: the classifier was not trained")
    return {
        "source": str(tuned),
        "data": {"train": str(unlabelled), "calibrate": str(labelled)},
        "heal": {"length": LENGTH, "techniques": ["bf16"]},
    }


def parted(folder: Path, trained: Path, labelled: Path) -> None:
    """Write the rows of the largest packages, half of them to train with."""
    texts(folder)
    lines = (folder / "docstrings.jsonl").read_text(encoding="utf-8").splitlines()
    count = Counter(json.loads(line)["label"] for line in lines)
    largest = {label for label, _ in sorted(count.items(), key=lambda item: (-item[1], item[0]))[:LABELS]}
    rows = [line for line in lines if json.loads(line)["label"] in largest]
    write(trained, [line for line in rows if even(text_of(line))])
    write(labelled, [line for line in rows if not even(text_of(line))])


def even(text: str) -> bool:
    """Half of all texts, by their content alone."""
    return hashlib.sha256(text.lower().encode()).digest()[0] % 2 == 0


def corpus_lines(folder: Path) -> list[str]:
    """Texts without labels, none of them from the standard library."""
    path = folder / "corpus.jsonl"
    if not path.exists():
        corpus(path, UNLABELLED)
    return path.read_text(encoding="utf-8").splitlines()[:UNLABELLED]


def write(path: Path, lines: list[str]) -> None:
    """A row a line."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
