"""What the layer groups of a sharded step communicate, as bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
import pandas as pd

from ddpbench.analysis.spans import OPERATIONS
from ddpbench.analysis.step_lines import StepLine
from ddpbench.records.table import Table, TableColumn
from ddpbench.render import step_collectives
from ddpbench.render.step_columns import ms
from ddpbench.report import theme
from ddpbench.report.chart import Chart

BAR, BETWEEN = 15, 9  # pixels: height of a bar, and what is between two layer groups


def layer_groups(lines: Sequence[StepLine], name: str) -> Chart | None:
    """Return the communication of a workload's layer groups; None if it was not timed."""
    timed = [line for line in lines if line.summary and line.summary.collectives]
    if not timed:
        return None
    frame = pd.DataFrame([bar for line in timed for bar in _bars(line)])
    rows = [(line.case.backend, *row) for line in timed for row in step_collectives.rows(line)]
    columns = [TableColumn("backend", "left")]
    columns += [
        TableColumn(heading, "left" if heading in step_collectives.LEFT else "right")
        for heading in step_collectives.HEADINGS
    ]
    notes = tuple(step_collectives.notes(timed))
    caption = (
        "How long each group of layers communicates in a step, in the rank that waits least; "
        "median over rounds. Full colour: exposed, the compute waits. Pale: hidden, the compute "
        "goes on."
    )
    table = Table("layer groups", tuple(columns), tuple(rows), notes)
    return Chart(name, "Layer groups", caption, _draw(frame), table)


def _bars(line: StepLine) -> Iterator[dict[str, Any]]:
    """Yield the exposed and the hidden time of each operation, one behind the other in a row."""
    known = line.summary.collectives if line.summary else ()
    ends: dict[str, float] = {}
    for same in step_collectives.merge(known):
        row = f"{step_collectives.name(same)}, {same[0].phase}"
        for what in ("exposed", "hidden"):
            seconds = sum(getattr(each, what).value for each in same)
            begin = ends.get(row, 0.0)
            ends[row] = begin + seconds
            yield {
                "row": row,
                "backend": line.case.backend,
                "operation": same[0].operation,
                "what": what,
                "groups": len(same),
                "begin": begin,
                "end": ends[row],
                "ms": ms(seconds, line.seconds),
            }


def _draw(frame: pd.DataFrame) -> dict[str, Any]:
    rows = list(dict.fromkeys(frame["row"]))
    backends = list(dict.fromkeys(frame["backend"]))
    shown = [name for name in OPERATIONS if name in set(frame["operation"])]
    titles = {"row": "layers", "operation": "operation", "what": "part", "groups": "layer groups"}
    tips = [alt.Tooltip(field, type="nominal", title=title) for field, title in titles.items()]
    tips += [alt.Tooltip(field, type="nominal") for field in ("backend", "ms")]
    chart = (
        theme.choose_backends(alt.Chart(frame), backends)
        .mark_bar(height={"band": 0.85})
        .encode(
            x=alt.X(
                "begin:Q",
                title="time in a step",
                axis=alt.Axis(labelExpr=theme.SIGNED_TIME_LABELS, tickCount=6),
            ),
            x2="end:Q",
            y=alt.Y("row:N", title=None, sort=rows, axis=alt.Axis(labelLimit=150, grid=False)),
            yOffset=alt.YOffset("backend:N", sort=backends),
            color=theme.named_color("operation", OPERATIONS, shown),
            opacity=alt.condition("datum.what === 'exposed'", alt.value(1.0), alt.value(0.35)),
            tooltip=tips,
        )
        .properties(height=len(rows) * (len(backends) * BAR + BETWEEN))
    )
    spec: dict[str, Any] = chart.to_dict()
    return spec
