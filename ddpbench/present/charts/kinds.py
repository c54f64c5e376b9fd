"""What a chart shows: one of four kinds, its data and its axes. `draw` makes Vega-Lite of it.

`data` has a row for each point, bar, span or cell. Columns are shown in tooltips and in the table
below the chart, under their names, unless they begin with "_". Those are what is drawn:

- _x, _y, or _begin, _end: the place, in base units
- _low, _high: ends of an interval, on the axis of values; NaN: unknown
- _reference: what the value is compared with, on the same axis
- _pale: bool, a mark that does not count as much as the others
- _marked: str, outlined if it is not empty
- _text: str, written beside the mark or into the cell

Readers can hide the rows of a backend, if there is a column "backend".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

ROOMY = 12  # columns of a matrix whose cells have room for a text
LOGARITHMIC = 8.0  # ratio of the largest value to the least from which heat is logarithmic
MIDDLE = 0.5  # of the heat: the ink of a text changes there
LANE, GAP = 20, 16  # pixels: height of the lowest row of a lane, and what is below it
UPPER, UPPERS = 7, 70  # pixels: most height of a row above it, and of all of them


@dataclass(frozen=True)
class Axis:
    """labels: the expression that formats a value, of `theme`. zero: whether 0 is shown in any
    case. domain: what is shown; values beyond are cut off. ticks: where labels are; empty: few."""

    title: str | None
    labels: str
    log: bool = False
    zero: bool = False
    domain: tuple[float, float] | None = None
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Drawing:
    """data: as above. color: a column of names; empty: one colour. order: all names that could be
    there, so that each has one colour everywhere; empty: those of the data."""

    data: pd.DataFrame
    color: str = "backend"
    order: tuple[str, ...] = ()

    @property
    def datasets(self) -> dict[str, pd.DataFrame]:
        """Return what is drawn: "data", and other datasets."""
        return {"data": self.data}

    @property
    def shown(self) -> pd.DataFrame:
        """Return the columns of the table."""
        shown: pd.DataFrame = self.data[visible(self.data)]
        return shown


@dataclass(frozen=True, eq=False, kw_only=True)
class Lines(Drawing):
    """Values _y over _x: lines, points or areas.

    numbers: what is drawn and written in the tooltip like a label of y, with its title. dash: a
    column whose names have dashes. detail: columns that tell more lines apart. shape: a
    column of names, each of which `shapes` gives a shape of Vega. rules: vertical lines: _x,
    _label, its pixels _row from the top, _left of the line or not. levels: horizontal lines: _y,
    _label, and the band from _low to _high.
    """

    x: Axis
    y: Axis
    numbers: Mapping[str, str] = field(default_factory=dict)
    dash: str = ""
    detail: tuple[str, ...] = ()
    shape: str = ""
    shapes: Mapping[str, str] = field(default_factory=dict)
    connected: bool = True
    stacked: bool = False  # areas on top of each other
    held: bool = False  # whether a value is that of the span since the _x before
    band: bool = False  # whether intervals are a band
    # Whether the tooltip has the _text of every colour at the _x below the pointer; so has the
    # table. All other columns depend on _x alone.
    cursor: bool = False
    rules: pd.DataFrame | None = None
    levels: pd.DataFrame | None = None
    height: int = 260  # pixels

    @cached_property
    def datasets(self) -> dict[str, pd.DataFrame]:
        more = {"rules": self.rules, "levels": self.levels}
        known = {name: frame for name, frame in more.items() if frame is not None and len(frame)}
        if not self.cursor:
            return {"data": self.data, **known}
        shared = [name for name in visible(self.data) if name != self.color]
        # Names of columns may not be names of the data, which may be anything.
        keys = "t" + pd.Series(pd.factorize(self.data[self.color])[0], self.data.index).astype(str)
        wide = self.data.assign(key=keys).pivot_table(
            "_text", ["_x", *shared], "key", aggfunc="first", fill_value="-"
        )
        drawn = self.data[[name for name in self.data if name not in (*shared, "_text")]]
        return {"data": drawn, "cursor": wide.reset_index(), **known}

    @property
    def titles(self) -> dict[str, str]:
        """Return the names of the columns of the dataset "cursor"."""
        return {f"t{i}": str(name) for i, name in enumerate(self.data[self.color].unique())}

    @property
    def shown(self) -> pd.DataFrame:
        if not self.cursor:
            return super().shown
        wide = self.datasets["cursor"]
        shown: pd.DataFrame = wide[visible(wide)].rename(columns=self.titles)
        return shown


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars(Drawing):
    """Horizontal bars from _begin to _end, or dots at _end, in a row for each name of a column.

    Without _begin, the bars of a row are stacked. within: a column whose names have places of their
    own in a row. ticks: more values of _end. _band_low and _band_high shade a row.
    """

    x: Axis
    row: str
    within: str = ""
    dots: bool = False
    shape: str = ""  # of dots, as in Lines
    shapes: Mapping[str, str] = field(default_factory=dict)
    ticks: pd.DataFrame | None = None

    @cached_property
    def datasets(self) -> dict[str, pd.DataFrame]:
        """Return the data with _begin, and _right, where the marks of a row end; and "ticks"."""
        place = [self.row, *filter(None, [self.within])]
        data = self.data
        if not self.dots and "_begin" not in data:
            ends = data.groupby(place, sort=False)["_end"].cumsum()
            data = data.assign(_begin=ends - data["_end"], _end=ends)
        ends = data[[c for c in ("_begin", "_end", "_high", "_reference") if c in data]]
        marks = data[place].assign(_right=ends.astype(float).max(axis=1))
        if self.ticks is None or self.ticks.empty:
            ticks = {}
        else:
            ticks = {"ticks": self.ticks}
            marks = pd.concat(
                [marks, self.ticks[[*place, "_end"]].rename(columns={"_end": "_right"})]
            )
        right = marks.groupby(place)["_right"].max()
        return {"data": data.join(right, on=place), **ticks}


@dataclass(frozen=True, eq=False, kw_only=True)
class Spans(Drawing):
    """Spans over time from _begin to _end, in a lane for each name of a column.

    above: how many rows a lane has above it; _above is the row of a span, 1 for the uppermost, 0
    for the lane itself.
    """

    x: Axis
    lane: str
    above: int = 0

    @property
    def lane_pixels(self) -> int:
        return self.upper_pixels + LANE + GAP

    @property
    def upper_pixels(self) -> int:
        """The pixels of all rows above a lane."""
        return min(UPPERS, UPPER * self.above)

    @cached_property
    def datasets(self) -> dict[str, pd.DataFrame]:
        """Return the data with the pixels of _top and _bottom."""
        lane = pd.factorize(self.data[self.lane])[0]
        top = pd.Series(lane * float(self.lane_pixels) + self.upper_pixels, self.data.index)
        height = pd.Series(float(LANE), self.data.index)
        if self.above:
            row, pixels = self.data["_above"], self.upper_pixels / self.above
            top = top.where(row == 0, top - (self.above + 1 - row) * pixels)
            height = height.where(row == 0, max(1.0, pixels - 1))
        return {"data": self.data.assign(_top=top, _bottom=top + height)}


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
    def log(self) -> bool:
        values = self.data["_value"]
        return self.domain is None and 0 < LOGARITHMIC * values.min() <= values.max()

    @property
    def heat(self) -> tuple[float, float]:
        """Return the palest and the darkest number."""
        values = self.data["_value"]
        return self.domain or (float(values.min()) if self.log else 0.0, float(values.max()) or 1.0)

    @property
    def written(self) -> bool:
        """Whether the cells show their texts."""
        return "_text" in self.data and bool(
            self.color or self.data[self.column].nunique() <= ROOMY
        )

    @cached_property
    def datasets(self) -> dict[str, pd.DataFrame]:
        """Return the data; of heat with _dark: whether a text needs light ink."""
        if self.color or not self.written:
            return {"data": self.data}
        (pale, dark), values = self.heat, self.data["_value"]
        if self.log:
            place = np.log(values / pale) / math.log(dark / pale)
        else:
            place = (values - pale) / (dark - pale)
        return {"data": self.data.assign(_dark=place > MIDDLE)}

    @property
    def shown(self) -> pd.DataFrame:
        """Return the texts with a column for each name; what is marked says so."""
        texts = self.data["_text"].str.cat(self.data["_marked"], " ").str.strip()
        wide = self.data.assign(_text=texts).pivot(
            index=self.row, columns=self.column, values="_text"
        )
        columns = self.ends or self.data[self.column].unique()
        rows = self.ends if set(wide.index) <= set(self.ends) else self.data[self.row].unique()
        wide = wide.reindex(index=list(rows), columns=list(columns)).reset_index()
        shown: pd.DataFrame = wide.rename(columns={self.row: self.titles[1] or self.row})
        return shown


def visible(frame: pd.DataFrame) -> list[str]:
    """Return the columns that readers see."""
    return [name for name in map(str, frame) if not name.startswith("_")]


def list_columns(frame: pd.DataFrame) -> dict[str, tuple[Any, ...]]:
    """Return the columns of a dataset as Python's own values; None for NaN."""
    columns = {str(name): frame[name].tolist() for name in frame}
    return {
        name: tuple(None if value != value else value for value in values)
        for name, values in columns.items()
    }
