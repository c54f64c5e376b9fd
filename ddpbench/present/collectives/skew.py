"""Skew of the ranks in a call: a straggler enters late and stays short."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ddpbench.analysis.lines import Line
from ddpbench.analysis.stats import Floats
from ddpbench.catalog.sizes import readable
from ddpbench.present.charts.kinds import Matrix
from ddpbench.present.columns import title_parts
from ddpbench.present.document import (
    Chart,
    Choice,
    ReportRun,
    Section,
    arrange,
    draw_choices,
    make_table,
    titles,
)
from ddpbench.present.repetitions import Repetitions

UNIT = "% of the call"
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
        _chart(late, (0, 50), ordered, lambda each: each.late),
        _chart(stay, (100, 0), ordered, lambda each: each.stay),
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

    texts: name, title, caption. shades: percentages that are palest and darkest.
    """
    choices = []
    for label, group in groups.items():
        if known := [each for each in group if value(each) is not None]:
            values = np.array([value(each) for each in known], dtype=np.float64).T
            choices.append(_choice(label, known, values, shades))
    return draw_choices(*texts, choices) if choices else None


def _choice(
    label: str, group: Sequence[Measured], values: Floats, shades: tuple[float, float]
) -> Choice:
    """Return a heat map. Of very many ranks only those with the largest values.

    values: seconds[rank, size]. shades: percentages that are palest and darkest.
    """
    ranks = np.array(group[0].ranks)
    if len(ranks) > MOST_RANKS:
        kept = np.sort(np.argsort(values.sum(axis=1))[-MOST_RANKS:])
        ranks, values = ranks[kept], values[kept]
    sizes = [readable(each.line.case.nbytes) for each in group]
    percent = 100 * values / np.array([each.seconds for each in group])
    cells = {
        "rank": np.repeat(ranks, len(sizes)),
        "size": sizes * len(ranks),
        UNIT: [f"{v:.3g}" for v in percent.ravel()],
        "_value": [float(f"{v:.3g}") for v in percent.ravel()],
    }
    drawing = Matrix(
        data=pd.DataFrame(cells),
        column="size",
        row="rank",
        titles=("message size", "rank"),
        unit=UNIT,
        domain=shades,
    )
    headings = ["rank", *(f"{size} µs" for size in sizes)]
    rows = [(int(r), *(row * 1e6).tolist()) for r, row in zip(ranks, values, strict=True)]
    return Choice(label, drawing, make_table(label, headings, rows))
