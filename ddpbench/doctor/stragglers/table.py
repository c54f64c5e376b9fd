"""How fast each rank is, alone and with the others: a row a rank, the slowest of many."""

from __future__ import annotations

from typing import Any

from ddpbench.records.schema import Examination
from ddpbench.render.column import digits
from ddpbench.render.style import Style

MOST_ROWS = 16
KEPT = {"queued": "no core %", "throttled": "throttled %", "stolen": "stolen %"}
LEGEND = (
    "rates are those of the best round: while the other ranks of the machine rest, and at once, "
    "while all compute; wait: for the last rank in an all_reduce after equal work; no core, "
    "throttled, stolen: of its time alone"
)


def blocks(examination: Examination, style: Style) -> list[str]:
    """A table of the ranks; none where nothing was measured, or there is one rank."""
    figures: dict[str, Any] = examination.figures
    ranks = list(enumerate(figures.get("ranks") or []))
    if len(ranks) < 2:
        return []
    loads, whens = figures["loads"], list(ranks[0][1]["seconds"])
    title = "speed of each rank"
    if len(ranks) > MOST_ROWS:
        first = next(iter(loads))
        ranks = sorted(ranks, key=lambda its: -its[1]["seconds"]["alone"][first])[:MOST_ROWS]
        title += f", the {MOST_ROWS} of {len(figures['ranks'])} that are slowest in {first} alone"
    heads = ["rank", "host"]
    heads += [
        f"{name} {load['unit'] if when == 'alone' else 'at once'}"
        for name, load in loads.items()
        for when in whens
    ]
    cells = [_cells(rank, its, loads, whens) for rank, its in ranks]
    # A column of which nothing is known in any rank is left out.
    tails = ["wait ms", *KEPT.values()]
    heads += tails
    known = [n for n, _ in enumerate(heads) if any(row[n] != "-" for row in cells)]
    table = style.table([[row[n] for n in known] for row in cells], [heads[n] for n in known])
    return [style.block(title, table), LEGEND]


def _cells(rank: int, its: dict[str, Any], loads: dict[str, Any], whens: list[str]) -> list[str]:
    rates = [
        digits(load["amount"] / its["seconds"][when][name] / 1e9)
        for name, load in loads.items()
        for when in whens
    ]
    wait, kept = its["wait_seconds"], its["kept"]["alone"]
    shares = [kept.get(kind) for kind in KEPT]
    return [
        str(rank), its["host"], *rates, "-" if wait is None else f"{wait * 1e3:.2f}",
        *("-" if share is None else f"{min(share, 1.0) * 100:.0f}" for share in shares),
    ]  # fmt: skip
