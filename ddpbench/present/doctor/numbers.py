"""Numbers of a stored table as points: a chart for each unit, whatever the examination is."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Bars, Drawing, Lines
from ddpbench.present.columns import digits
from ddpbench.present.document import NO_VALUES, Chart, plain_name
from ddpbench.records.table import Table


def draw_numbers(name: str, table: Table, marked: Collection[int]) -> Iterator[Chart]:
    """Yield a chart of all columns of one unit, such as "write GB/s" and "read GB/s", by rank.

    The rows are those of ranks, or of whatever the first column names. marked: ranks that findings
    name.
    """
    by_unit: dict[str, dict[int, str]] = {}  # unit → index of a column → its name
    for i, column in enumerate(table.columns[1:], 1):
        series, _, unit = column.heading.rpartition(" ")
        if series and any(isinstance(row[i], (int, float)) for row in table.rows):
            by_unit.setdefault(unit, {})[i] = series
    for number, (unit, columns) in enumerate(by_unit.items(), 1):
        chart, title = f"{plain_name(name)}-{number}", ", ".join(columns.values()).capitalize()
        drawing = _draw(table, unit, columns, marked)
        yield Chart(chart, title, f"In {unit}.", NO_VALUES, drawing)


def _draw(table: Table, unit: str, columns: dict[int, str], marked: Collection[int]) -> Drawing:
    first = table.columns[0].heading
    of_ranks = first == "rank"
    data = [
        {
            first: row[0],
            "series": series,
            unit: digits(row[i]),
            "_x": row[0],
            "_y" if of_ranks else "_end": row[i],
            "_marked": "named by a finding" if of_ranks and row[0] in marked else "",
        }
        for i, series in columns.items()
        for row in table.rows
        if row[i] is not None
    ]
    values = Axis(unit, theme.NUMBER_LABELS, zero=True)
    order = (*theme.BACKENDS, *columns.values())  # the colours of no backend
    look: dict[str, Any] = {"color": "series", "order": order, "shape": "series"}
    if not of_ranks:
        return Bars(data=data, x=values, row=first, dots=True, **look)
    ranks = [row["_x"] for row in data]
    x = Axis("rank", theme.COUNT_LABELS, domain=(min(ranks) - 0.5, max(ranks) + 0.5))
    return Lines(data=data, x=x, y=values, connected=False, **look)
