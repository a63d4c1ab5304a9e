"""Progress of a long run on the console: a bar for the current step on a terminal, one line per finished step.
What libraries say to users of their own is hidden.
"""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class CountColumn(MofNCompleteColumn):
    """How many units of a step are done; nothing for a step without units."""

    def render(self, task: Task) -> Text:
        """Render the count of one step."""
        return Text() if task.total is None else super().render(task)


class Step:
    """A running step. `note` is printed beside its title when it ends."""

    def __init__(self, bar: Progress | None, title: str, total: int | None) -> None:
        self._bar = bar
        self._task = bar.add_task(title, total=total) if bar else None
        self.note = ""

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar and self._task is not None:
            self._bar.remove_task(self._task)

    def advance(self, count: int = 1) -> None:
        """Advance the progress bar by `count` units."""
        if self._bar and self._task is not None:
            self._bar.advance(self._task, count)


class Steps:
    """Prints the steps of a run to the standard error stream.

    seconds: the duration of each step, by title, without the steps within it.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._bar: Progress | None = None
        self._inner = 0.0
        self.seconds: dict[str, float] = {}

    def warn(self, message: str) -> None:
        """Print a warning."""
        self._console.print(Text.assemble(("note", "yellow"), f" {message}"), soft_wrap=True)

    def report(self, title: str, note: str) -> None:
        """Print a result, without a duration."""
        self._console.print(Text.assemble(("    ", ""), f" {title:<36}            ", (note, "dim")), soft_wrap=True)

    @contextmanager
    def step(self, title: str, total: int | None = None) -> Iterator[Step]:
        """Run the body as a step, time it, and print its title and note when it is done. total: units of its bar.

        A step may contain others, each with a bar of its own.
        """
        start, before, self._inner = time.perf_counter(), self._inner, 0.0
        try:
            if self._console.is_terminal and not self._console.quiet:
                with self._display() as bar:
                    step = Step(bar, title, total)
                    try:
                        yield step
                    finally:
                        step.close()
            else:
                step = Step(None, title, total)
                yield step
        finally:
            whole = time.perf_counter() - start
            seconds, self._inner = whole - self._inner, before + whole
        self.seconds[title] = self.seconds.get(title, 0.0) + seconds
        line = Text.assemble(("done", "green"), f" {title:<36} {seconds:6.1f} s  ", (step.note, "dim"))
        self._console.print(line, soft_wrap=True)

    @contextmanager
    def _display(self) -> Iterator[Progress]:
        """Show the bars of the running steps; a terminal can show one display at a time."""
        if self._bar is not None:
            yield self._bar
            return
        title_column = TextColumn("{task.description:<36}", markup=False)
        columns = (SpinnerColumn(), title_column, BarColumn(), CountColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as self._bar:
            try:
                yield self._bar
            finally:
                self._bar = None


@contextmanager
def hide_library_messages() -> Iterator[None]:
    """Hide warnings, and log messages up to warnings, of all libraries in the body."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
