"""A matrix of ranks or hosts as a heat map: what each sends to each other one."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ddpbench.present.charts.kinds import Axis, Heat, Matrix
from ddpbench.present.document import make_table
from ddpbench.records.table import Table


def draw_matrix(cells: pd.DataFrame, ends: Sequence[str], kind: str, unit: str) -> Matrix:
    """Return a heat map with a row for each sender and a column for each receiver.

    cells: columns "from" and "to", which are names in `ends`, "value", "marked" ("slow": outlined),
    and others, which the tooltip shows under their names.
    kind: what the ends are, "rank" or "host". unit: of the values.
    """
    order = tuple(ends)
    others = [name for name in map(str, cells) if name not in ("from", "to", "value", "marked")]
    return Matrix(
        data=cells.assign(text=cells["value"].map("{:g}".format)),
        x=Axis("to", f"to {kind}", order=order),
        y=Axis("from", f"from {kind}", order=order),
        tips={"from": "from", "to": "to", "text": unit, **{name: name for name in others}},
        colors=Heat("value", unit),
    )


def build_matrix(cells: pd.DataFrame, ends: Sequence[str], kind: str, unit: str) -> Table:
    """Return the values of `draw_matrix` as a table; a slow one is marked by "slow"."""
    columns = (cells[name] for name in ("from", "to", "value", "marked"))
    values = {
        (a, b): f"{value:g} {mark}" if mark else value
        for a, b, value, mark in zip(*columns, strict=True)
    }
    sender = f"from {kind}"
    rows = [(end, *(values.get((end, other)) for other in ends)) for end in ends]
    return make_table(f"{unit}; each row sends to the columns", [sender, *ends], rows, (sender,))
