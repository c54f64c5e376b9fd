"""Stragglers in the output: lines on the rates and waits of all ranks, and their table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddpbench.doctor.stragglers import judge
from ddpbench.doctor.stragglers.judge import ALONE, TOGETHER, Load, Pass
from ddpbench.records.table import Table, TableColumn

MOST_ROWS = 16
WORDS = {ALONE: "alone", TOGETHER: "all at once"}
# why a rank did not run → heading of the share of its time
KEPT = {"queued": "waiting for core %", "throttled": "throttled %", "stolen": "stolen %"}
LEGEND = (
    "rates: of the best round, while the host's other ranks rest; at once: while all ranks "
    "compute; wait: how long the rank waits for the latest one in an all_reduce after equal work; "
    "waiting for core, throttled, stolen: share of the time in which the rank computes alone"
)


def summarise(
    passes: Sequence[Pass], loads: Mapping[str, Load], work_seconds: float
) -> Iterator[str]:
    """Yield a line on the rates for each `when`, and one on the waits."""
    for when in passes[0][0].seconds:
        rates = [
            f"{name} {judge.span(judge.rates(passes, load, when))} {load.unit}"
            for name, load in loads.items()
        ]
        yield f"best rate of each rank, {WORDS[when]}: {', '.join(rates)}"
    waits = [wait * 1e3 for one in passes for wait in judge.wait_seconds(one) if wait is not None]
    if waits:
        yield (
            f"after {work_seconds * 1e3:.3g} ms of equal work the ranks wait for the latest "
            f"{judge.span(waits)} ms in an all_reduce (median)"
        )


def build_tables(figures: Mapping[str, Any], backend: str) -> tuple[Table, ...]:
    """Return the table of the ranks; none if nothing was measured or there is one rank."""
    ranks = list(enumerate(figures.get("ranks") or []))
    if len(ranks) < 2:
        return ()
    title = "speed of each rank"
    if len(ranks) > MOST_ROWS:
        first = next(iter(figures["loads"]))
        title += f", the {MOST_ROWS} of {len(ranks)} that are slowest in {first} alone"
        ranks = sorted(ranks, key=lambda item: -item[1]["seconds"][ALONE][first])[:MOST_ROWS]
    rows = [_row(rank, shown, figures["loads"]) for rank, shown in ranks]
    columns = [column for column in rows[0] if any(row[column] is not None for row in rows)]
    cells = tuple(tuple(row[column] for column in columns) for row in rows)
    return (Table(title, tuple(columns), cells, (LEGEND,)),)


def _row(
    rank: int, shown: Mapping[str, Any], loads: Mapping[str, Any]
) -> dict[TableColumn, object]:
    wait, shares = shown["wait_seconds"], shown["kept"][ALONE]
    row: dict[TableColumn, object] = {TableColumn("rank"): rank, TableColumn("host"): shown["host"]}
    for name, load in loads.items():
        for when, seconds in shown["seconds"].items():
            heading = f"{name} {load['unit'] if when == ALONE else 'at once'}"
            row[TableColumn(heading)] = float(load["amount"] / seconds[name] / 1e9)
    row[TableColumn("wait ms", decimals=2)] = None if wait is None else wait * 1e3
    for reason, heading in KEPT.items():
        share = shares.get(reason)
        row[TableColumn(heading, decimals=0)] = None if share is None else min(share, 1.0) * 100.0
    return row
