"""The speed of each rank as a table: one row for each rank, only the slowest of many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpbench.records.table import Table, TableColumn

MOST_ROWS = 16
# why a rank did not run → heading of the share of its time
KEPT = {"queued": "waiting for core %", "throttled": "throttled %", "stolen": "stolen %"}
LEGEND = (
    "rates: of the best round, while the host's other ranks rest; at once: while all ranks "
    "compute; wait: how long the rank waits for the latest one in an all_reduce after equal work; "
    "waiting for core, throttled, stolen: share of the time in which the rank computes alone"
)


def build_tables(figures: Mapping[str, Any], backend: str) -> tuple[Table, ...]:
    """Return the table of the ranks; none if nothing was measured or there is one rank."""
    ranks = list(enumerate(figures.get("ranks") or []))
    if len(ranks) < 2:
        return ()
    loads, whens = figures["loads"], list(ranks[0][1]["seconds"])
    title = "speed of each rank"
    if len(ranks) > MOST_ROWS:
        first = next(iter(loads))
        title += f", the {MOST_ROWS} of {len(ranks)} that are slowest in {first} alone"
        ranks = sorted(ranks, key=lambda item: -item[1]["seconds"]["alone"][first])[:MOST_ROWS]
    columns = [
        TableColumn("rank"),
        TableColumn("host"),
        *(
            TableColumn(f"{name} {load['unit'] if when == 'alone' else 'at once'}")
            for name, load in loads.items()
            for when in whens
        ),
        TableColumn("wait ms", decimals=2),
        *(TableColumn(heading, decimals=0) for heading in KEPT.values()),
    ]
    rows = [_row(rank, shown, loads, whens) for rank, shown in ranks]
    known = [n for n, _ in enumerate(columns) if any(row[n] is not None for row in rows)]
    return (
        Table(
            title,
            tuple(columns[n] for n in known),
            tuple(tuple(row[n] for n in known) for row in rows),
            (LEGEND,),
        ),
    )


def _row(rank: int, shown: Mapping[str, Any], loads: Mapping[str, Any], whens: list[str]) -> Any:
    wait, shares = shown["wait_seconds"], shown["kept"]["alone"]
    return [
        rank,
        shown["host"],
        *(
            float(load["amount"] / shown["seconds"][when][name] / 1e9)
            for name, load in loads.items()
            for when in whens
        ),
        None if wait is None else wait * 1e3,
        *(None if (s := shares.get(reason)) is None else min(s, 1.0) * 100.0 for reason in KEPT),
    ]
