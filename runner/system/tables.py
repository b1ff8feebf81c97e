"""Formats and prints the tables of ``eagle3-inspect``."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]], numbers: Iterable[str] = ()) -> "Table":
    """Return a plain table. The columns named in ``numbers`` are right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_edge = table.pad_edge = False
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else f"{cell:,}" for cell in row))
    return table


def show_tables(title: str, tables: Iterable[Any]) -> None:
    """Print the tables to stdout, with a blank line before each."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160  # output into a pipe has a fixed width
    console.print(title, soft_wrap=True)
    for entry in tables:
        console.print()
        console.print(entry)
