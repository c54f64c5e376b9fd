"""The links as tables: a matrix of rates and one of latencies; of many ends the slowest links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpbench.records.table import Table, TableColumn

MOST_ENDS = 10  # in a matrix
SLOWEST = 10  # in a list


def build_tables(figures: Mapping[str, Any], backend: str) -> tuple[Table, ...]:
    """Return the tables; none if nothing was measured."""
    cells = figures.get("cells")
    if not cells:
        return ()
    names = _names(figures)
    rates = [rate for cell in cells for rate in cell[2:4] if rate]
    scale, unit = (1e9, "GB/s") if min(rates) >= 1e9 else (1e6, "MB/s")
    if len(names) > MOST_ENDS:
        return (_slowest(figures, names, scale, unit),)
    ways = [] if figures["halved"] else ["alone"]
    if any(cell[3] for cell in cells):
        ways.append("all at once")
    carried = {
        (sender, receiver): " / ".join(_short(rate / scale) for rate in (alone, at_once) if rate)
        for sender, receiver, alone, at_once, _ in cells
    }
    latencies = {
        (sender, receiver): _short(latency * 1e6) for sender, receiver, _, _, latency in cells
    }
    return (
        _matrix(f"{unit} {' / '.join(ways)}", carried, names),
        _matrix("latency µs, half a round trip", latencies, names),
    )


def _matrix(content: str, cells: Mapping[tuple[int, int], str], names: Mapping[int, str]) -> Table:
    return Table(
        f"{content}; each row sends to the columns",
        tuple(map(TableColumn, ["", *names.values()])),
        tuple(
            (name, *(cells.get((sender, receiver)) for receiver in names))
            for sender, name in names.items()
        ),
    )


def _slowest(
    figures: Mapping[str, Any], names: Mapping[int, str], scale: float, unit: str
) -> Table:
    cells = sorted(figures["cells"], key=lambda cell: cell[2] or cell[3])
    rows = [
        (
            names[sender],
            names[receiver],
            *(_short(rate / scale) if rate else None for rate in (alone, at_once)),
            _short(latency * 1e6),
        )
        for sender, receiver, alone, at_once, latency in cells[:SLOWEST]
    ]
    headings = ["from", "to", f"{unit} alone", "all at once", "latency µs"]
    return Table(
        f"the slowest {len(rows)} of {len(cells)} ways between {figures['kind']}",
        tuple(map(TableColumn, headings)),
        tuple(rows),
    )


def _names(figures: Mapping[str, Any]) -> dict[int, str]:
    """Return a name for each end: its host, its rank, or both."""
    hosts = {host for _, host in figures["ends"]}
    if figures["kind"] == "hosts" and len(hosts) == len(figures["ends"]):
        return dict(figures["ends"])
    if len(hosts) == 1:
        return {rank: f"rank {rank}" for rank, _ in figures["ends"]}
    return {rank: f"{rank} {host}" for rank, host in figures["ends"]}


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
