"""What a chart shows: one of four kinds, its data and its axes. `draw` makes Vega-Lite of it.

`data` has a row for each point, bar, span or cell. Columns are shown in tooltips and in the table
below the chart, under their names, unless they begin with "_". Those are what is drawn:

- _x, _y, or _begin, _end: the place, in base units
- _low, _high: ends of an interval, on the axis of values; NaN: unknown
- _reference: what the value is compared with, on the same axis
- _pale: bool, a mark that does not count as much as the others
- _marked: str, outlined if it is not empty
- _text: str, written beside the mark or into the cell

Readers can hide the rows of a backend, if there is a column "backend". Lines of different runs and
launches are apart, if there are columns "run" and "launch".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]

ROOMY = 12  # columns of a matrix whose cells have room for a text


@dataclass(frozen=True)
class Axis:
    """labels: the expression that formats a value, of `theme`. zero: whether 0 is shown in any
    case. domain: what is shown; values beyond are cut off."""

    title: str | None
    labels: str
    log: bool = False
    zero: bool = False
    domain: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Drawing:
    """data: as above. color: a column of names; empty: one colour. order: all names that could be
    there, so that each has one colour everywhere; empty: those of the data."""

    data: Rows
    color: str = "backend"
    order: tuple[str, ...] = ()

    @property
    def shown(self) -> Rows:
        """Return the rows of the table, and what of them is drawn."""
        return self.data


@dataclass(frozen=True, eq=False, kw_only=True)
class Lines(Drawing):
    """Values _y over _x: lines, points or areas.

    dash: a column whose names have dashes. shape: a column of names; shapes: all that could be
    there, the plain one first. rules: vertical lines: _x, _label, its pixels _row from the top, and
    what the tooltip shows.
    """

    x: Axis
    y: Axis
    dash: str = ""
    shape: str = ""
    shapes: tuple[str, ...] = ()
    connected: bool = True
    stacked: bool = False  # areas on top of each other
    rules: Rows = ()
    height: int = 260  # pixels


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars(Drawing):
    """Horizontal bars from _begin to _end, or dots at _end, in a row for each name of a column.

    Without _begin, the bars of a row are stacked. within: a column whose names have places of their
    own in a row. _band_low and _band_high shade a row.
    """

    x: Axis
    row: str
    within: str = ""
    dots: bool = False
    shape: str = ""  # of dots, as in Lines
    shapes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Spans(Drawing):
    """Spans over time from _begin to _end, in a lane for each name of a column.

    above: how many rows a lane has above it; _above is the row of a span, 1 for the uppermost, 0
    for the lane itself.
    """

    x: Axis
    lane: str
    above: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Matrix(Drawing):
    """A cell for each pair of names of two columns, with a colour and a _text.

    color: a column of names; empty: the heat of the numbers _value. ends: the order of the columns,
    and of the rows if they have the same names; empty: as in the data. unit: of the numbers.
    domain: the palest and the darkest; None: from 0 (of orders of magnitude, from the least) to the
    most.
    """

    column: str
    row: str
    titles: tuple[str | None, str | None] = (None, None)  # of columns and rows
    color: str = ""
    ends: tuple[str, ...] = ()
    unit: str = ""
    domain: tuple[float, float] | None = None

    @property
    def shown(self) -> Rows:
        """Return the texts with a column for each name; what is marked says so."""
        heading, rows = self.titles[1] or self.row, dict[Any, dict[str, Any]]()
        names = self.ends or tuple(dict.fromkeys(cell[self.column] for cell in self.data))
        for cell in self.data:
            text = f"{cell['_text']} {cell['_marked']}".strip()
            rows.setdefault(cell[self.row], {})[cell[self.column]] = text
        order = self.ends if set(rows) <= set(self.ends) else rows
        return [
            {heading: row, **{name: rows.get(row, {}).get(name) for name in names}} for row in order
        ]


def draw_heat(cells: Rows, unit: str, **look: Any) -> Matrix:
    """Return a heat map of numbers, which are written into the cells.

    cells: _value, _marked, columns of the names, and others, which the tooltip shows. look: of
    Matrix.
    """
    texts = [f"{cell['_value']:g}" for cell in cells]
    data = [{**cell, "_text": text, unit: text} for cell, text in zip(cells, texts, strict=True)]
    return Matrix(data=data, unit=unit, **look)


def draw_pairs(cells: Rows, ends: Sequence[str], kind: str, unit: str) -> Matrix:
    """Return a heat map with a row for each sender and a column for each receiver.

    cells: "from" and "to", which are names in `ends`, and as in `draw_heat`. kind: what the ends
    are, "rank" or "host".
    """
    titles = (f"to {kind}", f"from {kind}")
    return draw_heat(cells, unit, column="to", row="from", titles=titles, ends=tuple(ends))
