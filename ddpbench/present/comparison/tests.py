"""The tests of a pytest session as charts: their launches, and changes if there are verdicts."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt
import pandas as pd

from ddpbench.present import theme
from ddpbench.present.comparison.changes import change_axis, row_axis
from ddpbench.present.comparison.labels import format_time, label, side_interval, side_time
from ddpbench.present.document import Chart, make_table
from ddpbench.verdicts.regression import Measured, Row

PAIR_HEIGHT = 30  # pixels of a test in the chart of launches: saved ones above new ones
SIDES = ("new", "1", "2", "3", "4", "5", "6", "saved")  # new is blue, saved grey


def draw_launches(sides: Mapping[str, Measured], judged: Mapping[str, Row]) -> Chart:
    """Return the chart of all launches, with the saved ones that they were compared with."""
    values, rows = [], []
    for test, new in sides.items():
        saved = judged[test].base if test in judged else None
        reference = (saved or new).side.seconds
        for name, one in (("saved", saved), ("new", new)):
            if one is None:
                continue
            times = [format_time(one.case, seconds) for seconds in one.side.times]
            values += [
                {"test": test, "side": name, "ratio": seconds / reference, "time": text}
                for seconds, text in zip(one.side.times, times, strict=True)
            ]
            median, width = side_time(one.case, one.side), side_interval(one.side)
            rows.append((test, name, label(one.case), median, width, ", ".join(times)))
    kinds = {one.side.statistic for one in sides.values()}
    headings = ("test", "side", "case", "time", "95 %", "launches")
    left = ("test", "side", "case", "launches")
    return Chart(
        "tests-launches",
        "Launches of each test",
        f"The {' or '.join(sorted(kinds))} of each launch, relative to the median of the saved "
        "launches, or of the new ones if none are saved. Right is slower.",
        _launch_chart(pd.DataFrame(values), len(sides)).to_dict(),
        make_table("Launches", headings, rows, left),
    )


def _launch_chart(data: pd.DataFrame, tests: int) -> alt.Chart:
    seen = [name for name in ("saved", "new") if name in set(data["side"])]
    legend = alt.Legend(values=seen, title=None) if len(seen) > 1 else None
    colors = alt.Scale(domain=list(SIDES), range="category")
    shapes = alt.Scale(domain=list(SIDES), range=["circle"] * 7 + ["square"])
    low, high = float(data["ratio"].min()), float(data["ratio"].max())
    chart = alt.Chart(data, height=PAIR_HEIGHT * tests).mark_point(filled=True, size=60)
    drawn: alt.Chart = chart.encode(
        x=change_axis("ratio", low, high),
        y=row_axis("test"),
        yOffset=alt.YOffset("side:N", sort=["saved", "new"]),
        color=alt.Color("side:N", scale=colors, legend=legend),
        shape=alt.Shape("side:N", scale=shapes, legend=legend),
        tooltip=theme.tips("test", "side", "time"),
    )
    return drawn
