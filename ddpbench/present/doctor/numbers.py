"""Numbers of a stored table as points: a chart for each unit, whatever the examination is."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import pandas as pd

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Drawing, Lines
from ddpbench.present.columns import digits
from ddpbench.present.document import NO_VALUES, Chart, plain_name
from ddpbench.records.table import Table

SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")


def draw_numbers(name: str, table: Table, marked: Collection[int]) -> Iterator[Chart]:
    """Yield a chart of all columns of one unit, such as "write GB/s" and "read GB/s", by rank.

    The rows are those of ranks, or of whatever the first column names. marked: ranks that findings
    name.
    """
    by_unit: dict[str, list[int]] = {}
    for i, column in enumerate(table.columns[1:], 1):
        words = column.heading.rpartition(" ")
        if words[0] and any(isinstance(row[i], (int, float)) for row in table.rows):
            by_unit.setdefault(words[2], []).append(i)
    for number, (unit, columns) in enumerate(by_unit.items(), 1):
        named = [table.columns[i].heading.rpartition(" ")[0] for i in columns]
        chart = f"{plain_name(name)}-{number}"
        title, caption = f"{', '.join(named)}".capitalize(), f"In {unit}."
        draw = partial(_draw, table, unit, columns, marked)
        yield Chart(chart, title, caption, NO_VALUES, draw)


def _draw(table: Table, unit: str, columns: list[int], marked: Collection[int]) -> Drawing:
    first = table.columns[0].heading
    of_ranks = first == "rank"
    data = pd.DataFrame(
        [
            {
                first: row[0],
                "series": table.columns[i].heading.rpartition(" ")[0],
                unit: digits(row[i]),
                "_x": row[0],
                "_y" if of_ranks else "_end": row[i],
                "_marked": "named by a finding" if of_ranks and row[0] in marked else "",
            }
            for i in columns
            for row in table.rows
            if row[i] is not None
        ]
    )
    values = Axis(unit, theme.NUMBER_LABELS, zero=True)
    order = (*theme.BACKENDS, *data["series"].unique())  # the colours of no backend
    look: dict[str, Any] = {
        "color": "series",
        "order": order,
        "shape": "series",
        "shapes": dict(zip(order, cycle(SHAPES), strict=False)),
    }
    if not of_ranks:
        return Bars(data=data, x=values, row=first, dots=True, **look)
    x = Axis("rank", theme.COUNT_LABELS, domain=(data["_x"].min() - 0.5, data["_x"].max() + 0.5))
    return Lines(data=data, x=x, y=values, connected=False, **look)
