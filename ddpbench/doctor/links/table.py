"""The links as a matrix of what each sends to each; of many ends the slowest links only."""

from __future__ import annotations

from typing import Any

from ddpbench.records.schema import Examination
from ddpbench.render.style import Style

MOST_ENDS = 10  # in a matrix
SLOWEST = 10  # in a list


def blocks(examination: Examination, style: Style) -> list[str]:
    """Blocks of text; none where nothing was measured."""
    figures = examination.figures
    if not figures.get("cells"):
        return []
    names = _names(figures)
    rates = [rate for cell in figures["cells"] for rate in cell[2:4] if rate]
    scale, unit = (1e9, "GB/s") if min(rates) >= 1e9 else (1e6, "MB/s")
    if len(names) > MOST_ENDS:
        return [_slowest(figures, names, scale, unit, style)]
    both = any(cell[3] for cell in figures["cells"])
    how = " / ".join((["alone"] if not figures["halved"] else []) + (["all at once"] * both))
    carried, waits = {}, {}
    for sender, receiver, alone, at_once, latency in figures["cells"]:
        shown = [_short(rate / scale) for rate in (alone, at_once) if rate]
        carried[sender, receiver] = " / ".join(shown)
        waits[sender, receiver] = _short(latency * 1e6)
    return [
        _matrix(f"{unit} {how}", carried, names, style),
        _matrix("latency µs, half a round trip", waits, names, style),
    ]


def _matrix(
    what: str, cells: dict[tuple[int, int], str], names: dict[int, str], style: Style
) -> str:
    rows = [[name, *(cells.get((a, b), "-") for b in names)] for a, name in names.items()]
    return style.block(
        f"{what}; each row sends to the columns", style.table(rows, ["", *names.values()]), 1
    )


def _slowest(
    figures: dict[str, Any], names: dict[int, str], scale: float, unit: str, style: Style
) -> str:
    cells = sorted(figures["cells"], key=lambda cell: cell[2] or cell[3])
    rows = [
        [names[sender], names[receiver],
         *(_short(rate / scale) if rate else "-" for rate in (alone, at_once)),
         _short(latency * 1e6)]
        for sender, receiver, alone, at_once, latency in cells[:SLOWEST]
    ]  # fmt: skip
    heads = ["from", "to", f"{unit} alone", "all at once", "latency µs"]
    title = f"the slowest {len(rows)} of {len(cells)} ways between {figures['kind']}"
    return style.block(title, style.table(rows, heads), 1)


def _names(figures: dict[str, Any]) -> dict[int, str]:
    """What stands for each end: its host, its rank, or both."""
    hosts = {host for _, host in figures["ends"]}
    if figures["kind"] == "hosts" and len(hosts) == len(figures["ends"]):
        return dict(figures["ends"])
    if len(hosts) == 1:
        return {rank: f"rank {rank}" for rank, _ in figures["ends"]}
    return {rank: f"{rank} {host}" for rank, host in figures["ends"]}


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
