"""Text without labels to learn from: the sentences of the docstrings of installed packages.

    python benchmarks/corpus.py FILE [--rows N]

The standard library and scikit-learn's descriptions of datasets are left out: with those is judged.
"""

import argparse
import ast
import hashlib
import json
import re
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from inputs import text_of, texts

INSTALLED = Path(sysconfig.get_paths()["purelib"])
LEAST, MOST = 25, 600
"""Characters of a text."""
LETTERS = 0.8
"""The least share of letters and spaces, so that it is prose."""


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a .jsonl file to write")
    parser.add_argument("--rows", type=int, default=90_000, help="at most so many texts")
    arguments = parser.parse_args()
    print(f"{corpus(arguments.file, arguments.rows)} texts in {arguments.file}")


def corpus(path: Path, rows: int) -> int:
    """Write at most `rows` texts, which their content alone chooses and orders; gives how many."""
    unseen = kept_away()
    found: dict[str, str] = {}
    for file in sorted(INSTALLED.rglob("*.py")):
        for text in texts_of(file):
            if text.lower() not in unseen:
                found.setdefault(digest(text), text)
    chosen = [found[each] for each in sorted(found)[:rows]]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen), encoding="utf-8")
    return len(chosen)


def digest(text: str) -> str:
    """Of a text, however it is capitalised."""
    return hashlib.sha256(text.lower().encode()).hexdigest()


def kept_away() -> set[str]:
    """What is compressed with and judged by, in lower case."""
    with tempfile.TemporaryDirectory() as folder:
        given, unseen = texts(Path(folder))
        lines = given.read_text(encoding="utf-8").splitlines()
    return {text.lower() for text in [*map(text_of, lines), *(text for kind in unseen.values() for text in kind)]}


def texts_of(file: Path) -> Iterator[str]:
    """The first paragraph of each docstring, and each sentence of the others."""
    for first, *others in docstrings(file):
        yield from filter(is_prose, [first])
        for whole in others:
            yield from filter(is_prose, re.split(r"(?<=[.?!])\s+(?=[A-Z])", whole))


def parse(file: Path) -> Iterator[ast.AST]:
    """The nodes of a Python file; none where it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    yield from ast.walk(tree)


def docstrings(file: Path) -> Iterator[list[str]]:
    """The paragraphs of each docstring in a file, each on one line."""
    for node in parse(file):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            paragraphs = re.split(r"\n\s*\n", ast.get_docstring(node) or "")
            yield [" ".join(paragraph.split()) for paragraph in paragraphs]


def is_prose(text: str) -> bool:
    """Whether a text is neither a scrap nor a table."""
    letters = sum(character.isalpha() or character == " " for character in text)
    return LEAST <= len(text) <= MOST and letters >= LETTERS * len(text)


if __name__ == "__main__":
    main()
