"""The tables of a benchmark: printed, kept in a result file, and from there written into the documentation.

    python benchmarks/results.py [--check]

A benchmark that is run with --publish=NAME writes benchmarks/results/NAME.json: its tables, and the commit, the machine
and the load that they were measured with. Without a name it is that of the benchmark; figures of another processor
have one of their own. A page has the line `<!-- result: NAME TITLE -->` where one of the tables
belongs; this command writes it there, with its conditions below. The name `looks` stands for the ledger of looks at
test sets (looks.py). --check changes nothing, and fails where a page is out of date.
"""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from looks import render_looks
from provenance import HOME, describe_command, list_changes, read_versions, run_git
from pydantic import BaseModel, ConfigDict

from laconic.hardware import Machine, this_machine

FOLDER = HOME / "benchmarks" / "results"
BLOCK = re.compile(
    r"<!-- result: (?P<name>\S+) (?P<title>[^\n]+?) -->\n"
    r"(?:(?:(?!<!-- result: )[^\n]*\n)*?<!-- end of result -->\n)?"
)


class Table(BaseModel):
    """Cells as they are printed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class ResultFile(BaseModel):
    """What one run of a benchmark measured. load: the machine's average over a minute, before and after. day: in UTC.
    tables: by title."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str
    commit: str
    day: str
    processor: str
    features: tuple[str, ...]
    cores: int
    versions: dict[str, str]
    load: tuple[float, float]
    tables: dict[str, Table]

    def render(self, title: str) -> str:
        """Return a table in Markdown."""
        table = self.tables[title]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (table.head, ["---"] * len(table.head), *table.rows))

    def describe_run(self) -> str:
        """Return the command and the conditions of the measurement, as a paragraph."""
        machine = f"{self.processor} ({', '.join(self.features)}), {self.cores} cores"
        load = f"load {self.load[0]:.1f} before, {self.load[1]:.1f} after"
        measured = f"Measured by `{self.command}` at commit {self.commit[:8]} on {self.day}: {machine}, {load}."
        return textwrap.fill(measured, 120, break_long_words=False, break_on_hyphens=False)


class Results:
    """The tables of one run. Prints the machine and each table. publish: the name of the result file that keeps them;
    empty for none.

    Raises SystemExit where the working tree differs from its commit, so that no figure names a commit it is not from.
    """

    def __init__(self, *, publish: str) -> None:
        self._path = FOLDER / f"{publish}.json" if publish else None
        if publish and (changed := list_changes()):
            raise SystemExit(f"--publish names the commit of the figures: commit {', '.join(changed)} first")
        machine = print_machine()
        self._result = ResultFile(
            command=describe_command(sys.argv),
            commit=run_git("rev-parse", "HEAD") if publish else "",
            day=datetime.now(UTC).date().isoformat(),
            processor=machine.processor,
            features=machine.features,
            cores=machine.cores,
            versions=read_versions(),
            load=(os.getloadavg()[0],) * 2,
            tables={},
        )

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table, and keep it."""
        self.begin(title, head)
        for row in rows:
            self.add(title, row)

    def begin(self, title: str, head: Sequence[str]) -> None:
        """Print the head of a table whose rows follow as they are measured."""
        print_table(head, [])
        self._keep(title, Table(head=tuple(head), rows=()))

    def add(self, title: str, row: Sequence[str]) -> None:
        """Print the next row of a table, and keep it."""
        print_row(row)
        table = self._result.tables[title]
        self._keep(title, table.model_copy(update={"rows": (*table.rows, tuple(row))}))

    def _keep(self, title: str, table: Table) -> None:
        load = (self._result.load[0], os.getloadavg()[0])
        self._result = self._result.model_copy(update={"tables": self._result.tables | {title: table}, "load": load})
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(self._result.model_dump_json(indent=1) + "\n", encoding="utf-8")


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make the parser of a benchmark whose tables can be published. description: the docstring of its module."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    name = Path(sys.argv[0]).stem
    kept = f"keep the tables in benchmarks/results/NAME.json; {name} by default"
    parser.add_argument("--publish", nargs="?", const=name, default="", metavar="NAME", help=kept)
    return parser


def print_machine() -> Machine:
    """Print the processor, and the versions of what computes. Return the machine."""
    machine = this_machine()
    versions = ", ".join(f"{package} {version}" for package, version in read_versions().items())
    print(f"\n{machine.processor} ({', '.join(machine.features)}), {versions}\n", flush=True)
    return machine


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    for cells in (head, ["---"] * len(head), *rows):
        print_row(cells)


def print_row(cells: Sequence[str]) -> None:
    """Print a row of a table in Markdown."""
    print(f"| {' | '.join(cells)} |", flush=True)


def render_pages() -> Iterator[tuple[Path, str, str]]:
    """Yield each page that shows results, with its text, and the text that it should have."""
    for page in (HOME / "README.md", *sorted((HOME / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if "<!-- result:" in text:
            yield page, text, render_page(text)


def render_page(text: str) -> str:
    """Return a page with its results as the files have them."""
    return BLOCK.sub(partial(render_block, shown=[]), text)


def render_block(match: re.Match[str], shown: list[str]) -> str:
    """Return a line that names a result, and the table behind it, whose conditions stand below the first of tables in
    a row from one run. shown: the results above on the page."""
    line, name = f"<!-- result: {match['name']} {match['title']} -->", match["name"]
    if name == "looks":
        table = render_looks()
    else:
        result = ResultFile.model_validate_json((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        conditions = "Measured in the same run." if shown[-1:] == [name] else result.describe_run()
        table = f"{result.render(match['title'])}\n\n{conditions}"
    shown.append(name)
    return f"{line}\n\n{table}\n\n<!-- end of result -->\n"


def main() -> None:
    """Write the tables into the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a page is out of date")
    check = parser.parse_args().check
    for page, text, rendered in render_pages():
        if text != rendered and check:
            raise SystemExit(f"{page.name} is not what benchmarks/results.py makes of the result files")
        if text != rendered:
            page.write_text(rendered, encoding="utf-8")


if __name__ == "__main__":
    main()
