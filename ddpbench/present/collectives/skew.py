"""Skew of the ranks: a straggler enters the calls late, and stays in them for the shortest time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from ddpbench.analysis.stats import Floats
from ddpbench.present.charts.kinds import draw_heat
from ddpbench.present.columns import title_parts
from ddpbench.present.document import Chart, ReportRun, Section, draw_chart, titles
from ddpbench.present.repetitions import Repetitions

UNIT = "% of the call"
MOST_RANKS = 64  # rows of a heat map that can be read
INTRO = (
    "A rank that enters late makes all others wait, so that it stays shortest itself. Ranks that "
    "enter together and stay equally long are healthy."
)
LATE = (
    "How long after the first rank each rank enters: median over calls and sizes, as a share of "
    "the time of the call on its slowest rank. The darkest: half of it or more."
)
STAY = (
    "How long each rank stays in the call: median over calls and sizes, as a share of the time of "
    "the call on its slowest rank. Darker: shorter."
)
Shares = dict[tuple[str, int], list[float]]  # operation and rank → shares of the call, by size


def build_sections(run: ReportRun) -> Iterator[Section]:
    """Yield heat maps of ranks and operations for each backend whose samples are stored."""
    rows = []
    for backend in dict.fromkeys(line.case.backend for line in run.lines):
        late, stay = _measure(run, backend)
        shown = [
            _draw(f"skew-late-{backend}", f"Enters late: {backend}", LATE, late, (0, 50)),
            _draw(f"skew-stay-{backend}", f"Stays in the call: {backend}", STAY, stay, (100, 0)),
        ]
        rows.append(tuple(filter(None, shown)))
    if any(rows):
        yield Section("skew", "Skew of the ranks", INTRO, rows=tuple(filter(None, rows)))


def _measure(run: ReportRun, backend: str) -> tuple[Shares, Shares]:
    """Return how late each rank enters, and how long it stays, in percent of the call.

    The first is without cases of subgroups, and empty where the clocks of the ranks are not
    comparable.
    """
    parts: dict[str, list[Repetitions]] = {}
    for part in run.repetitions:
        if len(part.ranks) > 1 and np.isfinite(part.stay).all():
            parts.setdefault(part.case, []).append(part)
    known = [line for line in run.lines if line.case.backend == backend and line.case.key in parts]
    names = titles(title_parts(line.case) for line in known)
    late, stay = Shares(), Shares()
    for line in known:
        name = names[title_parts(line.case)]
        skewed = [
            r.launch for r in line.results if r.summary and r.summary.skew_seconds is not None
        ]
        for part in parts[line.case.key]:
            seconds = float(np.median(part.seconds))
            if seconds:
                _add(stay, name, part, 100 * part.stay / seconds)
                if part.launch in skewed and line.case.group == "world":
                    _add(late, name, part, 100 * part.late / seconds)
    return late, stay


def _add(shares: Shares, name: str, part: Repetitions, values: Floats) -> None:
    for rank, value in zip(part.ranks.tolist(), values.tolist(), strict=True):
        shares.setdefault((name, rank), []).append(value)


def _draw(
    name: str, title: str, caption: str, shares: Shares, domain: tuple[float, float]
) -> Chart | None:
    """Return a heat map; of very many ranks only those with a share that is the darkest.

    domain: percentages that are palest and darkest.
    """
    if not shares:
        return None
    pale, dark = domain
    darkness: dict[int, float] = {}
    cells: list[dict[str, Any]] = []
    for (operation, rank), values in sorted(shares.items(), key=lambda each: each[0][1]):
        share = float(f"{statistics.median(values):.3g}")
        cells.append({"operation": operation, "rank": rank, "_value": share, "_marked": ""})
        darkness[rank] = max(darkness.get(rank, 0.0), (share - pale) / (dark - pale))
    darkest = sorted(darkness, key=lambda rank: -darkness[rank])[:MOST_RANKS]
    shown = [cell for cell in cells if cell["rank"] in darkest]
    look: dict[str, Any] = {"titles": (None, "rank"), "domain": domain}
    drawing = draw_heat(shown, UNIT, column="operation", row="rank", **look)
    return draw_chart(name, title, caption, drawing)
