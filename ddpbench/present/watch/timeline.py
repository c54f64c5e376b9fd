"""Charts over the time of a watched job: a point per moment, and rules where findings begin."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from ddpbench.present import theme
from ddpbench.records.load import Load
from ddpbench.records.schema import Finding, Run
from ddpbench.records.watched import Moment, Watched

HEIGHT, LOW_HEIGHT = 260, 130
UNITS = ((2 * 3600.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
LATE_CODES = ("straggler", "intermittent-straggler", "late-arrival", "slow-host")
POINTS = 120  # of a line, at most
LABELLED = 4  # rules with a label
LABEL_ROW = 14  # pixels
LATE_HALF = 0.6  # of the axis, from which labels stand to the left of their rule
RARE, CUT = 0.98, 3.0  # values beyond this quantile are cut if they exceed it so many times


@dataclass(frozen=True)
class Timeline:
    """The moments of a job: `at` counts units since the watch began."""

    moments: tuple[Moment, ...]
    late: dict[int, tuple[float | None, ...]]  # rank → its lateness in each moment
    named: dict[int, str]  # ranks that findings name → the code of the first
    at: tuple[float, ...]
    unit: str  # of UNITS
    rules: pd.DataFrame  # at, label, sentence, row, side

    @property
    def last(self) -> float:
        return self.at[-1]

    def frame(self, columns: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
        """Return a row for each moment: its time, its step and these columns."""
        base = {"at": self.at, "step": [m.step for m in self.moments], "clock": self.clocks()}
        frame: pd.DataFrame = pd.DataFrame({**base, **columns})
        return frame

    def clocks(self) -> list[str]:
        ends = [datetime.fromtimestamp(moment.ended, timezone.utc) for moment in self.moments]
        return [end.strftime("%H:%M:%S UTC") for end in ends]

    def x(self) -> alt.X:
        """Return the axis, the same for all charts of a job."""
        return alt.X(
            "at:Q",
            title=f"{self.unit} since the watch began",
            scale=alt.Scale(domain=[0, self.last], nice=False),
            axis=alt.Axis(tickCount=8, grid=False, labelFlush=True),
        )

    def draw_cursor(
        self, data: pd.DataFrame, tips: Sequence[alt.Tooltip]
    ) -> tuple[alt.Chart, alt.Chart]:
        """Return a rule at the moment nearest to the pointer, and what shows its tooltip.

        A selection of the nearest point would do, but its tooltips have no text: Vega-Lite looks
        for that in the wrong place. So each moment has an invisible span.
        """
        middles = (data["at"].to_numpy()[1:] + data["at"].to_numpy()[:-1]) / 2
        spans = data.assign(begin=[0.0, *middles], end=[*middles, self.last])
        near = alt.selection_point(
            name="near", on="pointerover", clear="pointerout", fields=["at"], empty=False
        )
        shown = alt.condition(near, alt.value(0.8), alt.value(0))
        times = [*theme.tips(clock="time"), alt.Tooltip("step:Q", title="step")]
        base = alt.Chart(spans)
        rule = base.mark_rule(tooltip=None).encode(x=self.x(), opacity=shown)
        area = base.mark_rect(opacity=0).encode(
            x=alt.X("begin:Q", title=self.x()["title"]), x2="end:Q", tooltip=[*times, *tips]
        )
        return rule, area.add_params(near)

    def draw_rules(self, labels: bool = False) -> Iterator[alt.Chart]:
        """Yield a dashed rule for each beginning and end of a finding."""
        if self.rules.empty:
            return
        tip = alt.Tooltip("sentence:N", title="finding")
        base = alt.Chart(self.rules).encode(x=self.x(), tooltip=tip)
        yield base.mark_rule(strokeDash=[5, 3], strokeWidth=1.5)
        for side, align, dx in (("right", "left", 5), ("left", "right", -5)):
            if labels and (self.rules["side"] == side).any():
                text = base.mark_text(align=align, dx=dx, fontSize=11, fontWeight=600)
                shown = text.encode(text="label:N", y=alt.Y("row:Q", scale=None, axis=None))
                yield shown.transform_filter(f"datum.side == '{side}' && datum.label != ''")


def build_timeline(run: Run, watched: Watched) -> Timeline:
    """Return the timeline of a job; it needs a moment. Moments that are close become one point."""
    groups = _group(watched.moments)
    moments = tuple(_merge([watched.moments[i] for i in group]) for group in groups)
    late = {
        rank.rank: tuple(_mean([rank.late_seconds[i] for i in group]) for group in groups)
        for rank in watched.ranks
        if len(rank.late_seconds) == len(watched.moments)
    }
    ends = np.array([moment.ended for moment in moments])
    began = min(_read_start(run.started, float(ends[0])), float(ends[0]))
    total = float(ends[-1]) - began
    _, seconds, unit = next(each for each in UNITS if total >= each[0])
    at = tuple(((ends - began) / seconds).tolist())
    steps = [moment.step for moment in moments]
    events = sorted(
        (float(np.interp(step, steps, at)), label, finding.sentence)
        for finding in run.findings
        for step, label in _find_events(finding)
    )
    return Timeline(moments, late, find_named(run), at, unit, _place_rules(events, at[-1]))


def find_named(run: Run) -> dict[int, str]:
    """Return the ranks that findings on late ranks name, directly or by their host, with a code."""
    named: dict[int, str] = {}
    for finding in run.findings:
        if finding.code in LATE_CODES:
            ranks = finding.place.get("ranks", [finding.place.get("rank")])
            for rank in ranks if isinstance(ranks, list) else []:
                if isinstance(rank, int):
                    named.setdefault(rank, finding.code)
    return named


def _place_rules(events: Sequence[tuple[float, str, str]], last: float) -> pd.DataFrame:
    """Return where the rules stand, and the labels of the first ones, one below the other."""
    rules = [
        {
            "at": place,
            "label": label if i < LABELLED else "",
            "sentence": sentence,
            "row": 8 + LABEL_ROW * i,
            "side": "left" if place > LATE_HALF * last else "right",
        }
        for i, (place, label, sentence) in enumerate(events)
    ]
    frame: pd.DataFrame = pd.DataFrame(rules)
    return frame


def _group(moments: Sequence[Moment]) -> list[list[int]]:
    """Return the positions of the moments, those together that fall into one of POINTS spans."""
    first, last = moments[0].ended, moments[-1].ended
    width = (last - first) / POINTS or 1.0
    places = groupby(range(len(moments)), key=lambda i: int((moments[i].ended - first) / width))
    return [list(group) for _, group in places]


def _merge(moments: Sequence[Moment]) -> Moment:
    """Return the medians of the steps of some moments, and the means of what was read there."""
    if len(moments) == 1:
        return moments[0]
    loads = [astuple(moment.load) for moment in moments if moment.load is not None]
    names = dict.fromkeys(name for moment in moments for name in moment.values)
    seconds = np.median([moment.seconds for moment in moments], axis=0).tolist()
    return Moment(
        ended=moments[-1].ended,
        step=moments[-1].step,
        step_seconds=statistics.median(moment.step_seconds for moment in moments),
        seconds=tuple(seconds),
        exposed_seconds=statistics.median(moment.exposed_seconds for moment in moments),
        load=Load(*map(_mean, zip(*loads, strict=True))) if loads else None,  # type: ignore[arg-type]
        loss=_mean([moment.loss for moment in moments]),
        values={
            name: statistics.fmean(m.values[name] for m in moments if name in m.values)
            for name in names
        },
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _find_events(finding: Finding) -> Iterator[tuple[float, str]]:
    """Yield the steps at which a finding begins and ends, and what happens there."""
    place = finding.place
    rank = f"rank {place['rank']}: " if "rank" in place else ""
    for name, word in (("since_step", ""), ("until_step", "end of "), ("step", "")):
        step = place.get(name)
        if isinstance(step, (int, float)):
            yield step, f"{rank}{word}{finding.code}"


def _read_start(stamp: str, default: float) -> float:
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return default


def find_top(values: Sequence[float]) -> float | None:
    """Return where to cut an axis so that a few huge values do not flatten the others."""
    usual, most = (float(q) for q in np.quantile(np.array(values), [RARE, 1.0]))
    return 1.5 * usual if most > CUT * usual > 0 else None
