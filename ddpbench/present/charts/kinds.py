"""Content of a chart: one of four kinds, its data and its axes. `draw` turns it into Vega-Lite.

`data` has a row for each point, bar, span or cell. Tooltips and the table below the chart show its
columns under their names, except those that begin with "_". These are drawn:

- _x, _y, or _begin, _end: the place, in base units
- _low, _high: ends of an interval, on the axis of values; NaN: unknown
- _reference: a value to compare with, on the same axis
- _pale: bool, a mark that counts less than the others
- _marked: str, outlined if it is not empty
- _text: str, written beside the mark or into the cell

If there is a column "backend", readers can hide the rows of a backend. Columns "run" and "launch"
keep the lines of different runs and launches apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]
ROOMY = 12  # columns of a matrix whose cells have room for a text


@dataclass(frozen=True)
class Axis:
    """An axis of numbers in base units."""

    title: str | None
    labels: str  # the expression of `theme` that formats a value
    log: bool = False
    zero: bool = False  # whether the axis always includes 0
    domain: tuple[float, float] | None = None  # values beyond are cut off


@dataclass(frozen=True, eq=False, kw_only=True)
class Drawing:
    """Fields of every kind of chart."""

    data: Rows
    color: str = "backend"  # a column of names; "": one colour
    # All names that can occur, so that each has one colour everywhere; empty: those in the data.
    order: tuple[str, ...] = ()

    @property
    def shown(self) -> Rows:
        """Return the rows of the table below the chart."""
        return self.data


@dataclass(frozen=True, eq=False, kw_only=True)
class Lines(Drawing):
    """Values _y over _x: lines, points or areas."""

    x: Axis
    y: Axis
    dash: str = ""  # a column whose names have dashes
    connected: bool = True
    stacked: bool = False  # areas on top of each other
    rules: Rows = ()  # vertical lines: _x, _label, its pixels _row from the top, and the tooltip
    height: int = 260  # pixels


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars(Drawing):
    """Horizontal bars from _begin to _end, or dots at _end, in a row for each name of a column.

    Without _begin, the bars of a row are stacked. _band_low and _band_high shade a row.
    """

    x: Axis
    row: str
    within: str = ""  # a column that divides each row
    dots: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Spans(Drawing):
    """Spans over time from _begin to _end, in a lane for each name of a column.

    The column _above is the row of a span: 1 for the uppermost, 0 for the lane itself.
    """

    x: Axis
    lane: str
    above: int = 0  # rows above each lane


@dataclass(frozen=True, eq=False, kw_only=True)
class Matrix(Drawing):
    """A cell for each pair of names of two columns, with a colour and a _text.

    Without `color`, the numbers _value give the heat.
    """

    column: str
    row: str
    color: str = ""
    titles: tuple[str | None, str | None] = (None, None)  # of columns and rows
    # The order of the columns, and of the rows if they have the same names; empty: as in the data.
    ends: tuple[str, ...] = ()
    unit: str = ""  # of the numbers
    # The palest and the darkest number; None: from 0 to the largest, or from the least if the
    # numbers span orders of magnitude.
    domain: tuple[float, float] | None = None

    @property
    def shown(self) -> Rows:
        """Return the texts with a column for each name, and the marks beside them."""
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
    """Return a heat map that states each number in its cell.

    cells: _value, _marked, columns of the names, and others for the tooltip. look: of Matrix.
    """
    texts = [f"{cell['_value']:g}" for cell in cells]
    data = [{**cell, "_text": text, unit: text} for cell, text in zip(cells, texts, strict=True)]
    return Matrix(data=data, unit=unit, **look)


def draw_pairs(cells: Rows, ends: Sequence[str], kind: str, unit: str) -> Matrix:
    """Return a heat map with a row for each sender and a column for each receiver.

    cells: "from" and "to", which are names in `ends`, and as in `draw_heat`. kind: "rank" or
    "host".
    """
    titles = (f"to {kind}", f"from {kind}")
    return draw_heat(cells, unit, column="to", row="from", titles=titles, ends=tuple(ends))
