"""Bandwidth and latency between all ranks or hosts, as heat maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from ddpbench.present.charts.kinds import ROOMY
from ddpbench.present.doctor.section import Examined
from ddpbench.present.document import Chart, draw_chart
from ddpbench.present.matrix import draw_matrix


def draw(examined: Sequence[Examined]) -> Iterator[Chart]:
    """Yield the charts of all launches."""
    for number, one in enumerate(examined):
        figures, backend = one.examination.figures, one.examination.backend
        if figures.get("cells"):
            yield from _matrices(figures, f"-{number}" if number else "", one.where or backend)


def _matrices(figures: Mapping[str, Any], name: str, where: str) -> Iterator[Chart]:
    kind = figures["kind"].removesuffix("s")
    labels = _name_ends(figures)
    frame = pd.DataFrame(figures["cells"], columns=["sender", "receiver", "alone", "at_once", "s"])
    slow = _slow_ways(figures)
    pairs = list(zip(frame["sender"], frame["receiver"], strict=True))
    rates = frame["alone"].fillna(frame["at_once"]).astype(float)
    scale, unit = (1e9, "GB/s") if rates.min() >= 1e9 else (1e6, "MB/s")
    ends = list(labels.values())
    base = pd.DataFrame({"from": frame["sender"].map(labels), "to": frame["receiver"].map(labels)})
    alone = frame["alone"].notna().all()
    marks = ["slow" if pair in slow else "" for pair in pairs]
    bandwidth = base.assign(_value=(rates / scale).map(_rounded), _marked=marks)
    if alone and frame["at_once"].notna().any():
        at_once = (frame["at_once"].astype(float) / scale).map(_rounded)
        bandwidth["all pairs at once"] = [None if pd.isna(v) else f"{v:g} {unit}" for v in at_once]
    latency = base.assign(_value=(frame["s"] * 1e6).map(_rounded), _marked="")
    caption = (
        f"What each {kind} sends to each other one, in {unit}, "
        f"{'one pair at a time' if alone else 'all pairs at once'}; more is better."
        f"{' Outlined: slow each time it was measured.' if slow else ''}"
    )
    drawing = draw_matrix(bandwidth, ends, kind, unit)
    yield draw_chart(f"links-bandwidth{name}", f"Bandwidth, {where}", caption, drawing)
    caption = "Half a round trip of a small message, median, in µs; less is better."
    drawing = draw_matrix(latency, ends, kind, "µs")
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


def _rounded(value: float) -> float:
    """Return three digits, or all before the decimal point."""
    return float(f"{value:.3g}") if value < 1000 else float(round(value))
