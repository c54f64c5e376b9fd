"""Time and bandwidth of every operation over message sizes: backends and runs in one chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.analysis.lines import Line, lines
from ddpbench.catalog.sizes import readable
from ddpbench.records.table import Table, TableColumn
from ddpbench.report import theme
from ddpbench.report.chart import Chart, ReportRun, Section


def section(runs: Sequence[ReportRun]) -> Section | None:
    """Return the charts of all operations; None if no run measured any."""
    rows = [
        _charts(kind, list(group))
        for kind, group in groupby(sorted(_points(runs), key=_kind), key=_kind)
    ]
    if not rows:
        return None
    return Section("collectives", "Collectives", rows=tuple(rows))


def _points(runs: Sequence[ReportRun]) -> Iterator[tuple[ReportRun, Line]]:
    for run in runs:
        for line in lines(run.run):
            if line.seconds is not None:
                yield run, line


def _kind(point: tuple[ReportRun, Line]) -> tuple[str, ...]:
    case = point[1].case
    return case.called, case.dtype, case.reduce_op or ""


def _charts(kind: tuple[str, ...], points: Sequence[tuple[ReportRun, Line]]) -> tuple[Chart, ...]:
    data = pd.DataFrame([_row(run, line) for run, line in points])
    title = " ".join(part for part in kind if part)
    time = (
        alt.Chart(data)
        .mark_line(point=True)
        .encode(
            x=theme.size_axis(),
            y=alt.Y(
                "seconds:Q",
                title="time of a call",
                scale=alt.Scale(type="log"),
                axis=alt.Axis(labelExpr=theme.TIME_LABELS),
            ),
            color=alt.Color("backend:N", scale=theme.backend_colors(list(data["backend"]))),
        )
    )
    table = Table(
        title,
        (TableColumn("size"), TableColumn("backend", "left"), TableColumn("time µs")),
        tuple(
            (readable(line.case.nbytes), line.case.backend, (line.seconds or 0) * 1e6)
            for _, line in points
        ),
    )
    name = "-".join(part for part in kind if part)
    caption = "Median time of a call on the slowest rank; both axes are logarithmic."
    return (Chart(f"{name}-time", title, caption, time.to_dict(), table, operation=kind[0]),)


def _row(run: ReportRun, line: Line) -> dict[str, Any]:
    return {
        "nbytes": line.case.nbytes,
        "seconds": line.seconds,
        "backend": line.case.backend,
        "run": run.label,
    }
