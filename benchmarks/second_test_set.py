"""The second test set: English texts of kinds that nothing is healed on, from packages that constraints.txt pins.

    python benchmarks/second_test_set.py [--choose]

Comments of Python and of C++ sources, the help of options, documents inside packages, and the reference of the Python
language: none of the kinds of `wide_corpus.py`, `inputs.py` or the first test set (`test_set.py`). All of them are
technical English. Which texts they are is frozen: second_test_set.json holds a digest of each, so that a fresh machine
finds the same ones. `--choose` chose them: those with the least salted digests that share no more than a third of their
runs of five words with any development text. Prints how many of each kind are here.
"""

import argparse
import ast
import importlib.metadata
import json
import platform
import pydoc_data.topics
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import test_set
import wide_corpus
from corpus import INSTALLED, is_prose, kept_away, parse, texts_of
from test_set import clean, digest_texts, order, sentences
from wide_corpus import OVERLAP, is_copy, runs_of

NAME = "second test set"
SALT = "laconic test set 2"
FROZEN = Path(__file__).parent / "second_test_set.json"
EACH = 240
"""Texts of each kind."""
CANDIDATES = 1500
"""Texts of each kind, the first by their salted digests, that are compared with the development texts."""
WORDS = 8
"""The least words of a text, so that it has runs to compare."""
DIGITS = 16
"""Of the digest that stands for a text."""
PYTHON_SOURCES = ("networkx", "optuna", "SQLAlchemy", "werkzeug", "tensorboard", "fonttools")
HEADERS = ("openvino", "protobuf", "googleapis-common-protos", "onnx", "numpy")
OPTIONS = ("accelerate", "alembic", "build", "charset-normalizer", "huggingface-hub", "mypy", "pytest", "pytest-xdist",
           "schemathesis", "tensorboard", "uvicorn", "virtualenv", "watchdog", "watchfiles")  # fmt: skip
DOCUMENTS = ("playwright", "fastapi", "openai", "pyparsing", "sentence-transformers", "typer", "opentelemetry-sdk",
             "huggingface-hub", "onnxruntime", "numpy")  # fmt: skip
COMMENT = re.compile(r"(?:^[ \t]*#(?![!:]).*\n)+", re.MULTILINE)
BLOCK = re.compile(r"/\*[\s\S]*?\*/|(?:^[ \t]*//.*\n)+", re.MULTILINE)
ORNAMENTS = re.compile(r"^[ \t]*(?:/\*+|\*+/?|//+[/!<]*) ?|\*/$|[\\@](?:ingroup|defgroup) .*$|[\\@]\w+\b", re.MULTILINE)
"""What is no prose in a comment of C++: its margin, and the commands of Doxygen."""
HELP = re.compile(r"\bhelp=|['\"]help['\"]:")


def main() -> None:
    """Print the counts, and choose the texts where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choose", action="store_true", help="freeze the texts anew, for another salt")
    if parser.parse_args().choose:
        freeze(choose_texts())
    texts = read_texts()
    print(f"{', '.join(f'{len(kind)} {name}' for name, kind in texts.items())}; sha256 {digest_texts(texts)[:16]}")


def read_texts() -> dict[str, list[str]]:
    """Read the frozen texts that are on this machine, by kind, in the order of their digests."""
    frozen = json.loads(FROZEN.read_text(encoding="utf-8"))["digests"]
    found = {kind: {shorten(text): text for text in read_kind(read)} for kind, read in KINDS.items()}
    return {kind: [found[kind][each] for each in frozen[kind] if each in found[kind]] for kind in KINDS}


def open_texts() -> dict[str, list[str]]:
    """Read the texts. Raises SystemExit where they are not the frozen ones, so that no other texts are judged by."""
    texts = read_texts()
    if digest_kinds(texts) != json.loads(FROZEN.read_text(encoding="utf-8"))["sha256"]:
        raise SystemExit(
            f"the texts of the {NAME} are those of other versions than it was frozen with. Try: pip install -c "
            f"constraints.txt, with the versions in {FROZEN.name}"
        )
    return texts


def read_versions() -> dict[str, str]:
    """Read the versions of what the texts are from."""
    packages = sorted({*PYTHON_SOURCES, *HEADERS, *OPTIONS, *DOCUMENTS})
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def digest_kinds(texts: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the SHA-256 of the texts of each kind."""
    return {kind: digest_texts({kind: chosen}) for kind, chosen in texts.items()}


def freeze(texts: Mapping[str, Sequence[str]]) -> None:
    """Write which texts are chosen, and from which versions."""
    digests = {kind: [shorten(text) for text in chosen] for kind, chosen in texts.items()}
    content = {"sha256": digest_kinds(texts), "versions": read_versions(), "digests": digests}
    FROZEN.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def choose_texts() -> dict[str, list[str]]:
    """Choose the texts by their digests alone, without those that are near a development text or one another."""
    candidates = {kind: sorted(read_kind(read), key=shorten)[:CANDIDATES] for kind, read in KINDS.items()}
    copies = find_copies([text for texts in candidates.values() for text in texts])
    taken: set[tuple[str, ...]] = set()
    chosen: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for kind, texts in candidates.items():
        for text in texts:
            if len(chosen[kind]) < EACH and text not in copies and not is_copy(text, taken):
                chosen[kind].append(text)
                taken.update(runs_of(text))
    return chosen


def find_copies(texts: Sequence[str]) -> set[str]:
    """Return the texts of which a text that is healed on, calibrated with or chosen by has more than OVERLAP."""
    sizes = {text: len(set(runs_of(text))) for text in texts}
    index: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for text in texts:
        for run in set(runs_of(text)):
            index[run].append(text)

    def find_copies_in(other: str) -> set[str]:
        counts = Counter(text for run in set(runs_of(other)) & index.keys() for text in index[run])
        return {text for text, count in counts.items() if count > OVERLAP * sizes[text]}

    copies: set[str] = set()
    for path in INSTALLED.rglob("*.py"):
        if find_copies_in(read_file(path)):  # only then is it parsed, which takes longer
            copies.update(*map(find_copies_in, (*texts_of(path), *test_set.read_messages(path))))
    others = {
        kind: read for kind, (_, read) in wide_corpus.KINDS.items() if kind not in ("docstrings", "error messages")
    }
    for text in (*kept_away(), *(text for read in others.values() for text in read())):
        copies |= find_copies_in(text)
    return copies


def shorten(text: str) -> str:
    """Return the digest that stands for a text."""
    return order(text, SALT)[:DIGITS]


def read_kind(read: Callable[[], Iterator[str]]) -> set[str]:
    """Read the prose of a kind, each text on one line."""
    return {text for text in map(clean, read()) if is_prose(text) and len(text.split()) >= WORDS}


def list_files(packages: Sequence[str], suffixes: Sequence[str]) -> Iterator[Path]:
    """List the files of installed packages that end so, without their metadata."""
    for package in packages:
        for file in importlib.metadata.files(package) or ():
            path = INSTALLED / file
            if path.suffix in suffixes and ".dist-info" not in file.parts[0] and path.is_file():
                yield path


def read_file(path: Path) -> str:
    """Read a file, whatever its encoding."""
    return path.read_text(encoding="utf-8", errors="replace")


def comments() -> Iterator[str]:
    """Comments of Python and Cython sources, of at least a line of their own."""
    for path in list_files(PYTHON_SOURCES, (".py", ".pyx")):
        for block in COMMENT.findall(read_file(path)):
            yield from sentences(re.sub(r"^[ \t]*#+ ?", "", block, flags=re.MULTILINE))


def header_comments() -> Iterator[str]:
    """Comments of C++ headers and of protocol buffers."""
    for path in list_files(HEADERS, (".h", ".hpp", ".proto")):
        for block in BLOCK.findall(read_file(path)):
            yield from sentences(ORNAMENTS.sub("", block))


def option_help() -> Iterator[str]:
    """What options of command lines and of settings say they do."""
    for path in list_files(OPTIONS, (".py",)):
        if HELP.search(read_file(path)):
            for node in parse(path):
                pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
                named = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "help"]
                if isinstance(node, ast.keyword) and node.arg == "help":
                    named.append(node.value)
                yield from (test_set.message(value) for value in named)


def documents() -> Iterator[str]:
    """Documents that packages bring beside their code, without code blocks and links."""
    for path in list_files(DOCUMENTS, (".md", ".rst", ".mdx")):
        content = re.sub(r"```.*?```", "", read_file(path), flags=re.DOTALL)
        plain = re.sub(r"^[ \t]*(?:[-*#>]+|\d+\.) ", "\n", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", content), flags=re.M)
        yield from sentences(plain)


def language_reference() -> Iterator[str]:
    """The reference of the Python language."""
    for topic in pydoc_data.topics.topics.values():
        yield from sentences(topic)


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "comments": comments,
    "header comments": header_comments,
    "option help": option_help,
    "documents": documents,
    "language reference": language_reference,
}

if __name__ == "__main__":
    main()
