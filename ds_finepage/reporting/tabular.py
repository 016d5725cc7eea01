"""The one form of a table for the terminal: a line for each item, a column for each figure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, TypeVar

from rich.table import Table

T = TypeVar("T")


def table_of(
    title: str,
    columns: Sequence[tuple[str, Callable[[T], str]]],
    items: Iterable[T],
    left: Collection[str] = (),
    *,
    is_narrow: bool = False,
) -> Table:
    """Return a table.

    Args:
        title: Stands above.
        columns: The heading of each column, and the function that shows an item in it.
        items: A line each.
        left: The headings of columns of words.
        is_narrow: Leave less room between columns, for there are many.
    """
    table = Table(title=title, title_justify="left")
    if is_narrow:
        table.padding = (0, 0, 0, 1)
    for number, (heading, _) in enumerate(columns):
        justify: Literal["left", "right"] = "left" if heading in left else "right"
        table.add_column(heading, justify=justify, no_wrap=number == 0)
    for item in items:
        table.add_row(*(show(item) for _, show in columns))
    return table
