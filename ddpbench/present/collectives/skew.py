"""Skew of the ranks in a call: a straggler enters late and stays short."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from ddpbench.analysis.lines import Line
from ddpbench.analysis.stats import Floats
from ddpbench.catalog.sizes import readable
from ddpbench.present import theme
from ddpbench.present.columns import title_parts
from ddpbench.present.document import Chart, Choice, ReportRun, Section, arrange, make_table, titles
from ddpbench.present.repetitions import Repetitions

MOST_RANKS = 64  # rows of a heat map that can be read
INTRO = (
    "A rank that enters late makes all others wait, so that it stays shortest itself. Ranks that "
    "enter together and stay equally long are healthy."
)
LATE = (
    "How long after the first rank each rank enters: median over calls, as a share of the time of "
    "the call on its slowest rank. The darkest: half of it or more."
)
STAY = (
    "How long each rank stays in the call: median over calls, as a share of the time of the call "
    "on its slowest rank. Darker: shorter."
)


@dataclass(frozen=True)
class Measured:
    """One case: seconds of each rank in one repetition, and of the slowest rank."""

    line: Line
    ranks: tuple[int, ...]
    late: Floats | None  # None: the clocks of the ranks are not comparable
    stay: Floats
    seconds: float


Value = Callable[[Measured], "Floats | None"]


def section(runs: Sequence[ReportRun]) -> Section | None:
    groups = {run.label: _groups(run) for run in runs}
    found = next(filter(None, groups.values()), {})
    first = max(found, key=lambda label: _unevenness(found[label]), default="")
    rows = arrange(runs, lambda run: _charts(groups[run.label], first))
    return Section("skew", "Skew of the ranks", INTRO, rows=rows) if rows else None


def _groups(run: ReportRun) -> dict[str, list[Measured]]:
    """Return the cases of each heat map: of one operation and backend, and of the same ranks."""
    groups: dict[str, list[Measured]] = {}
    for label, measured in _measured(run):
        group = groups.setdefault(label, [])
        if not group or group[0].ranks == measured.ranks:
            group.append(measured)
    return groups


def _unevenness(group: Sequence[Measured]) -> float:
    """Return how unequally long the ranks stay, as a share of the call: median over sizes."""
    return float(np.median([np.ptp(each.stay) / each.seconds for each in group]))


def _charts(groups: dict[str, list[Measured]], first: str) -> list[Chart]:
    """Return the heat maps; they show the choice with the label `first`, if it is there."""
    late, stay = ("skew-late", "Enters late", LATE), ("skew-stay", "Stays in the call", STAY)
    ordered = dict(sorted(groups.items(), key=lambda item: item[0] != first))
    charts = [
        _chart(late, (0, 0.5), ordered, lambda each: each.late),
        _chart(stay, (1, 0), ordered, lambda each: each.stay),
    ]
    return [chart for chart in charts if chart]


def _measured(run: ReportRun) -> Iterator[tuple[str, Measured]]:
    """Yield the cases with samples of several ranks, and the label of their heat map."""
    parts: dict[str, list[Repetitions]] = {}
    for part in run.repetitions:
        if len(part.ranks) > 1 and np.isfinite(part.stay).all():
            parts.setdefault(part.case, []).append(part)
    known = [line for line in run.lines if line.case.key in parts]
    short = titles(title_parts(line.case) for line in known)
    for line in known:
        if measured := _measure(line, parts[line.case.key]):
            yield f"{short[title_parts(line.case)]} {line.case.backend}", measured


def _measure(line: Line, parts: Sequence[Repetitions]) -> Measured | None:
    """Return the medians over launches; None if the clock shows no time at all."""
    ranks = parts[0].ranks.tolist()
    alike = [part for part in parts if part.ranks.tolist() == ranks]
    skewed = {r.launch for r in line.results if r.summary and r.summary.skew_seconds is not None}
    late = [part.late for part in alike if part.launch in skewed]
    slowest = [np.median(part.seconds[part.numbers >= 0]) for part in alike]
    seconds = float(np.median(slowest))
    if not seconds:
        return None
    stay = np.median([part.stay for part in alike], axis=0)
    return Measured(line, tuple(ranks), np.median(late, axis=0) if late else None, stay, seconds)


def _chart(
    texts: tuple[str, str, str],
    shades: tuple[float, float],
    groups: dict[str, list[Measured]],
    value: Value,
) -> Chart | None:
    """Return the heat maps of all groups, one at a time.

    texts: name, title, caption. shades: shares of the call that are lightest and darkest.
    """
    choices = []
    for label, group in groups.items():
        known = [each for each in group if value(each) is not None]
        if known:
            values = np.array([value(each) for each in known], dtype=np.float64).T  # [rank, size]
            choices.append(_choice(label, known, values))
    if not choices:
        return None
    rows = max(len(choice.table.rows) for choice in choices)
    spec = _spec(choices[0], rows, shades)
    return Chart(*texts, spec, choices[0].table, choices=tuple(choices))


def _choice(label: str, group: Sequence[Measured], values: Floats) -> Choice:
    """Return the cells of a heat map. Of very many ranks only those with the largest values."""
    ranks = np.array(group[0].ranks)
    if len(ranks) > MOST_RANKS:
        kept = np.sort(np.argsort(values.sum(axis=1))[-MOST_RANKS:])
        ranks, values = ranks[kept], values[kept]
    sizes = [each.line.case.nbytes for each in group]
    # A cell names its case by number: bytes and time would double a page of 64 ranks.
    cells = {
        "rank": tuple(np.repeat(ranks, len(sizes)).tolist()),
        "case": tuple(range(len(sizes))) * len(ranks),
        "seconds": tuple(float(f"{v:.3g}") for v in values.ravel()),
    }
    calls = {
        "case": tuple(range(len(sizes))),
        "nbytes": tuple(sizes),
        "call": tuple(each.seconds for each in group),
    }
    headings = ["rank", *(f"{readable(nbytes)} µs" for nbytes in sizes)]
    rows = [(int(r), *(row * 1e6).tolist()) for r, row in zip(ranks, values, strict=True)]
    table = make_table(label, headings, rows)
    return Choice(label, {"cells": cells, "calls": calls}, table)


def _spec(first: Choice, rows: int, shades: tuple[float, float]) -> dict[str, Any]:
    calls = alt.LookupData(alt.NamedData(name="calls"), "case", ["nbytes", "call"])
    share = "share of the call"
    color = alt.Color(
        "share:Q",
        title=share,
        legend=alt.Legend(format="~%", tickCount=3),
        scale=alt.Scale(domain=sorted(shades), reverse=shades[0] > shades[1], clamp=True),
    )
    chart = (
        alt.Chart(alt.NamedData(name="cells"))
        .transform_lookup("case", calls)
        .transform_calculate(
            share="datum.seconds / datum.call",
            text=theme.time_text("seconds"),
            size=theme.SIZE_LABELS.replace("datum.value", "datum.nbytes"),
        )
        .mark_rect()
        .encode(
            x=theme.size_columns(),
            y=alt.Y("rank:O", title="rank", axis=alt.Axis(labelOverlap="greedy")),
            color=color,
            tooltip=[
                alt.Tooltip("rank:O"),
                alt.Tooltip("size:N"),
                alt.Tooltip("text:N", title="time"),
                alt.Tooltip("share:Q", title=share, format=".1%"),
            ],
        )
        .properties(height=min(420, max(80, 26 * rows)))
    )
    spec: dict[str, Any] = chart.to_dict()
    return {**spec, "datasets": first.datasets}
