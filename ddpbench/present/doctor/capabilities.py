"""Capabilities of each backend: operations by dtypes, a symbol and a colour for each outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.present import theme
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
ROW, LABELS = 20, 150  # pixels: height of a row, width of its label


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
    reasons = " Hover over a cell to see the reason." if (cells["why"] != "").any() else ""
    title = f"What {one.examination.backend} can do"
    return Chart(
        name,
        title,
        f"Each operation with each dtype, tried in processes of its own.{reasons}",
        _draw(cells),
        table,
    )


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
                "column": column.heading,
                "outcome": OUTCOMES[outcome],
                "symbol": OUTCOMES[outcome][0],
                "why": why.get(key, ""),
            }


def _draw(cells: pd.DataFrame) -> dict[str, Any]:
    shown = [name for name in OUTCOMES.values() if name in set(cells["outcome"])]
    colors = alt.Scale(domain=list(OUTCOMES.values()), range="category")
    calls, dtypes = (list(dict.fromkeys(cells[name])) for name in ("call", "column"))
    base = alt.Chart(cells).encode(
        x=alt.X("column:N", title="dtype", sort=dtypes, axis=alt.Axis(labelAngle=-40)),
        y=alt.Y("call:N", title=None, sort=calls, axis=alt.Axis(labelLimit=LABELS)),
        tooltip=theme.tips("call", "reduce op", "dtype", "outcome", "why"),
    )
    # Pale, so that the symbols are readable on all colours.
    heat = base.mark_rect(opacity=0.35).encode(
        color=alt.Color("outcome:N", title=None, scale=colors, legend=alt.Legend(values=shown))
    )
    symbols = base.mark_text().encode(text="symbol:N")
    return theme.layered([heat, symbols], ROW * len(calls))
