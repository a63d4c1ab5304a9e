"""Progress of a long run on the console: a bar for the current step on a terminal, one line per finished step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text


class Step:
    """A running step. `note` is printed beside its title when it ends."""

    def __init__(self, bar: Progress | None, title: str, total: int | None) -> None:
        self._bar = bar
        self._task = bar.add_task(title, total=total) if bar else None
        self.note = ""

    def advance(self, count: int = 1) -> None:
        """Advance the progress bar by `count` units."""
        if self._bar and self._task is not None:
            self._bar.advance(self._task, count)


class Steps:
    """Prints the steps of a run to the standard error stream. `seconds` holds the duration of each, by title."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self.seconds: dict[str, float] = {}

    def warn(self, message: str) -> None:
        """Print a warning."""
        self._console.print(Text.assemble(("note", "yellow"), f" {message}"), soft_wrap=True)

    def report(self, title: str, note: str) -> None:
        """Print a result, without a duration."""
        self._console.print(Text.assemble(("    ", ""), f" {title:<36}            ", (note, "dim")), soft_wrap=True)

    @contextmanager
    def step(self, title: str, total: int | None = None) -> Iterator[Step]:
        """Run the body as a step, time it, and print its title and note when it is done. total: units of its bar."""
        start = time.perf_counter()
        if self._console.is_terminal and not self._console.quiet:
            title_column = TextColumn("{task.description:<36}", markup=False)
            counts = () if total is None else (BarColumn(), MofNCompleteColumn())
            columns = (SpinnerColumn(), title_column, *counts, TimeElapsedColumn())
            with Progress(*columns, console=self._console, transient=True) as bar:
                step = Step(bar, title, total)
                yield step
        else:
            step = Step(None, title, total)
            yield step
        seconds = time.perf_counter() - start
        self.seconds[title] = self.seconds.get(title, 0.0) + seconds
        line = Text.assemble(("done", "green"), f" {title:<36} {seconds:6.1f} s  ", (step.note, "dim"))
        self._console.print(line, soft_wrap=True)
