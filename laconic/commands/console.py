"""Tables on the standard output stream."""

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

OUT = Console(highlight=False, markup=False, emoji=False)
"""The standard output stream."""


def make_table(title: str, *columns: str, right: Iterable[int] = ()) -> Table:
    """Make a table that fits 80 columns, with a rule below its head only. right: right-aligned columns, for figures."""
    table = Table(
        *columns,
        title=Text(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        show_header=any(columns),
    )
    for index in right:
        table.columns[index].justify = "right"
        table.columns[index].no_wrap = True
    return table
