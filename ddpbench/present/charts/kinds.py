"""What a chart shows: its kind, its data, its axes and its colours. `draw` makes Vega-Lite of it.

`data` has a row for each point, bar, span or cell. These columns mean the same in every kind:

- backend: readers can hide its rows
- low, high: ends of an interval, on the axis of values; NaN: unknown
- reference: what the value is compared with, on the same axis
- pale: bool, a mark that does not count as much as the others
- marked: str, outlined if it is not empty
- text: str, written beside the mark or into the cell
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

ROOMY = 12  # rows or columns of a matrix whose cells have room for a text
LOGARITHMIC = 8.0  # ratio of the largest value to the least from which heat is logarithmic
MIDDLE = 0.5  # of the heat: the ink of a text changes there
LANE, GAP = 20, 16  # pixels: height of the lowest row of a lane, and what is below it
UPPER, UPPERS = 7, 70  # pixels: most height of a row above it, and of all of them


@dataclass(frozen=True)
class Axis:
    """A column of the data along an axis.

    labels: the expression that formats a value, of `theme`. ticks: where labels stand; empty: where
    there is room. order: of values that are names; empty: as in the data.
    """

    field: str
    title: str | None = None
    labels: str = ""
    log: bool = False
    zero: bool = False  # whether 0 belongs to it in any case
    domain: tuple[float, float] | None = None  # what is shown; values beyond are cut off
    ticks: tuple[float, ...] = ()
    order: tuple[str, ...] = ()


@dataclass(frozen=True)
class Colors:
    """A column of names that have colours. order: all names that could be there, so that a name
    has one colour everywhere; empty: those of the data."""

    field: str = "backend"
    order: tuple[str, ...] = ()
    title: str | None = None


@dataclass(frozen=True)
class Heat:
    """A column of numbers that have colours, from pale to dark.

    domain: the palest and the darkest; None: from 0, or
    the least if there are orders of magnitude, to the most.
    """

    field: str
    title: str
    labels: str = "~r"
    domain: tuple[float, float] | None = None

    def place(self, values: pd.Series[float]) -> pd.Series[float]:
        """Return where each value lies between palest (0) and darkest (1)."""
        if self.log(values):
            least, most = float(values.min()), float(values.max())
            return np.log(values / least) / math.log(most / least)
        pale, dark = self.ends(values)
        return (values - pale) / ((dark - pale) or 1.0)

    def log(self, values: pd.Series[float]) -> bool:
        least = float(values.min())
        return self.domain is None and least > 0 and float(values.max()) >= LOGARITHMIC * least

    def ends(self, values: pd.Series[float]) -> tuple[float, float]:
        """Return the palest and the darkest value."""
        most = float(values.max())
        return self.domain or (float(values.min()) if self.log(values) else 0.0, most or 1.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Lines:
    """Values over x, with intervals: as lines, points or areas.

    tips: columns of a tooltip with their titles; the value, "low" and "high" are written as labels
    of the axis. dash: a column whose names have dashes. detail:
    columns that tell more lines apart. shape: a column of names, each of which `shapes` gives a
    shape of Vega. rules: vertical lines: the field of x, "label", "why". levels: horizontal lines:
    the field of y, "label", and "low", "high" of a band.
    """

    data: pd.DataFrame
    x: Axis
    y: Axis
    tips: Mapping[str, str]
    colors: Colors = Colors()
    dash: str = ""
    detail: tuple[str, ...] = ()
    shape: str = ""
    shapes: Mapping[str, str] = field(default_factory=dict)
    connected: bool = True
    stacked: bool = False  # areas on top of each other, in the order of the colours
    held: bool = False  # whether a value is that of the span since the x before
    band: bool = False  # whether intervals are a band
    # Whether the tooltip names the "text" of each colour at the x below the pointer.
    cursor: bool = False
    rules: pd.DataFrame | None = None
    levels: pd.DataFrame | None = None
    height: int = 260  # pixels

    @property
    def datasets(self) -> dict[str, pd.DataFrame]:
        more = {"rules": self.rules, "levels": self.levels}
        known = {name: frame for name, frame in more.items() if frame is not None and len(frame)}
        if not self.cursor:
            return {"data": self.data, **known}
        keys = [f"t{i}" for i in pd.factorize(self.data[self.colors.field])[0]]
        texts = self.data.assign(key=keys).pivot_table(
            "text", [self.x.field, *self.tips], "key", aggfunc="first", fill_value="-"
        )
        data = self.data.drop(columns="text")
        return {"data": data, "cursor": texts.reset_index(), **known}


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars:
    """Horizontal bars or dots in the rows of the column "row".

    A bar reaches from "begin" to the value; without that column, bars of a row are stacked. within:
    a column whose names have places of their own in a row. ticks: more values: "row", the field of
    x, and the columns of `within` and of `tick_tips`. Columns band_low and band_high shade a row.
    """

    data: pd.DataFrame
    x: Axis
    tips: Mapping[str, str]
    colors: Colors | None = Colors()
    within: str = ""
    dots: bool = False
    shape: str = ""  # of dots, as in Lines
    shapes: Mapping[str, str] = field(default_factory=dict)
    ticks: pd.DataFrame | None = None
    tick_tips: Mapping[str, str] = field(default_factory=dict)

    @property
    def datasets(self) -> dict[str, pd.DataFrame]:
        """Return the data with "begin", and with "right": where the marks of a row end."""
        place = ["row", *filter(None, [self.within])]
        data, value = self.data, self.x.field
        if not self.dots and "begin" not in data:
            ends = data.groupby(place, sort=False)[value].cumsum()
            data = data.assign(**{"begin": ends - data[value], value: ends})
        ends = [c for c in ("begin", value, "high", "reference") if c in data]
        right = data[ends].astype(float).max(axis=1)
        data = data.assign(right=right.groupby([data[c] for c in place]).transform("max"))
        if self.ticks is None or self.ticks.empty:
            return {"data": data}
        last = self.ticks.groupby(place)[value].max().rename("tick")
        data = data.join(last, on=place)
        data["right"] = data[["right", "tick"]].max(axis=1)
        return {"data": data.drop(columns="tick"), "ticks": self.ticks}


@dataclass(frozen=True, eq=False, kw_only=True)
class Spans:
    """Spans over time, from "begin" to "end", in the lanes of the column "lane".

    The column "above", if any, lifts a span above its lane: 1 is the uppermost of `above` rows, 0
    or NaN the lane itself.
    """

    data: pd.DataFrame
    x: Axis  # its field is "begin"
    tips: Mapping[str, str]
    colors: Colors
    above: int = 0

    @property
    def lanes(self) -> list[str]:
        return list(dict.fromkeys(self.data["lane"]))

    @property
    def lane_pixels(self) -> int:
        return self.upper_pixels + LANE + GAP

    @property
    def upper_pixels(self) -> int:
        """The pixels of all rows above a lane."""
        return min(UPPERS, UPPER * self.above)

    @property
    def datasets(self) -> dict[str, pd.DataFrame]:
        """Return the data with the pixels of "top" and "bottom"."""
        lanes = self.lanes
        top = self.data["lane"].map(lanes.index) * float(self.lane_pixels) + self.upper_pixels
        height = pd.Series(float(LANE), index=self.data.index)
        if self.above:
            pixels, rows = self.upper_pixels / self.above, self.data["above"].fillna(0)
            top = top.where(rows == 0, top - (self.above + 1 - rows) * pixels)
            height = height.where(rows == 0, max(1.0, pixels - 1))
        return {"data": self.data.assign(top=top, bottom=top + height)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Matrix:
    """A cell for each pair of names, with a text and a colour."""

    data: pd.DataFrame
    x: Axis
    y: Axis
    tips: Mapping[str, str]
    colors: Colors | Heat

    @property
    def datasets(self) -> dict[str, pd.DataFrame]:
        """Return the data; of heat with "dark": whether a text needs light ink."""
        if isinstance(self.colors, Colors) or not self.written:
            return {"data": self.data}
        place = self.colors.place(self.data[self.colors.field])
        return {"data": self.data.assign(dark=place > MIDDLE)}

    @property
    def written(self) -> bool:
        """Whether the cells show their texts."""
        roomy = isinstance(self.colors, Colors) or self.data[self.x.field].nunique() <= ROOMY
        return "text" in self.data and roomy


Drawing = Lines | Bars | Spans | Matrix


def list_columns(frame: pd.DataFrame) -> dict[str, tuple[Any, ...]]:
    """Return the columns of a dataset as Python's own values; None for NaN."""
    known = frame.astype(object).where(frame.notna(), None)
    return {str(name): tuple(known[name].tolist()) for name in known}
