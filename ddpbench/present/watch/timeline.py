"""Charts over the time of a watched job: a point per moment, and rules where findings begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pandas as pd

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis
from ddpbench.records.schema import Finding, Run
from ddpbench.records.watched import Moment, Watched

UNITS = ((2 * 3600.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
LATE_CODES = ("straggler", "intermittent-straggler", "late-arrival", "slow-host")
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
    rules: pd.DataFrame  # where findings begin and end: Lines.rules

    @property
    def last(self) -> float:
        return self.at[-1]

    def facts(self) -> list[dict[str, Any]]:
        """Return the columns of each moment."""
        ends = [datetime.fromtimestamp(moment.ended, timezone.utc) for moment in self.moments]
        return [
            {"_x": at, "UTC": end.strftime("%H:%M:%S"), "step": moment.step}
            for at, end, moment in zip(self.at, ends, self.moments, strict=True)
        ]

    @property
    def unlabelled(self) -> pd.DataFrame:
        """The rules for charts below the one that names them."""
        rules: pd.DataFrame = self.rules.drop(columns="_label", errors="ignore")
        return rules

    @property
    def x(self) -> Axis:
        """The axis of `at`, the same for all charts of a job."""
        title = f"{self.unit} since the watch began"
        return Axis(title, theme.NUMBER_LABELS, domain=(0.0, self.last))


def build_timeline(run: Run, watched: Watched) -> Timeline:
    """Return the timeline of a job; it needs a moment."""
    moments = watched.moments
    late = {
        rank.rank: rank.late_seconds
        for rank in watched.ranks
        if len(rank.late_seconds) == len(moments)
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
    """Return where the rules are, and the labels of the first ones, one below the other."""
    rules = [
        {
            "_x": place,
            "finding": sentence,
            "_label": label if i < LABELLED else "",
            "_row": 8 + LABEL_ROW * i,
            "_left": place > LATE_HALF * last,
        }
        for i, (place, label, sentence) in enumerate(events)
    ]
    frame: pd.DataFrame = pd.DataFrame(rules)
    return frame


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
