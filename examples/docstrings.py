"""Real texts without a download: the docstrings of Python's standard library, one per line of JSON.

    python examples/docstrings.py texts.jsonl

Read from the source files, nothing is imported. Each text stands once, labelled with its top-level package; packages
with fewer than two texts are left out, since a label that stands alone says nothing about likeness.
"""

import argparse
import ast
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SHORTEST, LONGEST = 25, 600
"""Characters. Shorter ones say "See above"; what is behind a paragraph's end is cut anyway."""
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "pydoc_data",
    "__pycache__",
}


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a source file, in the order in which they stand."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def cleaned(text: str) -> str | None:
    """The first paragraph on one line; None for what is no prose."""
    line = " ".join(text.split("\n\n")[0].split())[:LONGEST].strip()
    letters = sum(character.isalpha() or character == " " for character in line)
    return line if len(line) >= SHORTEST and letters >= 0.75 * len(line) and ">>>" not in line else None


def collect(library: Path) -> list[dict[str, str]]:
    """Rows of text and label, in the order of the files' names."""
    seen: set[str] = set()
    rows = []
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if LEFT_OUT & set(parts) or parts[0].startswith("config-"):
            continue
        for text in docstrings(path):
            line = cleaned(text)
            if line and line.lower() not in seen:
                seen.add(line.lower())
                rows.append({"text": line, "label": parts[0].removesuffix(".py")})
    counts = Counter(row["label"] for row in rows)
    return [row for row in rows if counts[row["label"]] > 1]


def main() -> None:
    """Write the file, and say how many rows it has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="the .jsonl file to write")
    parser.add_argument("--rows", type=int, default=None, help="every so many-th row, so that about this many are left")
    parser.add_argument("--labels", type=int, default=None, help="only the packages with the most texts, so many")
    arguments = parser.parse_args()
    rows = collect(Path(sysconfig.get_path("stdlib")))
    largest = {label for label, _ in Counter(row["label"] for row in rows).most_common(arguments.labels)}
    rows = [row for row in rows if row["label"] in largest]
    if arguments.rows:
        rows = rows[:: max(1, len(rows) // arguments.rows)][: arguments.rows]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    print(f"{arguments.output}: {len(rows)} texts from {len({row['label'] for row in rows})} packages")


if __name__ == "__main__":
    main()
