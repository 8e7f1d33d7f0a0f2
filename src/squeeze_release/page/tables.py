"""Tables that are whole without JavaScript; with it, a click on a heading sorts them (`page.js`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from .markup import Markup, tag

_LAST = -1e300  # where what is no number is sorted


class Number(NamedTuple):
    """A cell that sorts by its value and is aligned to the right."""

    value: float
    text: str


Cell = str | Markup | Number


def table(caption: str, columns: Iterable[str], rows: Iterable[Iterable[Cell]], *, class_: str = "") -> Markup:
    """The first cell of every row names it. Columns are aligned as the cells of the first row are."""
    body = [tuple(row) for row in rows]
    numeric = [isinstance(cell, Number) for cell in body[0]] if body else []
    heads = [
        tag("th", name, scope="col", class_="n" if place < len(numeric) and numeric[place] else None)
        for place, name in enumerate(columns)
    ]
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *heads)),
        tag("tbody", *map(_row, body)),
        class_=f"sortable {class_}".strip(),
    )
    return tag("div", whole, class_="wide", role="region", aria_label=caption, tabindex=0)


def _row(cells: tuple[Cell, ...]) -> Markup:
    first, *rest = cells
    return tag("tr", _cell("th", first, scope="row"), *(_cell("td", cell) for cell in rest))


def _cell(name: str, cell: Cell, **attributes: str) -> Markup:
    if isinstance(cell, Number):
        return tag(
            name,
            cell.text,
            class_="n",
            data_value=f"{cell.value if math.isfinite(cell.value) else _LAST:.17g}",
            **attributes,
        )
    return tag(name, cell, **attributes)
