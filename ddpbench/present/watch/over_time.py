"""The chart of a watched job over time: the parts of a step, and when findings begin and end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

import numpy as np

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines, Rows
from ddpbench.present.columns import format_number
from ddpbench.present.document import Chart, tabulate_rows
from ddpbench.records.schema import Finding, Run
from ddpbench.records.watched import COLUMNS, Moment, Watched

LATE_CODES = ("straggler", "intermittent-straggler", "late-arrival", "slow-host")
RARE, CUT = 0.98, 3.0  # values beyond this quantile are cut if they exceed it by this factor
LABEL_ROW, LABEL_ROWS = 14, 8  # pixels of a label; labels one below the other
CUT_NOTE = " Rare larger values are cut off; the table has them."


def draw(run: Run, watched: Watched) -> Chart:
    """Return the chart, whose table has a row for each moment. It needs a moment."""
    moments = watched.moments
    total = moments[-1].ended - moments[0].ended
    scale, unit = (3600, "hours") if total >= 7200 else (60, "minutes")
    scale, unit = (scale, unit) if total >= 120 else (1, "seconds")
    at = [(moment.ended - moments[0].ended) / scale for moment in moments]
    rows, cells = [], []
    for x, moment in zip(at, moments, strict=True):
        facts = {
            "_x": x,
            "UTC": format_clock(moment.ended),
            "step": moment.step,
            "whole step": format_milliseconds(moment.step_seconds),
        }
        parts = dict(zip(COLUMNS, moment.seconds, strict=True))
        texts = {name: format_milliseconds(seconds) for name, seconds in parts.items()}
        rows += [{**facts, "name": n, "value": texts[n], "_y": y} for n, y in parts.items()]
        cells.append({**facts, **texts})
    top = _find_top([sum(moment.seconds) for moment in moments])
    title = f"{unit} since {format_clock(moments[0].ended)} UTC"
    drawing = Lines(
        data=rows,
        x=Axis(title, theme.NUMBER_LABELS, domain=(0.0, at[-1])),
        y=Axis("time of a step", theme.TIME_LABELS, domain=(0.0, top) if top else None),
        color="name",
        order=theme.PHASES,
        stacked=True,
        height=260,
        rules=_list_rules(run, moments, at),
    )
    caption = (
        "Time of each part in the median rank, median over the steps of each point. Dashed: a "
        f"finding begins or ends.{CUT_NOTE if top else ''}"
    )
    table = tabulate_rows("Parts of a step", cells)
    return Chart("watch-parts", "Parts of a step", caption, table, drawing)


def _list_rules(run: Run, moments: Sequence[Moment], at: Sequence[float]) -> Rows:
    """Return where findings begin and end: `Lines.rules`."""
    steps = [moment.step for moment in moments]
    events = sorted(
        (float(np.interp(step, steps, at)), label, finding.sentence)
        for finding in run.findings
        for step, label in _list_events(finding)
    )
    return [
        {"_x": x, "finding": text, "_label": label, "_row": 8 + LABEL_ROW * (i % LABEL_ROWS)}
        for i, (x, label, text) in enumerate(events)
    ]


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
