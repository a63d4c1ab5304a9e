"""A classifier of docstrings, made of all-MiniLM-L6-v2 by `laconic finetune`: which package is a text from?

The docstrings are those of the packages that are installed; the labels, the twenty with the most of them.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from corpus import INSTALLED, digest, docstrings, is_prose
from inputs import model_folder
from minilm import LACONIC

LABELS = 20
"""The packages with the most docstrings."""
TRAIN, SEARCH, UNLABELLED = 500, 400, 1500
"""Texts of each, at most: to train the classifier with; to calibrate, choose and judge with; and further ones to heal
with, whose labels nobody knows."""
LENGTH = 64
TECHNIQUES = ["bf16", {"sdpa": {"float32": True}}]
TRAINING = {
    "task": "text-classification",
    "max_length": LENGTH,
    "batch_size": 32,
    "epochs": 3,
    "optimizer": {"adamw": {"lr": 2.0e-4}},
    "schedule": {"onecycle": {}},
    "techniques": TECHNIQUES,
}


def classifier(folder: Path) -> dict[str, Any]:
    """What a recipe says of it: the checkpoint, and the samples.

    What it was trained with heals it too, without labels, and so do further texts of the same packages.
    """
    tuned, trained, labelled, unlabelled = (
        folder / name for name in ("tuned", "train.jsonl", "labelled.jsonl", "unlabelled.jsonl")
    )
    if not unlabelled.exists():
        split_texts(trained, labelled, unlabelled)
    if not tuned.exists():
        recipe = folder / "finetune.yaml"
        recipe.write_text(yaml.safe_dump(TRAINING, sort_keys=False), encoding="utf-8")
        command: list[str | Path] = [LACONIC, "finetune", model_folder(folder), "--data", trained, "--recipe", recipe]
        command += ["-o", tuned]
        if subprocess.run(command).returncode:
            sys.exit("bench: the classifier was not trained")
    return {
        "source": str(tuned),
        "data": {"train": str(unlabelled), "calibrate": str(labelled)},
        "heal": {"max_length": LENGTH, "techniques": TECHNIQUES},
    }


def split_texts(trained: Path, labelled: Path, unlabelled: Path) -> None:
    """Write the three files; the texts' digests alone say which is where."""
    found = labelled_texts()
    largest = sorted(found, key=lambda label: (-len(found[label]), label))[:LABELS]
    train, search, heal = [], [], []
    for label in largest:
        rows = [{"text": text, "label": label} for text in found[label]]
        train += rows[:TRAIN]
        search += rows[TRAIN : TRAIN + SEARCH]
        heal += rows[TRAIN + SEARCH :][:UNLABELLED]
    write(trained, train)
    write(labelled, search)
    write(unlabelled, [{"text": row["text"]} for row in train + heal])


def labelled_texts() -> dict[str, list[str]]:
    """By package, the first paragraphs of its docstrings that no other package has, by their digests."""
    texts: dict[str, str] = {}
    packages = defaultdict(set)
    for file in sorted(INSTALLED.rglob("*.py")):
        package = file.relative_to(INSTALLED).parts[0].removesuffix(".py")
        for first, *_ in docstrings(file):
            if is_prose(first):
                texts.setdefault(digest(first), first)
                packages[digest(first)].add(package)
    found = defaultdict(list)
    for each in sorted(texts):
        if len(packages[each]) == 1:
            found[next(iter(packages[each]))].append(texts[each])
    return found


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """A row a line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in sorted(rows, key=str)), encoding="utf-8")
