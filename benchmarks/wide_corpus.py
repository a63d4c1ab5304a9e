"""Text of many kinds to heal on: docstrings and what else packages and a system hold in English prose.

    apt-get install wordnet-base fortunes anarchism debian-reference-en gnome-user-docs wesnoth-1.16-data
    python benchmarks/wide_corpus.py FILE

The development texts of `inputs.py` and the texts of `test_set.py` are left out, and so is every text that shares a
third of its runs of five words with those of the test set. A kind whose sources are not installed is missing.
"""

import argparse
import gzip
import html
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import test_set
from corpus import INSTALLED, digest, is_prose, kept_away, texts_of

SHARE = Path("/usr/share")
RUN, OVERLAP = 5, 1 / 3
"""Words of a run, and the share of a text's runs that the test set may not have."""


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a .jsonl file to write, with a text and its kind in each row")
    parser.add_argument("--seen", type=Path, action="append", default=[], help=".jsonl of texts to leave out")
    arguments = parser.parse_args()
    counts = write(arguments.file, arguments.seen)
    print(f"{sum(counts.values())} texts: {', '.join(f'{count} {kind}' for kind, count in counts.items())}")


def write(path: Path, seen: Iterable[Path]) -> dict[str, int]:
    """Write the texts, in an order that their content alone decides; returns how many of each kind.

    seen: files of texts that the test set leaves out."""
    tested = [text for kind in test_set.choose_texts(150, seen).values() for text in kind]
    known = kept_away() | {text.lower() for text in tested}
    runs = {run for text in tested for run in runs_of(text)}
    rows: dict[str, dict[str, str]] = {}
    counts: dict[str, int] = {}
    for kind, (most, read) in KINDS.items():
        texts = {digest(text): text for text in map(test_set.clean, read()) if is_prose(text)}
        fresh = (each for each in sorted(texts) if each not in rows and texts[each].lower() not in known)
        for each in fresh:
            if counts.get(kind, 0) == most:
                break
            if not is_copy(texts[each], runs):
                rows[each] = {"text": texts[each], "kind": kind}
                counts[kind] = counts.get(kind, 0) + 1
    path.write_text("".join(json.dumps(rows[each]) + "\n" for each in sorted(rows)), encoding="utf-8")
    return counts


def runs_of(text: str) -> Iterator[tuple[str, ...]]:
    """The runs of five words of a text."""
    words = re.findall(r"\w+", text.lower())
    return (tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1))


def is_copy(text: str, tested: set[tuple[str, ...]]) -> bool:
    """Whether a text shares too many runs with the test set."""
    runs = list(runs_of(text))
    return sum(run in tested for run in runs) > OVERLAP * len(runs) if runs else False


def docstrings() -> Iterator[str]:
    """The docstrings of installed packages, as `corpus.py` reads them."""
    for path in sorted(INSTALLED.rglob("*.py")):
        yield from texts_of(path)


def available_packages() -> Iterator[str]:
    """What the packages that the system could install say they are, a line each."""
    found = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=False).stdout
    yield from re.findall(r"^Description(?:-en)?: (.+)$", found, re.MULTILINE)


def glosses() -> Iterator[str]:
    """The definitions and examples of a dictionary (WordNet)."""
    for path in sorted((SHARE / "wordnet").glob("data.*")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            yield from re.split(r'"|;(?=\s)', line.partition(" | ")[2])


def quotations() -> Iterator[str]:
    """Quotations and jokes."""
    for path in sorted((SHARE / "games/fortunes").glob("*")):
        if path.is_file() and not path.suffix:
            yield from path.read_text(encoding="utf-8", errors="replace").split("\n%\n")


def essays() -> Iterator[str]:
    """Political essays."""
    for path in sorted((SHARE / "doc/anarchism/markdown").glob("*.md.gz")):
        content = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        yield from test_set.sentences(re.sub(r"\[([^\]]*)\]\([^)]*\)|[*_>#]", r"\1", content))


def dialogues() -> Iterator[str]:
    """What figures of a game say, and its descriptions."""
    for path in sorted((SHARE / "games/wesnoth").rglob("*.cfg")):
        content = path.read_text(encoding="utf-8", errors="replace")
        yield from re.findall(r'(?:message|description|story|help_text|text)\s*=\s*_\s*"([^"]+)"', content)


def guides() -> Iterator[str]:
    """Manuals for users and administrators."""
    pages = sorted([*(SHARE / "help/C").rglob("*.page"), *(SHARE / "debian-reference").glob("*.en.html")])
    for path in pages:
        content = path.read_text(encoding="utf-8", errors="replace")
        for paragraph in re.findall(r"<p[ >].*?</p>", content, re.DOTALL):
            yield from test_set.sentences(html.unescape(re.sub(r"<[^>]+>", "", paragraph)))


KINDS: dict[str, tuple[int, Callable[[], Iterator[str]]]] = {
    "docstrings": (60_000, docstrings),
    "glosses": (30_000, glosses),
    "available packages": (20_000, available_packages),
    "essays": (20_000, essays),
    "manual pages": (20_000, test_set.manual_pages),
    "error messages": (15_000, test_set.error_messages),
    "quotations": (15_000, quotations),
    "dialogues": (10_000, dialogues),
    "package metadata": (10_000, test_set.package_metadata),
    "guides": (10_000, guides),
    "licences": (5_000, test_set.licences),
    "system packages": (5_000, test_set.system_packages),
}
"""At most so many texts of a kind, and what reads them."""

if __name__ == "__main__":
    main()
