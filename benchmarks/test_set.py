"""The test set: texts of kinds that no recipe was chosen by, healed on or calibrated with, from this machine.

    python benchmarks/test_set.py FILE [--rows N]

Package metadata, licences and error messages of installed Python packages; manual pages and descriptions of system
packages where the machine has any. A text is chosen by its digest. The docstrings and descriptions of datasets of
`inputs.py` are a development set: the ready recipes were chosen by them.
"""

import argparse
import ast
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from corpus import INSTALLED, is_prose, kept_away, parse
from inputs import text_of

SALT = "laconic test set 1"
"""Another one chooses other texts of the same kinds, for the next test set."""

MANUALS = Path("/usr/share/man/man1")
SYSTEM_PACKAGES = Path("/var/lib/dpkg/status")
ROFF = re.compile(r"\\f[A-Z]|\\f\([A-Z]{2}|\\f\[[^\]]*\]|\\[,/&]|\\s[-+]?\d")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a .jsonl file to write, with a text and its kind in each row")
    parser.add_argument("--rows", type=int, default=150, help="texts of each kind")
    parser.add_argument("--seen", type=Path, action="append", default=[], help=".jsonl of texts to leave out")
    arguments = parser.parse_args()
    found = choose_texts(arguments.rows, arguments.seen)
    arguments.file.write_text("".join(f"{row}\n" for row in make_rows(found)), encoding="utf-8")
    counts = ", ".join(f"{len(texts)} {kind}" for kind, texts in found.items())
    print(f"{counts}; sha256 {digest_texts(found)[:16]}")


def make_rows(chosen: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of a file: a text and its kind in each."""
    return [json.dumps({"text": text, "kind": kind}) for kind, texts in chosen.items() for text in texts]


def digest_texts(chosen: Mapping[str, Sequence[str]]) -> str:
    """Return the SHA-256 of the texts and their kinds."""
    return hashlib.sha256("\n".join(make_rows(chosen)).encode()).hexdigest()


def choose_texts(rows: int, seen: Iterable[Path]) -> dict[str, list[str]]:
    """At most so many texts of each kind, none of which is in the files `seen` or among the development texts."""
    known = kept_away()
    for path in seen:
        known |= {text_of(line).lower() for line in path.read_text(encoding="utf-8").splitlines()}
    taken: set[str] = set(known)
    chosen: dict[str, list[str]] = {}
    for kind, read in KINDS.items():
        texts = {text for text in map(clean, read()) if is_prose(text) and text.lower() not in taken}
        chosen[kind] = sorted(texts, key=order)[:rows]
        taken |= {text.lower() for text in chosen[kind]}
    return {kind: texts for kind, texts in chosen.items() if texts}


def order(text: str, salt: str = SALT) -> str:
    """The place of a text in the shuffle."""
    return hashlib.sha256(f"{salt}:{text.lower()}".encode()).hexdigest()


def clean(text: str) -> str:
    """A text on one line."""
    return " ".join(text.split())


def sentences(text: str) -> Iterator[str]:
    """The sentences of each paragraph."""
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(r"(?<=[.?!])\s+(?=[A-Z])", clean(paragraph))


def package_metadata() -> Iterator[str]:
    """What packages say of themselves on the package index."""
    for path in sorted(INSTALLED.glob("*.dist-info/METADATA")):
        yield from sentences(path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[2])


def licences() -> Iterator[str]:
    """The licences of packages."""
    for path in sorted(INSTALLED.glob("*.dist-info/**/*")):
        if path.is_file() and re.match(r"(?i)(licen[cs]e|copying|notice)", path.name):
            yield from sentences(path.read_text(encoding="utf-8", errors="replace"))


def error_messages() -> Iterator[str]:
    """What packages raise, with the names of values in place of values."""
    for path in sorted(INSTALLED.rglob("*.py")):
        yield from read_messages(path)


def read_messages(path: Path) -> Iterator[str]:
    """The messages of the errors that a Python file raises."""
    for node in parse(path):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield message(node.exc.args[0])


def message(node: ast.expr) -> str:
    """The text of a string in a program."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(message(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def manual_pages() -> Iterator[str]:
    """The prose of the manual pages of commands."""
    for path in sorted(MANUALS.glob("*.gz")):
        lines = gzip.decompress(path.read_bytes()).decode("utf-8", "replace").splitlines()
        plain = ["" if line.startswith((".", "'")) else ROFF.sub("", line).replace("\\-", "-") for line in lines]
        yield from sentences("\n".join(plain))


def system_packages() -> Iterator[str]:
    """The descriptions of the system's packages."""
    if SYSTEM_PACKAGES.is_file():
        content = SYSTEM_PACKAGES.read_text(encoding="utf-8", errors="replace")
        for found in re.findall(r"^Description:.*\n((?: .*\n)+)", content, re.MULTILINE):
            yield from sentences(found.replace("\n .\n", "\n\n"))


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "package metadata": package_metadata,
    "licences": licences,
    "error messages": error_messages,
    "manual pages": manual_pages,
    "system packages": system_packages,
}

if __name__ == "__main__":
    main()
