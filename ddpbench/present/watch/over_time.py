"""The charts of a watched job over time: parts of a step, and lateness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines, Rows
from ddpbench.present.columns import format_number
from ddpbench.present.document import Chart, tabulate_rows
from ddpbench.records.schema import Finding, Run
from ddpbench.records.watched import COLUMNS, Watched

LATE_CODES = ("straggler", "intermittent-straggler", "late-arrival", "slow-host")
RARE, CUT = 0.98, 3.0  # values beyond this quantile are cut if they exceed it by this factor
LABEL_ROW, LABEL_ROWS = 14, 8  # pixels of a label; labels one below the other
CUT_NOTE = " Rare larger values are cut off; the table has them."

Values = Mapping[str, Sequence[float | None]]  # name → a value for each moment


@dataclass(frozen=True)
class Timeline:
    """The moments of a job, which all charts share."""

    facts: tuple[dict[str, Any], ...]  # of each moment: _x, and columns
    x: Axis
    rules: Rows  # begins and ends of findings: Lines.rules

    def draw(
        self,
        words: tuple[str, str, str],
        values: Values,
        y: Axis,
        show: Callable[[float], str],
        **look: Any,
    ) -> Chart:
        """Return a chart with a line for each name, whose table has a column for each.

        words: name, title and caption. show: formats a value. look: of Lines.
        """
        rows, cells = [], []
        for i, facts in enumerate(self.facts):
            known = {name: each[i] for name, each in values.items()}
            texts = {name: "-" if y is None else show(y) for name, y in known.items()}
            rows += [
                {**facts, "name": name, "value": texts[name], "_y": value}
                for name, value in known.items()
                if value is not None
            ]
            if set(known.values()) != {None}:
                cells.append({**facts, **texts})
        look = {"color": "name", "order": tuple(values), "height": 130, **look}
        look.setdefault("rules", self.unlabelled)
        drawing = Lines(data=rows, x=self.x, y=y, **look)
        return Chart(*words, tabulate_rows(words[1], cells), drawing)

    @property
    def unlabelled(self) -> Rows:
        """Return the rules without labels, for charts below the one that has them."""
        return [{**rule, "_label": ""} for rule in self.rules]


def draw(run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield all charts over time, one below the other on the same axis. They need a moment."""
    timeline = _build_timeline(run, watched)
    yield _draw_parts(timeline, watched)
    yield from _draw_lateness(timeline, run, watched)


def _build_timeline(run: Run, watched: Watched) -> Timeline:
    """Return the time axis of a job, which begins with its first moment."""
    moments = watched.moments
    total = moments[-1].ended - moments[0].ended
    scale, unit = (3600, "hours") if total >= 7200 else (60, "minutes")
    scale, unit = (scale, unit) if total >= 120 else (1, "seconds")
    at = [(moment.ended - moments[0].ended) / scale for moment in moments]
    facts = tuple(
        {
            "_x": x,
            "UTC": format_clock(moment.ended),
            "step": moment.step,
            "whole step": format_milliseconds(moment.step_seconds),
        }
        for x, moment in zip(at, moments, strict=True)
    )
    steps = [moment.step for moment in moments]
    events = sorted(
        (float(np.interp(step, steps, at)), label, finding.sentence)
        for finding in run.findings
        for step, label in _list_events(finding)
    )
    rules = [
        {"_x": x, "finding": text, "_label": label, "_row": 8 + LABEL_ROW * (i % LABEL_ROWS)}
        for i, (x, label, text) in enumerate(events)
    ]
    title = f"{unit} since {facts[0]['UTC']} UTC"
    return Timeline(facts, Axis(title, theme.NUMBER_LABELS, domain=(0.0, at[-1])), rules)


def _list_events(finding: Finding) -> Iterator[tuple[float, str]]:
    """Yield the steps at which a finding begins and ends, each with a label."""
    place = finding.place
    rank = f"rank {place['rank']}: " if "rank" in place else ""
    for name, word in (("since_step", ""), ("until_step", "end of "), ("step", "")):
        step = place.get(name)
        if isinstance(step, (int, float)):
            yield step, f"{rank}{word}{finding.code}"


def _find_top(values: Sequence[float]) -> float | None:
    """Return the end of an axis that a few huge values must not flatten; None: show all."""
    usual, most = (float(q) for q in np.quantile(values, [RARE, 1.0]))
    return 1.5 * usual if most > CUT * usual > 0 else None


def format_clock(stamp: float) -> str:
    """Format seconds since 1970 as HH:MM:SS in UTC."""
    return datetime.fromtimestamp(stamp, timezone.utc).strftime("%H:%M:%S")


def format_milliseconds(seconds: float) -> str:
    """Format seconds as "12.34 ms"."""
    return f"{format_number(seconds * 1e3)} ms"


def find_late_ranks(run: Run) -> dict[int, str]:
    """Return the ranks in findings on late ranks and hosts, each with the finding's code."""
    named: dict[int, str] = {}
    for finding in run.findings:
        if finding.code in LATE_CODES:
            ranks = finding.place.get("ranks", [finding.place.get("rank")])
            for rank in ranks if isinstance(ranks, list) else []:
                if isinstance(rank, int):
                    named.setdefault(rank, finding.code)
    return named


def _draw_parts(timeline: Timeline, watched: Watched) -> Chart:
    moments = watched.moments
    parts = {name: [m.seconds[i] for m in moments] for i, name in enumerate(COLUMNS)}
    top = _find_top([sum(m.seconds) for m in moments])
    y = Axis("time of a step", theme.TIME_LABELS, domain=(0.0, top) if top else None)
    caption = (
        "Time of each part in the median rank, median over the steps of each point. Dashed: a "
        f"finding begins or ends.{CUT_NOTE if top else ''}"
    )
    words = "watch-parts", "Parts of a step", caption
    look: dict[str, Any] = {"order": theme.PHASES, "stacked": True, "height": 260}
    return timeline.draw(words, parts, y, format_milliseconds, rules=timeline.rules, **look)


def _draw_lateness(timeline: Timeline, run: Run, watched: Watched) -> Iterator[Chart]:
    """Yield the extra own time of the latest ranks; ranks in findings come first."""
    count, named = len(watched.moments), find_late_ranks(run)
    ranks = [rank for rank in watched.ranks if len(rank.late_seconds) == count]
    ranks.sort(key=lambda rank: (rank.rank not in named, rank.rank))
    late = {f"rank {rank.rank}": rank.late_seconds for rank in ranks}
    known = [abs(value) for values in late.values() for value in values if value is not None]
    if len(late) < 2 or not known:
        return
    top = _find_top(known)
    y = Axis("late by", theme.TIME_LABELS, zero=True, domain=(-top, top) if top else None)
    caption = (
        "A rank's own time minus the own time of the other ranks, mean over the steps of each "
        f"point: above 0, the others wait for it.{CUT_NOTE if top else ''}"
    )
    words = "watch-lateness", "Lateness of the latest ranks", caption
    yield timeline.draw(words, late, y, format_milliseconds)
