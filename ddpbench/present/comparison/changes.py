"""Changes between two sides: a table, and a chart of intervals and margins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpbench.analysis.stats import half_width
from ddpbench.present.charts.kinds import Axis, Bars
from ddpbench.present.columns import Column, text_column
from ddpbench.present.comparison.labels import format_time
from ddpbench.present.document import Chart, show_known
from ddpbench.verdicts import comparison, regression
from ddpbench.verdicts.comparison import ONLY_BASE, ONLY_NEW
from ddpbench.verdicts.matching import AnyCase, Side
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
RATIO_LABELS = "'×' + format(datum.value, '.4~r')"


def format_change(log_ratio: float) -> str:
    """Format a log ratio as a change: "+12.3 %"."""
    return f"{math.expm1(log_ratio) * 100:+.1f} %"


def shift_estimate(shift: Shift | None) -> str:
    return format_change(shift.estimate) if shift else "-"


def shift_interval(shift: Shift | None) -> str:
    return f"{format_change(shift.low)} … {format_change(shift.high)}" if shift else "-"


def _interval(side: Side | None) -> str:
    return f"±{half_width(side.interval) * 100:.1f} %" if side and side.interval else "-"


@dataclass(frozen=True)
class Change:
    """A case or a test that both sides have."""

    label: str
    case: AnyCase
    base: Side | None
    new: Side | None
    row: comparison.Row | regression.Row

    def time(self, side: Side | None) -> str:
        return format_time(self.case, side.seconds) if side else "-"


def list_changes(name: str, head: str, changes: Sequence[Change], *others: Column[Any]) -> Chart:
    """Return the table of changes, the remarkable ones first; columns without a text are left out.

    head: heading of the labels. others: columns of Change before the verdict.
    """
    columns: tuple[Column[Any], ...] = (
        text_column(head, lambda change: change.label),
        Column("base", lambda change: change.time(change.base)),
        Column("95 %", lambda change: _interval(change.base)),
        Column("new", lambda change: change.time(change.new)),
        Column("95 %", lambda change: _interval(change.new)),
        Column("change", lambda change: shift_estimate(change.row.shift)),
        Column("range of change", lambda change: shift_interval(change.row.shift)),
        *others,
        text_column("verdict", lambda change: change.row.verdict),
        text_column("why", lambda change: change.row.why),
    )
    table = show_known("", columns, changes)
    remarkable = sum(change.row.verdict != SAME for change in changes)
    return Chart(name, f"Change of each {head}", "", table, remarkable=remarkable)


def draw_changes(listed: Chart, changes: Sequence[Change], confidence: float = CONFIDENCE) -> Chart:
    """Return the table of these changes with a chart of them, the clear ones first.

    confidence: of the intervals.
    """
    rows = [row for change in changes for row in _describe(change)]
    if not rows:
        why = f"An interval of a change needs {FEWEST} launches on each side."
        return replace(listed, caption=why)
    clear = (SLOWER, FASTER, INCONCLUSIVE, SAME)
    drawn = sorted(rows, key=lambda row: clear.index(row["verdict"]))[:DRAWN]
    rest = f" The chart has {DRAWN} of {len(rows)} cases, the table all."
    caption = (
        f"Ratio of the times of NEW and BASE, and its {confidence * 100:g} % interval: right is "
        "slower. The band is the margin: a change within it does not count."
        f"{rest if len(rows) > DRAWN else ''}"
    )
    x = Axis("time of NEW / time of BASE", RATIO_LABELS, log=True)
    look: dict[str, Any] = {"color": "verdict", "shape": "verdict", "order": COLORS, "dots": True}
    drawing = Bars(data=drawn, x=x, row="case", **look)
    return replace(listed, caption=caption, drawing=drawing)


def _describe(change: Change) -> list[dict[str, Any]]:
    """Return a row of the data, its changes as ratios; none if the change is unknown."""
    shift, row, widest = change.row.shift, change.row, 1 + change.row.margin
    if shift is None:
        return []
    return [
        {
            "case": change.label,
            "base": change.time(change.base),
            "new": change.time(change.new),
            "change": shift_estimate(shift),
            "range": shift_interval(shift),
            "verdict": row.verdict,
            "why": row.why,
            "_end": math.exp(shift.estimate),
            "_low": math.exp(shift.low),
            "_high": math.exp(shift.high),
            "_band_low": 1 / widest,
            "_band_high": widest,
        }
    ]


def format_noticeable(changes: Sequence[float | None]) -> str:
    """State how large a change a comparison could have noticed; "" if there is no case."""
    known = [
        f"{change * 100:.0f}" if change < 10 else "over 1000"
        for change in sorted(c for c in changes if c is not None)
    ]
    if not known:
        few = "this comparison could not have noticed any change: too few launches"
        return few if changes else ""
    several = known[0] != known[-1]
    shown = f"{known[0]} to {known[-1]} %, depending on the case" if several else f"{known[0]} %"
    return f"this comparison could have noticed a change of {shown}"
