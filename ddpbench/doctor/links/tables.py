"""Links in the output: a line on the rates of all links, and the tables.

A row of figures["cells"] is sender, receiver, rate alone, rate all at once, latency in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ddpbench.records.table import Table, TableColumn

MOST_ENDS = 10  # in a matrix
SLOWEST = 10  # in a list


def summarise(title: str, cells: Sequence[Sequence[Any]]) -> list[str]:
    """Return one line on the rates and latencies of these cells; none without cells."""
    if not cells:
        return []
    rates = [(alone or at_once) / 1e6 for _, _, alone, at_once, _ in cells]
    shares = [at_once / alone for _, _, alone, at_once, _ in cells if at_once and alone]
    where = "alone" if all(cell[2] for cell in cells) else "all at once"
    parts = [f"{title}: {_range(rates)} MB/s {where}"]
    if shares:
        parts.append(f"{median(shares) * 100:.0f} % of that all at once")
    return [", ".join([*parts, f"latency {_range([cell[4] * 1e6 for cell in cells])} µs"])]


def _range(values: Sequence[float]) -> str:
    middle, least, most = map(_short, (median(values), min(values), max(values)))
    return f"{middle} ({least} … {most})"


def build_tables(figures: Mapping[str, Any], backend: str) -> tuple[Table, ...]:
    """Return matrices of rates and latencies; with many ends a list of the slowest cells."""
    cells, names = figures["cells"], _name_ends(figures)
    measured = [rate for cell in cells for rate in cell[2:4] if rate]
    scale, unit = (1e9, "GB/s") if min(measured) >= 1e9 else (1e6, "MB/s")
    shown = [
        (names[a], names[b], _scaled(alone, scale), _scaled(at_once, scale), _short(latency * 1e6))
        for a, b, alone, at_once, latency in sorted(cells, key=lambda cell: cell[2] or cell[3])
    ]
    if len(names) > MOST_ENDS:
        headings = ["from", "to", f"{unit} alone", "all at once", "latency µs"]
        title = f"the slowest {SLOWEST} of {len(cells)} ways between {figures['kind']}"
        return (Table(title, tuple(map(TableColumn, headings)), tuple(shown[:SLOWEST])),)
    ways = [] if figures["halved"] else ["alone"]
    ways += ["all at once"] if any(cell[3] for cell in cells) else []
    rates = {(a, b): " / ".join(filter(None, both)) for a, b, *both, _ in shown}
    latencies = {(a, b): latency for a, b, _, _, latency in shown}
    return (
        _matrix(f"{unit} {' / '.join(ways)}", rates, list(names.values())),
        _matrix("latency µs, half a round trip", latencies, list(names.values())),
    )


def _matrix(content: str, cells: Mapping[tuple[str, str], str], names: Sequence[str]) -> Table:
    return Table(
        f"{content}; each row sends to the columns",
        tuple(map(TableColumn, ["", *names])),
        tuple((sender, *(cells.get((sender, receiver)) for receiver in names)) for sender in names),
    )


def _name_ends(figures: Mapping[str, Any]) -> dict[int, str]:
    """Return a name for each end: its host, its rank, or both."""
    hosts = {host for _, host in figures["ends"]}
    if figures["kind"] == "hosts" and len(hosts) == len(figures["ends"]):
        return dict(figures["ends"])
    if len(hosts) == 1:
        return {rank: f"rank {rank}" for rank, _ in figures["ends"]}
    return {rank: f"{rank} {host}" for rank, host in figures["ends"]}


def _scaled(rate: float | None, scale: float) -> str | None:
    return _short(rate / scale) if rate else None


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
