"""Guidelines of self-consistent performance: how operations compare with others that do the same.

The verdicts and the table are those of `show --guidelines`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.catalog.sizes import readable
from ddpbench.render import guideline_tables
from ddpbench.render.labels import format_change, format_time, shift_interval
from ddpbench.report import theme
from ddpbench.report.chart import (
    Chart,
    ReportRun,
    Rows,
    Section,
    join_findings,
    name_run,
    pair,
    plain_name,
)
from ddpbench.verdicts import guidelines
from ddpbench.verdicts.guidelines import HOLDS, VIOLATED, Check
from ddpbench.verdicts.verdict import INCONCLUSIVE

HEIGHT = 220
INTRO = (
    "An operation should not be slower than others that do its work, and a smaller message not "
    "slower than a larger one. A violation accuses the library."
)
CAPTION = (
    "Time of the operation over the time of the others, in pairs from one launch; bars: 95 % "
    "interval. Above the line at 1, calling the others would be faster."
)
SHAPES = {VIOLATED: "cross", HOLDS: "circle", INCONCLUSIVE: "diamond"}
RATIO_LABELS = "format(datum.value, '~g') + ' ×'"


def section(runs: Sequence[ReportRun]) -> Section | None:
    """Return the guidelines that these runs can test; None if there are none."""
    checks = {run.label: guidelines.check(run.lines) for run in runs}
    if not any(checks.values()):
        return None
    findings = join_findings(runs, lambda run: guideline_tables.findings(checks[run.label]))
    return Section("guidelines", "Guidelines", INTRO, findings=tuple(findings), rows=_rows(checks))


def _rows(checks: Mapping[str, Sequence[Check]]) -> Rows:
    """Return the charts of each run, two in a row, and its table."""
    rows: list[tuple[Chart, ...]] = []
    for number, (label, found) in enumerate(checks.items(), 1):
        charts = list(_charts(found))
        if len(checks) > 1:
            charts = name_run(charts, number, label)
        rows += [*pair(charts[:-1]), *pair(charts[-1:])]
    return tuple(rows)


def _charts(checks: Sequence[Check]) -> Iterator[Chart]:
    groups: dict[str, list[Check]] = {}
    for one in checks:
        if not one.monotone and one.shift and one.line.case.nbytes:
            groups.setdefault(one.label, []).append(one)
    for label, group in groups.items():
        if len({one.line.case.nbytes for one in group}) > 1:
            name = f"guideline-{plain_name(label)}"
            table = guideline_tables.table(group)
            operation = group[0].line.case.operation
            yield Chart(name, label, CAPTION, _draw(group), table, operation)
    if checks:
        yield Chart("guidelines", "All guidelines", "", None, guideline_tables.table(checks))


def _draw(checks: Sequence[Check]) -> dict[str, Any]:
    data = pd.DataFrame([_row(one) for one in checks])
    backends, sizes = sorted(set(data["backend"])), data["nbytes"]
    ends = [*data["low"], *data["high"], 1.0]
    present = [name for name in SHAPES if name in set(data["verdict"])]
    shapes = alt.Scale(domain=present, range=[SHAPES[name] for name in present])
    tips = ("backend", "size", "time", "at most", "change", "95 %", "verdict")
    base = theme.choose_backends(
        alt.Chart(data).encode(
            x=theme.size_axis(sizes),
            color=theme.backend_color(backends),
            tooltip=[alt.Tooltip(f"{name}:N") for name in tips],
        ),
        backends,
    )
    title = f"{checks[0].line.case.operation} over {checks[0].instead}"
    axis = theme.log_axis("low:Q", title, ends, RATIO_LABELS).scale(
        type="log", domain=theme.extent(theme.powers_of_ten(ends))
    )
    bars = base.mark_rule(opacity=0.55, strokeWidth=2).encode(y=axis, y2="high:Q")
    points = base.mark_point(size=60, opacity=1).encode(
        y="ratio:Q", shape=alt.Shape("verdict:N", scale=shapes, legend=alt.Legend(title=None))
    )
    one = alt.Chart(pd.DataFrame([{"one": 1.0}])).mark_rule(strokeDash=[4, 3])
    chart = alt.layer(one.encode(y="one:Q"), bars, points)
    spec: dict[str, Any] = chart.properties(height=HEIGHT).to_dict()
    return spec


def _row(one: Check) -> dict[str, Any]:
    assert one.shift is not None
    case = one.line.case
    ratio, low, high = (math.exp(x) for x in (one.shift.estimate, one.shift.low, one.shift.high))
    return {
        "nbytes": case.nbytes,
        "ratio": ratio,
        "low": low,
        "high": high,
        "backend": case.backend,
        "size": readable(case.nbytes),
        "time": format_time(case, one.seconds),
        "at most": format_time(case, one.bound),
        "change": format_change(one.shift.estimate),
        "95 %": shift_interval(one.shift),
        "verdict": one.verdict,
    }
