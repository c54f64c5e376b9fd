"""Skew of the ranks: a straggler enters the calls late, and stays in them for the shortest time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from ddpbench.present.charts.kinds import draw_heat
from ddpbench.present.columns import title_parts
from ddpbench.present.document import Chart, ReportRun, Section, draw_chart, make_titles
from ddpbench.present.repetitions import Repetitions

MOST_RANKS = 64  # rows of a heat map that can be read
INTRO = (
    "A rank that enters late makes all others wait, so that it stays shortest itself. Ranks that "
    "enter together and stay equally long are healthy."
)
# Begin of the chart's name and of its title, caption, and the palest and darkest percentages.
LATE = (
    "skew-late",
    "Enters late",
    "Delay of each rank's entry after the first rank's: median over calls and sizes, as a share of "
    "the time of the call on its slowest rank. The darkest: half of it or more.",
    (0, 50),
)
STAY = (
    "skew-stay",
    "Stays in the call",
    "Time of each rank in the call: median over calls and sizes, as a share of the time of the "
    "call on its slowest rank. Darker: shorter.",
    (100, 0),
)
Shares = dict[tuple[str, int], list[float]]  # operation and rank → percentages of the call, by size


def build_sections(run: ReportRun) -> Iterator[Section]:
    """Yield heat maps of ranks and operations for each backend whose samples are stored."""
    rows = []
    for backend in dict.fromkeys(line.case.backend for line in run.lines):
        late, stay = _measure(run, backend)
        kinds = ((LATE, late), (STAY, stay))
        charts = tuple(_draw(backend, kind, shares) for kind, shares in kinds if shares)
        rows += [charts] if charts else []
    if rows:
        yield Section("skew", "Skew of the ranks", INTRO, rows=tuple(rows))


def _measure(run: ReportRun, backend: str) -> tuple[Shares, Shares]:
    """Return how late each rank enters, and how long it stays, in percent of the call.

    The first is without cases of subgroups, and empty unless the clocks of the ranks are
    comparable.
    """
    parts: dict[str, list[Repetitions]] = {}
    for part in run.repetitions:
        if len(part.ranks) > 1 and np.isfinite(part.stay).all():
            parts.setdefault(part.case, []).append(part)
    known = [line for line in run.lines if line.case.backend == backend and line.case.key in parts]
    names = make_titles(title_parts(line.case) for line in known)
    late, stay = Shares(), Shares()
    for line in known:
        name = names[title_parts(line.case)]
        skewed = [
            r.launch for r in line.results if r.summary and r.summary.skew_seconds is not None
        ]
        for part in parts[line.case.key]:
            seconds = float(np.median(part.seconds))
            for i, rank in enumerate(part.ranks.tolist() if seconds else ()):
                stay.setdefault((name, rank), []).append(float(100 * part.stay[i] / seconds))
                if part.launch in skewed and line.case.group == "world":
                    late.setdefault((name, rank), []).append(float(100 * part.late[i] / seconds))
    return late, stay


def _draw(backend: str, kind: tuple[str, str, str, tuple[int, int]], shares: Shares) -> Chart:
    """Return a heat map; of very many ranks only those with the darkest cells."""
    name, title, caption, (pale, dark) = kind
    darkness: dict[int, float] = {}
    cells: list[dict[str, Any]] = []
    for (operation, rank), values in sorted(shares.items(), key=lambda each: each[0][1]):
        share = float(f"{statistics.median(values):.3g}")
        cells.append({"operation": operation, "rank": rank, "_value": share, "_marked": ""})
        darkness[rank] = max(darkness.get(rank, 0.0), (share - pale) / (dark - pale))
    darkest = sorted(darkness, key=lambda rank: -darkness[rank])[:MOST_RANKS]
    shown = [cell for cell in cells if cell["rank"] in darkest]
    look: dict[str, Any] = {"titles": (None, "rank"), "domain": (pale, dark)}
    drawing = draw_heat(shown, "% of the call", column="operation", row="rank", **look)
    return draw_chart(f"{name}-{backend}", f"{title}: {backend}", caption, drawing)
