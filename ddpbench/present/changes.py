"""Changes between two sides: a table, and a chart of intervals and margins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddpbench.analysis.stats import half_width
from ddpbench.present.case_labels import format_time
from ddpbench.present.charts.kinds import Axis, Bars, Rows
from ddpbench.present.document import Chart, tabulate_rows
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
CLEAR = (SLOWER, FASTER, INCONCLUSIVE, SAME)  # the order of the rows of a chart
# Each verdict has the colour of its place: SLOWER is vermilion, FASTER green, SAME grey.
COLORS = (INCOMPARABLE, SLOWER, FASTER, INVALID, INCONCLUSIVE, ONLY_BASE, ONLY_NEW, SAME)
RATIO_LABELS = "'×' + format(datum.value, '.4~r')"


def format_shift(shift: Shift | None) -> dict[str, str]:
    """Return the cells of a change: "+12.3 %", and of its interval: "+10.1 % … +14.5 %"."""
    if shift is None:
        return {"change": "-", "range of change": "-"}
    ends = (shift.estimate, shift.low, shift.high)
    change, low, high = (f"{math.expm1(end) * 100:+.1f} %" for end in ends)
    return {"change": change, "range of change": f"{low} … {high}"}


def describe_change(label: Mapping[str, str], row: Row, **more: str) -> dict[str, Any]:
    """Return a row of the table and of the chart.

    label: the first cell. more: cells before the verdict.
    """
    cells = {
        **label,
        "base": _format_side(row, row.base),
        "new": _format_side(row, row.new),
        **format_shift(row.shift),
        **more,
        "verdict": row.verdict,
        "why": row.why,
    }
    if row.shift is None:
        return cells
    return {
        **cells,
        "_end": math.exp(row.shift.estimate),
        "_low": math.exp(row.shift.low),
        "_high": math.exp(row.shift.high),
        "_band_low": 1 / (1 + row.margin),
        "_band_high": 1 + row.margin,
    }


def _format_side(row: Row, side: Side | None) -> str:
    """Format a time and its interval: "1000 µs ±1.2 %"."""
    if side is None:
        return "-"
    interval = f" ±{half_width(side.interval) * 100:.1f} %" if side.interval else ""
    return f"{format_time(row.case, side.seconds)}{interval}"


def list_changes(
    name: str, head: str, changes: Rows, *, drawn: bool = False, confidence: float = CONFIDENCE
) -> Chart:
    """Return the table of changes, with a chart if one is drawn.

    head: heading of the labels. changes: of `describe_change`. confidence: of the intervals.
    """
    table, title = tabulate_rows("", changes), f"Change of each {head}"
    if not drawn:
        return Chart(name, title, "", table)
    data = [change for change in changes if "_end" in change]
    if not data:
        why = f"An interval of a change needs {FEWEST} launches on each side."
        return Chart(name, title, why, table)
    shown = sorted(data, key=lambda change: CLEAR.index(change["verdict"]))[:DRAWN]
    more = f" The chart has {DRAWN} of {len(data)} cases, the table all."
    caption = (
        f"Ratio of the times of NEW and BASE, and its {confidence * 100:g} % interval: right is "
        "slower. The band is the margin: a change within it does not count."
        f"{more if len(data) > DRAWN else ''}"
    )
    x = Axis("time of NEW / time of BASE", RATIO_LABELS, log=True)
    drawing = Bars(data=shown, x=x, row=head, color="verdict", order=COLORS, dots=True)
    return Chart(name, title, caption, table, drawing)


def format_noticeable(rows: Sequence[Row]) -> str:
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
