"""Changes between two sides: a table, and a chart of intervals and margins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddpbench.analysis.stats import half_width
from ddpbench.present.case_labels import format_time
from ddpbench.present.charts.kinds import Axis, Bars
from ddpbench.present.columns import Column, text_column
from ddpbench.present.document import Chart, show_rows
from ddpbench.verdicts.matching import Side
from ddpbench.verdicts.rows import ONLY_BASE, ONLY_NEW, Row
from ddpbench.verdicts.verdict import (
    CONFIDENCE,
    FASTER,
    FEWEST,
    INCOMPARABLE,
    INCONCLUSIVE,
    INVALID,
    SAME,
    SLOWER,
    Shift,
)

DRAWN = 60  # rows of a chart; the table has all
# Each verdict has the colour of its place: SLOWER is vermilion, FASTER green, SAME grey.
COLORS = (INCOMPARABLE, SLOWER, FASTER, INVALID, INCONCLUSIVE, ONLY_BASE, ONLY_NEW, SAME)
Rows = Sequence[Row]
RATIO_LABELS = "'×' + format(datum.value, '.4~r')"


def format_estimate(shift: Shift | None) -> str:
    """Format a change: "+12.3 %"."""
    return f"{math.expm1(shift.estimate) * 100:+.1f} %" if shift else "-"


def format_interval(shift: Shift | None) -> str:
    """Format the interval of a change: "+10.1 % … +14.5 %"."""
    if shift is None:
        return "-"
    return f"{math.expm1(shift.low) * 100:+.1f} % … {math.expm1(shift.high) * 100:+.1f} %"


def list_changes(name: str, label: Column[Any], rows: Rows, *others: Column[Any]) -> Chart:
    """Return the table of changes; columns without a text are left out.

    label: the first column. others: columns before the verdict.
    """
    columns: tuple[Column[Any], ...] = (
        label,
        Column("base", lambda row: _format_side(row, row.base)),
        Column("95 %", lambda row: _format_half_width(row.base)),
        Column("new", lambda row: _format_side(row, row.new)),
        Column("95 %", lambda row: _format_half_width(row.new)),
        Column("change", lambda row: format_estimate(row.shift)),
        Column("range of change", lambda row: format_interval(row.shift)),
        *others,
        text_column("verdict", lambda row: row.verdict),
        text_column("why", lambda row: row.why),
    )
    known = [column for column in columns if any(map(column.show, rows))]
    return Chart(name, f"Change of each {label.name}", "", show_rows("", known, rows))


def _format_side(row: Row, side: Side | None) -> str:
    return format_time(row.case, side.seconds) if side else "-"


def _format_half_width(side: Side | None) -> str:
    return f"±{half_width(side.interval) * 100:.1f} %" if side and side.interval else "-"


def draw_changes(
    listed: Chart, label: Column[Any], rows: Rows, confidence: float = CONFIDENCE
) -> Chart:
    """Return the table of these changes with a chart of them, the clear ones first.

    confidence: of the intervals.
    """
    data = [_draw_row(label.show(row), row, row.shift) for row in rows if row.shift is not None]
    if not data:
        why = f"An interval of a change needs {FEWEST} launches on each side."
        return replace(listed, caption=why)
    order = (SLOWER, FASTER, INCONCLUSIVE, SAME)
    drawn = sorted(data, key=lambda bar: order.index(bar["verdict"]))[:DRAWN]
    more = f" The chart has {DRAWN} of {len(data)} cases, the table all."
    caption = (
        f"Ratio of the times of NEW and BASE, and its {confidence * 100:g} % interval: right is "
        "slower. The band is the margin: a change within it does not count."
        f"{more if len(data) > DRAWN else ''}"
    )
    x = Axis("time of NEW / time of BASE", RATIO_LABELS, log=True)
    drawing = Bars(data=drawn, x=x, row="case", color="verdict", order=COLORS, dots=True)
    return replace(listed, caption=caption, drawing=drawing)


def _draw_row(label: str, row: Row, shift: Shift) -> dict[str, Any]:
    """Return the row of the chart, its changes as ratios."""
    return {
        "case": label,
        "base": _format_side(row, row.base),
        "new": _format_side(row, row.new),
        "change": format_estimate(shift),
        "range": format_interval(shift),
        "verdict": row.verdict,
        "why": row.why,
        "_end": math.exp(shift.estimate),
        "_low": math.exp(shift.low),
        "_high": math.exp(shift.high),
        "_band_low": 1 / (1 + row.margin),
        "_band_high": 1 + row.margin,
    }


def format_noticeable(rows: Rows) -> str:
    """State how large a change a comparison could have noticed; "" if no row has a change."""
    changes = [row.noticeable for row in rows if row.shift]
    known = [
        f"{change * 100:.0f}" if change < 10 else "over 1000"
        for change in sorted(change for change in changes if change is not None)
    ]
    if not known:
        few = "this comparison could not have noticed any change: too few launches"
        return few if changes else ""
    several = known[0] != known[-1]
    shown = f"{known[0]} to {known[-1]} %, depending on the case" if several else f"{known[0]} %"
    return f"this comparison could have noticed a change of {shown}"
