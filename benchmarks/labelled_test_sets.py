"""The labelled test sets: digits in another order, and docstrings of packages that no development set has labels of.

Both are of the kinds that the ready recipes were chosen by, and so in their domain; the samples that judge are others,
and so is the model, which is trained anew. `python benchmarks/ready.py RECIPE --test-set` judges by them.
"""

import hashlib
import json
from collections import defaultdict
from pathlib import Path

from classifier import write
from corpus import INSTALLED, digest, docstrings, is_prose
from digit_images import GIVEN, SEEN, read_digits
from test_set import order

SALT = "laconic labelled test set 2"
DIGITS_SALT = 2
PACKAGES = (
    "aiohttp", "babel", "fsspec", "gevent", "jinja2", "joblib", "mpmath", "optuna", "pygments", "rich", "websockets",
    "werkzeug",
)  # fmt: skip
"""The labels: packages of middle size, none of the twenty largest, whose docstrings `classifier.py` takes."""
JUDGED, TRAINED = 100, 150
"""Docstrings of each package: to calibrate, choose and judge with, and to train the classifier with."""


def split_docstrings() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the rows that the classifier is trained with, and those that `laconic` gets; of no two packages the same
    text, and chosen by the salted digests of the texts."""
    texts: dict[str, str] = {}
    packages = defaultdict(set)
    for package in PACKAGES:
        for file in sorted((INSTALLED / package).rglob("*.py")):
            for first, *_ in docstrings(file):
                if is_prose(first):
                    texts.setdefault(digest(first), first)
                    packages[digest(first)].add(package)
    by_package = defaultdict(list)
    for each, text in texts.items():
        if len(packages[each]) == 1:
            by_package[next(iter(packages[each]))].append(text)
    train, judge = [], []
    for package, own in by_package.items():
        rows = [{"text": text, "label": package} for text in sorted(own, key=lambda text: order(text, SALT))]
        judge += rows[:JUDGED]
        train += rows[JUDGED : JUDGED + TRAINED]
    return train, judge


def write_docstrings(folder: Path) -> str:
    """Write the files that `classifier.classifier` reads; return the digest of what is judged by."""
    train, judge = split_docstrings()
    write(folder / "train.jsonl", train)
    write(folder / "labelled.jsonl", judge)
    write(folder / "unlabelled.jsonl", [{"text": row["text"]} for row in train])
    return hashlib.sha256(json.dumps(judge).encode()).hexdigest()


def digest_digits() -> str:
    """Return the digest of the digits that judge."""
    images, labels = (part[SEEN + GIVEN :] for part in read_digits(DIGITS_SALT))
    return hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
