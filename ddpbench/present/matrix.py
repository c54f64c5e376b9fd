"""A matrix of ranks or hosts as a heat map: what each sends to each other one."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ddpbench.present.charts.kinds import Matrix


def draw_matrix(cells: pd.DataFrame, ends: Sequence[str], kind: str, unit: str) -> Matrix:
    """Return a heat map with a row for each sender and a column for each receiver.

    cells: columns "from" and "to", which are names in `ends`, _value, _marked ("slow": outlined),
    and others, which the tooltip shows. kind: what the ends are, "rank" or "host".
    """
    texts = cells["_value"].map("{:g}".format)
    return Matrix(
        data=cells.assign(**{"_text": texts, unit: texts}),
        column="to",
        row="from",
        titles=(f"to {kind}", f"from {kind}"),
        ends=tuple(ends),
        unit=unit,
    )
