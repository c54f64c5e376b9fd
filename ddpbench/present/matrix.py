"""A matrix of ranks or hosts as a heat map: what each sends to each other one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpbench.present.charts.kinds import Matrix


def draw_matrix(
    cells: Sequence[Mapping[str, Any]], ends: Sequence[str], kind: str, unit: str
) -> Matrix:
    """Return a heat map with a row for each sender and a column for each receiver.

    cells: "from" and "to", which are names in `ends`, _value, _marked ("slow": outlined), and
    columns that the tooltip shows. kind: what the ends are, "rank" or "host".
    """
    texts = [f"{cell['_value']:g}" for cell in cells]
    return Matrix(
        data=[{**cell, "_text": text, unit: text} for cell, text in zip(cells, texts, strict=True)],
        column="to",
        row="from",
        titles=(f"to {kind}", f"from {kind}"),
        ends=tuple(ends),
        unit=unit,
    )
