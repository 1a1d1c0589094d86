"""Tables for a terminal, all in one look."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table_of(*headings: str, title: str | None = None) -> Table:
    """Make a table; a heading that starts with `>` is of numbers. Headings, title and cells are markup."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for heading in headings:
        number = heading.startswith(">")
        table.add_column(heading.removeprefix(">"), justify="right" if number else "left", no_wrap=not table.columns)
    return table


def filled_table(headings: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> Table:
    """Make a table of plain text, in which nothing is markup."""
    from rich.markup import escape

    table = table_of(*map(escape, headings), title=escape(title) if title else None)
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    return table
