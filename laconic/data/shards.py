"""The files of a dataset: one file, a folder of shards, or a pattern of names as shells and WebDataset write them."""

import itertools
import re
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path

from laconic.errors import DataError

SHARDS = (".jsonl", ".csv", ".parquet", ".tar")
"""The formats in which a dataset may lie in several files of one folder."""
BRACES = re.compile(r"\{([^{}]*,[^{}]*|\d+\.\.\d+)\}")
"""Alternatives, as {train,more}, or numbers, as {000..146}; without braces in them."""
MOST = 1_000_000
"""Files that a pattern may name."""


def list_shards(path: Path) -> list[Path]:
    """List the files of a dataset, sorted: those of a folder, those that a pattern such as `train-{000..146}.tar` or
    `*.parquet` names; otherwise the path itself.

    Raises DataError for a folder with files of several formats, and for a pattern that names no file.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and file.suffix.lower() in SHARDS)
        kinds = sorted({file.suffix.lower() for file in files})
        if len(kinds) > 1:
            raise DataError(
                f"{path} holds files of several formats: {', '.join(kinds)}. Give the folder of one dataset"
            )
        return files or [path]
    if path.exists() or not is_pattern(path):
        return [path]
    names = list(itertools.islice(expand_braces(str(path)), MOST + 1))
    if len(names) > MOST:
        raise DataError(f"{path} names more than {MOST:,} files. Give a pattern of fewer")
    return sorted({file for name in names for file in find_files(Path(name))})


def is_pattern(path: Path) -> bool:
    """Return whether a path has braces or wildcards."""
    return BRACES.search(str(path)) is not None or has_magic(str(path))


def expand_braces(text: str) -> Iterator[str]:
    """Yield the names that braces stand for, some twice where braces are in others. Numbers keep their zeros."""
    braces = BRACES.search(text)
    if braces is None:
        yield text
        return
    before, after = text[: braces.start()], text[braces.end() :]
    for each in list_alternatives(braces[1]):
        yield from expand_braces(before + each + after)


def list_alternatives(content: str) -> Iterator[str]:
    """Yield what stands between braces: alternatives, or numbers as wide as the wider of the ends where one begins with
    zero."""
    if "," in content:
        yield from content.split(",")
        return
    first, last = content.split("..")
    is_padded = any(end != "0" and end.startswith("0") for end in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    step = 1 if int(first) <= int(last) else -1
    yield from (str(number).zfill(width) for number in range(int(first), int(last) + step, step))


def find_files(pattern: Path) -> list[Path]:
    """Find the files that a name with wildcards stands for, sorted. Raises DataError where there is none."""
    if not has_magic(str(pattern)):
        return [pattern]
    anchor = Path(pattern.anchor)
    files = sorted(file for file in anchor.glob(str(pattern.relative_to(anchor))) if file.is_file())
    if not files:
        raise DataError(f"no file is named as {pattern}. Give a pattern of files that are there")
    return files
