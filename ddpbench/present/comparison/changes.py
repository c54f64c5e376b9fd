"""Changes between two sides as charts: the ratios of their times, with intervals and margins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from ddpbench.present.charts.kinds import Axis, Bars
from ddpbench.present.comparison.labels import (
    Change,
    format_time,
    label,
    shift_estimate,
    shift_interval,
    side_interval,
    side_time,
)
from ddpbench.present.document import Chart, make_table
from ddpbench.verdicts.comparison import ONLY_BASE, ONLY_NEW
from ddpbench.verdicts.regression import Measured, Row
from ddpbench.verdicts.verdict import (
    CONFIDENCE,
    FASTER,
    FEWEST,
    INCOMPARABLE,
    INCONCLUSIVE,
    INVALID,
    SAME,
    SLOWER,
)

DRAWN = 60  # rows of a chart; the table has all
# Each verdict has the colour of its place: SLOWER is vermilion, FASTER green, SAME grey.
COLORS = (INCOMPARABLE, SLOWER, FASTER, INVALID, INCONCLUSIVE, ONLY_BASE, ONLY_NEW, SAME)
SHAPES = {  # the clear ones are drawn first
    SLOWER: "triangle-right",
    FASTER: "triangle-left",
    INCONCLUSIVE: "diamond",
    SAME: "circle",
}
SIDES = ("new", "1", "2", "3", "4", "5", "6", "saved")  # new is blue, saved grey
TICKS = 14  # labels on each side of no change, at most
LESS = (-1, -2, -5, -10, -20, -30, -40, -50, -60, -70, -80, -90, -95, -98, -99)  # percent
MORE = (1, 2, 5, 10, 20, 30, 50, 100, 150, 200, 300, 400, 600, 900, 1900, 4900, 9900)
CHANGE_LABELS = (
    "abs(datum.value - 1) < 1e-9 ? '0 %' : format(datum.value * 100 - 100, '+.3~r') + ' %'"
)


def draw_changes(listed: Chart, changes: Sequence[Change], confidence: float = CONFIDENCE) -> Chart:
    """Return the table of these changes with a chart of them, the clear ones first.

    confidence: of the intervals.
    """
    changes = [change for change in changes if change.row.shift is not None]
    if not changes:
        why = f"An interval of a change needs {FEWEST} launches on each side."
        return replace(listed, caption=why)
    drawn = sorted(changes, key=lambda change: [*SHAPES].index(change.row.verdict))[:DRAWN]
    rest = f" The chart has {DRAWN} of {len(changes)} cases, the table all."
    caption = (
        f"Change of the time from BASE to NEW, and its {confidence * 100:g} % interval: right is "
        "slower. The band is the margin: a change within it does not count. On this logarithmic "
        f"axis, twice and half are equally far from no change."
        f"{rest if len(changes) > DRAWN else ''}"
    )

    def draw() -> Bars:
        data = pd.DataFrame([_describe(change) for change in drawn])
        ends = data[["_low", "_high", "_band_low", "_band_high"]].stack()
        return Bars(
            data=data,
            x=_scale_changes(ends),
            row="case",
            color="verdict",
            order=COLORS,
            dots=True,
            shape="verdict",
            shapes={verdict: SHAPES.get(verdict, "cross") for verdict in COLORS},
        )

    return replace(listed, caption=caption, draw=draw)


def _describe(change: Change) -> dict[str, Any]:
    """Return a row of the data: ratios of times, and texts."""
    shift, row, widest = change.row.shift, change.row, 1 + change.row.margin
    assert shift is not None
    base, new = (
        f"{side_time(change.case, side)} {side_interval(side)}"
        for side in (change.base, change.new)
    )
    return {
        "case": change.label,
        "base": base,
        "new": new,
        "change": shift_estimate(shift),
        "range": shift_interval(shift),
        "margin": f"±{row.margin * 100:.3g} %",
        "verdict": row.verdict,
        "why": row.why,
        "_end": math.exp(shift.estimate),
        "_low": math.exp(shift.low),
        "_high": math.exp(shift.high),
        "_band_low": 1 / widest,
        "_band_high": widest,
    }


def draw_launches(sides: Mapping[str, Measured], judged: Mapping[str, Row]) -> Chart:
    """Return the chart of all launches, with the saved ones that they were compared with."""
    dots, rows = [], []
    for test, new in sides.items():
        saved = judged[test].base if test in judged else None
        reference = (saved or new).side.seconds
        for name, one in (("saved", saved), ("new", new)):
            if one is None:
                continue
            times = [format_time(one.case, seconds) for seconds in one.side.times]
            dots += [
                {"test": test, "side": name, "time": text, "_end": seconds / reference}
                for seconds, text in zip(one.side.times, times, strict=True)
            ]
            median, width = side_time(one.case, one.side), side_interval(one.side)
            rows.append((test, name, label(one.case), median, width, ", ".join(times)))
    kinds = {one.side.statistic for one in sides.values()}
    headings = ("test", "side", "case", "time", "95 %", "launches")
    data = pd.DataFrame(dots)
    drawing = Bars(
        data=data,
        x=_scale_changes(data["_end"]),
        row="test",
        within="side",
        color="side",
        order=SIDES,
        dots=True,
    )
    return Chart(
        "tests-launches",
        "Launches of each test",
        f"The {' or '.join(sorted(kinds))} of each launch, relative to the median of the saved "
        "launches, or of the new ones if none are saved. Right is slower.",
        make_table("", headings, rows, ("test", "side", "case", "launches")),
        lambda: drawing,
    )


def _scale_changes(ratios: Iterable[float]) -> Axis:
    """Return a logarithmic axis of ratios of times, with round percentages far enough apart."""
    known = [*ratios, 0.99, 1.01]
    low, high = min(known), max(known)
    gap, ticks = math.log(high / low) / TICKS, [1.0]
    for side in (LESS, MORE):
        last = 1.0
        for percent in side:
            ratio = 1 + percent / 100
            if low <= ratio <= high and abs(math.log(ratio / last)) >= gap:
                ticks.append(last := ratio)
    title = "change of the time"
    return Axis(title, CHANGE_LABELS, log=True, domain=(low, high), ticks=tuple(sorted(ticks)))
