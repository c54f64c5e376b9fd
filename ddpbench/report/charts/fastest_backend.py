"""The fastest backend for each operation and size, and how much longer the next one takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.analysis.flags import find_fastest
from ddpbench.analysis.lines import Line
from ddpbench.catalog.sizes import readable
from ddpbench.records.table import Table, TableColumn
from ddpbench.render.collective_columns import COLUMNS
from ddpbench.render.column import title_parts
from ddpbench.report import theme
from ddpbench.report.case_titles import titles
from ddpbench.report.chart import Chart, ReportRun

CAPTION = (
    "Colour: the backend whose 95 % interval lies below those of all others. Number: how many "
    "times as long the next backend takes. Empty: not measured, or none is clearly the fastest."
)


def fastest_charts(run: ReportRun) -> list[Chart]:
    """Return a chart of operations and sizes; none unless several backends share them."""
    rows = list(_cells(run))
    if not any(row["backend"] for row in rows) or len({row["nbytes"] for row in rows}) < 2:
        return []
    headings = ("operation", "size", "fastest", "times as long", "median times in µs")
    table = Table(
        "Fastest backend",
        tuple(TableColumn(heading, "left") for heading in headings),
        tuple(
            (row["operation"], row["size"], row["backend"] or "-", row["ratio"], row["times"])
            for row in rows
        ),
    )
    data = pd.DataFrame(row for row in rows if row["backend"])
    return [Chart("fastest", "Fastest backend", CAPTION, _spec(data), table)]


def _cells(run: ReportRun) -> Iterator[dict[str, Any]]:
    """Yield a cell for each operation and size that several backends measured."""
    known = [line for line in run.lines if line.seconds and line.case.nbytes]
    short = titles(title_parts(line.case) for line in known)
    groups: dict[tuple[str, int], list[Line]] = {}
    for line in known:
        groups.setdefault((short[title_parts(line.case)], line.case.nbytes), []).append(line)
    for (operation, nbytes), group in groups.items():
        if len({line.case.backend for line in group}) < 2:
            continue
        fastest = find_fastest(group)
        best, *others = sorted(line.seconds or 0.0 for line in group)
        yield {
            "operation": operation,
            "nbytes": nbytes,
            "size": readable(nbytes),
            "backend": fastest.case.backend if fastest else "",
            "ratio": _format_ratio(others[0] / best) if fastest else "-",
            "times": ", ".join(f"{x.case.backend} {COLUMNS['time'].show(x)}" for x in group),
        }


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


def _spec(data: pd.DataFrame) -> dict[str, Any]:
    backends = list(data["backend"])
    scale = theme.backend_colors(backends)
    present = [backend for backend in scale.domain if backend in backends]
    operations = list(dict.fromkeys(data["operation"]))
    base = alt.Chart(data).encode(
        x=theme.size_columns(),
        y=alt.Y("operation:N", title=None, sort=operations, axis=alt.Axis(ticks=False)),
    )
    cells = base.mark_rect(opacity=0.35).encode(
        color=alt.Color(
            "backend:N",
            scale=scale,
            legend=alt.Legend(title=None, values=present, symbolOpacity=1),
        ),
        tooltip=[
            alt.Tooltip("operation:N"),
            alt.Tooltip("size:N"),
            alt.Tooltip("backend:N", title="fastest"),
            alt.Tooltip("ratio:N", title="times as long"),
            alt.Tooltip("times:N", title="median µs"),
        ],
    )
    numbers = base.mark_text(fontSize=11).encode(text="ratio:N")
    height = max(60, 26 * len(operations))
    spec: dict[str, Any] = alt.layer(cells, numbers).properties(height=height).to_dict()
    return spec
