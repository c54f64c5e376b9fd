"""Capabilities of each backend: operations by dtypes, a symbol and a colour for each outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import pandas as pd

from ddpbench.present.charts.kinds import Matrix
from ddpbench.present.doctor.section import Examined, find_examinations
from ddpbench.present.document import Chart, ReportRun
from ddpbench.records.schema import Examination
from ddpbench.records.table import Table

# cell of the doctor's table → symbol and meaning, in the order of the category range of colours:
# blue works, vermilion is wrong, grey is not supported; no backend has a colour here.
OUTCOMES = {
    "ok": "✓ works",
    "WRONG": "W wrong result",
    "HANG": "H hangs",
    "": "",
    "CRASH": "C crashes",
    "?": "? not tried",
    " ": " ",
    "–": "– not supported",
}


def draw(run: ReportRun) -> Iterator[Chart]:
    """Yield the charts of a run."""
    seen: set[tuple[str, Table]] = set()
    for one in find_examinations([run], "capabilities"):
        for table in one.examination.tables:
            key = (one.examination.backend, table)
            if key in seen:  # as in an earlier launch
                continue
            seen.add(key)
            name = f"capabilities-{len(seen)}"
            calls = table.columns[0].heading == "operation"
            yield _chart(one, table, name) if calls else Chart(name, table.title, "", None, table)


def _chart(one: Examined, table: Table, name: str) -> Chart:
    cells = pd.DataFrame(_cells(one.examination, table))
    caption = "Each operation with each dtype, tried in processes of its own."
    if any(cells["why"]):
        caption += " Hover over a cell to see the reason."
    drawing = Matrix(
        data=cells,
        column="_column",
        row="call",
        titles=("dtype", None),
        color="outcome",
        order=tuple(OUTCOMES.values()),
    )
    return Chart(name, f"What {one.examination.backend} can do", caption, drawing, table)


def _cells(examination: Examination, table: Table) -> Iterator[dict[str, str]]:
    """Yield the cells of the doctor's table, whose rows share their operation with rows above."""
    verdicts: Sequence[Mapping[str, Any]] = examination.figures.get("verdicts", ())
    dtypes = list(dict.fromkeys(each["dtype"] for each in verdicts if each["dtype"]))
    why = {(v["operation"], v["form"], v["dtype"], v["reduce_op"]): v["why"] for v in verdicts}
    names: list[str] = list(
        accumulate((row[0] for row in table.rows), lambda above, own: own or above)
    )
    for name, (_, ops, *outcomes) in zip(names, table.rows, strict=True):
        operation, form = name.removesuffix(" (list)"), "list" if "(list)" in name else "tensor"
        for column, dtype, outcome in zip(table.columns[2:], dtypes, outcomes, strict=False):
            key = (operation, form, dtype, (ops or "").split(" ")[0] or None)
            yield {
                "call": f"{name} {ops}" if names.count(name) > 1 else name,
                "reduce op": ops,
                "dtype": dtype,
                "_column": column.heading,
                "outcome": OUTCOMES[outcome],
                "_text": OUTCOMES[outcome][0],
                "why": why.get(key, ""),
            }
