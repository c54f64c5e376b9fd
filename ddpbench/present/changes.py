"""Changes between two sides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ddpbench.present.case_labels import format_time
from ddpbench.present.document import Chart, tabulate_rows
from ddpbench.verdicts.comparison import Row
from ddpbench.verdicts.matching import Side
from ddpbench.verdicts.verdict import Shift


def format_shift(shift: Shift | None) -> dict[str, str]:
    """Return the cells of a change: "+12.3 %", and of its interval: "+10.1 % … +14.5 %"."""
    if shift is None:
        return {"change": "-", "range of change": "-"}
    ends = (shift.estimate, shift.low, shift.high)
    change, low, high = (f"{math.expm1(end) * 100:+.1f} %" for end in ends)
    return {"change": change, "range of change": f"{low} … {high}"}


def describe_change(label: Mapping[str, str], row: Row, **more: str) -> dict[str, str]:
    """Return a row of the table.

    label: the first cell. more: cells before the verdict.
    """
    return {
        **label,
        "base": _format_side(row, row.base),
        "new": _format_side(row, row.new),
        **format_shift(row.shift),
        **more,
        "verdict": row.verdict,
        "why": row.why,
    }


def _format_side(row: Row, side: Side | None) -> str:
    """Format a time and its interval: "1000 µs ±1.2 %"."""
    if side is None:
        return "-"
    interval = f" ±{side.interval.half_width * 100:.1f} %" if side.interval else ""
    return f"{format_time(row.case, side.seconds)}{interval}"


def list_changes(name: str, head: str, changes: Sequence[Mapping[str, str]]) -> Chart:
    """Return the table of changes. head: heading of the labels. changes: of `describe_change`."""
    return Chart(name, f"Change of each {head}", "", tabulate_rows("", changes))


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
