"""Bandwidth and latency between all ranks or hosts, as heat maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddpbench.present.charts.kinds import ROOMY, draw_pairs
from ddpbench.present.document import Chart, draw_chart


def draw_links(figures: Mapping[str, Any], name: str, where: str) -> Iterator[Chart]:
    """Yield the charts of one launch.

    name: ends the names of the charts. where: what tells the launch from others.
    """
    kind, slow = figures["kind"].removesuffix("s"), _slow_ways(figures)
    labels = _name_ends(figures)
    alone = all(cell[2] is not None for cell in figures["cells"])
    rates = [cell[2] if cell[2] is not None else cell[3] for cell in figures["cells"]]
    scale, unit = (1e9, "GB/s") if min(rates) >= 1e9 else (1e6, "MB/s")
    bandwidth, latency = [], []
    for (sender, receiver, _, at_once, seconds), rate in zip(figures["cells"], rates, strict=True):
        ends = {"from": labels[sender], "to": labels[receiver]}
        mark = "slow" if (sender, receiver) in slow else ""
        cell = {**ends, "_value": _round(rate / scale), "_marked": mark}
        if alone and at_once is not None:
            cell["all pairs at once"] = f"{_round(at_once / scale):g} {unit}"
        bandwidth.append(cell)
        latency.append({**ends, "_value": _round(seconds * 1e6), "_marked": ""})
    caption = (
        f"What each {kind} sends to each other one, in {unit}, "
        f"{'one pair at a time' if alone else 'all pairs at once'}; more is better."
        f"{' Outlined: slow each time it was measured.' if slow else ''}"
    )
    drawing = draw_pairs(bandwidth, list(labels.values()), kind, unit)
    yield draw_chart(f"links-bandwidth{name}", f"Bandwidth, {where}", caption, drawing)
    caption = "Half a round trip of a small message, median, in µs; less is better."
    drawing = draw_pairs(latency, list(labels.values()), kind, "µs")
    yield draw_chart(f"links-latency{name}", f"Latency, {where}", caption, drawing)


def _name_ends(figures: Mapping[str, Any]) -> dict[int, str]:
    """Return a short name for each end: its host, its rank, or both if there is room."""
    hosts = {host for _, host in figures["ends"]}
    if figures["kind"] == "hosts" and len(hosts) == len(figures["ends"]):
        return dict(figures["ends"])
    if len(hosts) == 1 or len(figures["ends"]) > ROOMY:
        return {rank: str(rank) for rank, _ in figures["ends"]}
    return {rank: f"{rank} {host}" for rank, host in figures["ends"]}


def _slow_ways(figures: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Return the cells of all confirmed suspects: a link, or all links of an end."""
    hosts = dict(figures["ends"])
    ways: set[tuple[int, int]] = set()
    for again in figures.get("again", []):
        if not again["confirmed"]:
            continue
        one, other = (_ranks(again[side], again["kind"], hosts) for side in ("one", "other"))
        for a in one:
            for b in other or set(hosts) - one:
                ways |= {(a, b)} if again["ways"] != "receives" else set()
                ways |= {(b, a)} if again["ways"] != "sends" else set()
    return ways


def _ranks(ends: Sequence[int], kind: str, hosts: Mapping[int, str]) -> set[int]:
    """Return the ranks of these ends; a host is named by one of its ranks."""
    if kind != "host":
        return set(ends)
    named = {hosts[end] for end in ends}
    return {rank for rank, host in hosts.items() if host in named}


def _round(value: float) -> float:
    """Return three digits, or all before the decimal point."""
    return float(f"{value:.3g}") if value < 1000 else float(round(value))
