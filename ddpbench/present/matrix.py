"""A matrix of ranks or hosts as a heat map: what each sends to each other one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from ddpbench.present import theme
from ddpbench.present.document import make_table
from ddpbench.records.table import Table

MOST_VALUES = 12  # ends of a matrix whose cells show their values
ROOMY = 8  # ends whose values have room on a phone in the usual size
LOGARITHMIC = 8.0  # ratio of the largest value to the least from which colours are logarithmic
MIDDLE = 0.5  # of the colours: the ink of a value changes there
PHONE, CHARACTER = 280, 7  # pixels: width of all columns on a phone, width of a character
ROW, LEAST_HEIGHT, HEIGHT = 30, 90, 340  # pixels
OWN_COLUMNS = ("value", "slow", "beyond")  # the tooltip shows all others as they are


def draw_matrix(cells: pd.DataFrame, ends: Sequence[str], kind: str, unit: str) -> dict[str, Any]:
    """Return a heat map with a row for each sender and a column for each receiver.

    cells: columns "from" and "to", which are names in `ends`, "value", "slow" (bool: outlined), and
    others, which the tooltip shows under their names.
    kind: what the ends are, "rank" or "host". unit: of the values.
    """
    share, scale = _colors(cells["value"])
    cells = cells.assign(beyond=share > MIDDLE)
    others = [name for name in map(str, cells) if name not in OWN_COLUMNS]
    scale_of_ends, overlapping = alt.Scale(domain=list(ends)), alt.Axis(labelOverlap=True)
    base = alt.Chart(cells).encode(
        x=alt.X("to:N", title=f"to {kind}", axis=_labels(ends), scale=scale_of_ends),
        y=alt.Y("from:N", title=f"from {kind}", axis=overlapping, scale=scale_of_ends),
        tooltip=[*theme.tips(*others[:2], value=unit), *theme.tips(*others[2:])],
    )
    layers = [base.mark_rect().encode(color=alt.Color("value:Q", title=unit, scale=scale))]
    small = len(ends) <= MOST_VALUES
    if small:
        layers += write_values(base, "value", 11 if len(ends) <= ROOMY else 9)
    if cells["slow"].any():
        outline = base.mark_rect(style="marked", strokeWidth=2.5 if small else 1)
        layers.append(outline.transform_filter("datum.slow"))
    return theme.layered(layers, min(HEIGHT, max(LEAST_HEIGHT, ROW * len(ends))))


def write_values(base: alt.Chart, field: str, size: int = 11) -> list[alt.Chart]:
    """Return the text of each cell, in the ink that can be read on its colour.

    base: its data have a bool "beyond": whether the colour is one of the upper half. size: pixels.
    """
    inks = (("on-low", "!datum.beyond"), ("on-high", "datum.beyond"))
    return [
        base.mark_text(style=style, fontSize=size)
        .encode(text=f"{field}:N")
        .transform_filter(chosen)
        for style, chosen in inks
    ]


def build_matrix(cells: pd.DataFrame, ends: Sequence[str], kind: str, unit: str) -> Table:
    """Return the values of `draw_matrix` as a table; a slow one is marked by "slow"."""
    values = {
        (a, b): f"{value:g} slow" if slow else value
        for a, b, value, slow in zip(
            *(cells[c] for c in ("from", "to", "value", "slow")), strict=True
        )
    }
    sender = f"from {kind}"
    rows = [(end, *(values.get((end, other)) for other in ends)) for end in ends]
    return make_table(f"{unit}; each row sends to the columns", [sender, *ends], rows, (sender,))


def _colors(values: pd.Series[float]) -> tuple[pd.Series[float], alt.Scale]:
    """Return where each value lies in the range of colours, 0 to 1, and their scale."""
    least, most = float(values.min()), float(values.max())
    if least > 0 and most / least >= LOGARITHMIC:
        scale = alt.Scale(type="log", domain=[least, most])
        return np.log(values / least) / math.log(most / least), scale
    return values / (most or 1.0), alt.Scale(domain=[0, most])


def _labels(ends: Sequence[str]) -> alt.Axis:
    level = len(ends) > MOST_VALUES or max(map(len, ends)) * len(ends) * CHARACTER < PHONE
    return alt.Axis(
        labelAngle=0 if level else -40, labelOverlap=True, labelSeparation=6, labelLimit=120
    )
