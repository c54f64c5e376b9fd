"""Content of a chart: one of four kinds, its data and its axes. `draw` turns it into Vega-Lite.

`data` has a row for each point, bar, span or cell. Tooltips and the table below the chart show its
columns under their names, except those that begin with "_". These are drawn:

- _x, _y, or _begin, _end: the place, in base units
- _low, _high: ends of an interval, on the axis of values; NaN: unknown
- _reference: a value to compare with, on the same axis
- _pale: bool, a bar or span that counts less than the others
- _marked: str, a point or cell that is outlined if it is not empty
- _text: str, written beside the bar or into the cell

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
    """Values _y over _x: lines or areas."""

    x: Axis
    y: Axis
    dash: str = ""  # a column whose names have dashes
    stacked: bool = False  # areas on top of each other
    rules: Rows = ()  # vertical lines: _x, _label, its pixels _row from the top, and the tooltip


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars(Drawing):
    """Horizontal bars from _begin to _end, in a row for each name of a column.

    Without _begin, the bars of a row are stacked.
    """

    x: Axis
    row: str
    within: str = ""  # a column that divides each row


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
    """A heat map with a cell for each pair of names of the columns "from" and "to".

    The numbers _value give the heat.
    """

    titles: tuple[str, str]  # of rows and columns
    ends: tuple[str, ...]  # the names, in order
    unit: str  # of the numbers

    @property
    def shown(self) -> Rows:
        """Return the texts with a column for each receiver, and the marks beside them."""
        rows: dict[str, dict[str, Any]] = {end: {} for end in self.ends}
        for cell in self.data:
            rows[cell["from"]][cell["to"]] = f"{cell['_text']} {cell['_marked']}".strip()
        return [
            {self.titles[0]: end, **{to: cells.get(to) for to in self.ends}}
            for end, cells in rows.items()
        ]


def draw_pairs(cells: Rows, ends: Sequence[str], kind: str, unit: str) -> Matrix:
    """Return a heat map that states each number in its cell.

    cells: "from", "to", _value, _marked, and others for the tooltip. kind: "rank" or "host".
    """
    texts = [f"{cell['_value']:g}" for cell in cells]
    data = [{**cell, "_text": text, unit: text} for cell, text in zip(cells, texts, strict=True)]
    titles = (f"from {kind}", f"to {kind}")
    return Matrix(data=data, unit=unit, titles=titles, ends=tuple(ends), color="")
