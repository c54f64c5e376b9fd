"""What each rank or host sends to each other one: bandwidth and latency as heat maps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from ddpbench.records.table import Table, TableColumn
from ddpbench.report.chart import Chart, ReportRun, Section
from ddpbench.report.examination_results import arrange, describe, find_examinations

MOST_VALUES = 12  # ends of a matrix whose cells show their values
ROOMY = 8  # ends whose values have room on a phone in the usual size
LOGARITHMIC = 8.0  # ratio of the largest value to the least from which colours are logarithmic
MIDDLE = 0.5  # of the colours: the ink of a value changes there
PHONE, CHARACTER = 280, 7  # pixels: width of all columns on a phone, width of a character
ROW, LEAST_HEIGHT, HEIGHT = 30, 90, 340  # pixels
HIDDEN = ("slow", "text", "beyond")  # columns that no tooltip shows


def section(runs: Sequence[ReportRun]) -> Section | None:
    """Return the matrices of all launches; None if no run measured links."""
    examined = find_examinations(runs, "links".__eq__)
    if not examined:
        return None
    rows = arrange(runs, lambda run: list(_charts(run)))
    return describe("links", "Links", examined, rows)


def draw_matrix(cells: pd.DataFrame, ends: Sequence[str], kind: str, unit: str) -> dict[str, Any]:
    """Return a heat map with a row for each sender and a column for each receiver.

    cells: columns "from" and "to", which are names in `ends`, "value", "slow" (bool: outlined), and
    others, which the tooltip shows under their names.
    kind: what the ends are, "rank" or "host". unit: of the values.
    """
    share, scale = _colors(cells["value"])
    cells = cells.assign(beyond=share > MIDDLE)
    tips = [
        alt.Tooltip(field=c, type="nominal") for c in map(str, cells) if c not in ("value", *HIDDEN)
    ]
    value = alt.Tooltip(field="value", type="nominal", title=unit)
    base = alt.Chart(cells).encode(
        x=alt.X("to:N", title=f"to {kind}", axis=_labels(ends), scale=_band(ends)),
        y=alt.Y(
            "from:N", title=f"from {kind}", axis=alt.Axis(labelOverlap=True), scale=_band(ends)
        ),
        tooltip=[*tips[:2], value, *tips[2:]],
    )
    heat = base.mark_rect().encode(color=alt.Color("value:Q", title=unit, scale=scale))
    layers: list[alt.Chart] = [heat]
    small = len(ends) <= MOST_VALUES
    if small:
        for style, chosen in (("on-low", "!datum.beyond"), ("on-high", "datum.beyond")):
            values = base.mark_text(style=style, fontSize=11 if len(ends) <= ROOMY else 9).encode(
                text="value:N"
            )
            layers.append(values.transform_filter(chosen))
    if cells["slow"].any():
        outline = base.mark_rect(style="marked", strokeWidth=2.5 if small else 1)
        layers.append(outline.transform_filter("datum.slow"))
    height = min(HEIGHT, max(LEAST_HEIGHT, ROW * len(ends)))
    spec: dict[str, Any] = alt.layer(*layers, height=height).to_dict()
    return spec


def build_matrix(cells: pd.DataFrame, ends: Sequence[str], kind: str, unit: str) -> Table:
    """Return the values of `draw_matrix` as a table; a slow one is marked by "slow"."""
    values = {
        (a, b): f"{value:g} slow" if slow else value
        for a, b, value, slow in zip(
            *(cells[c] for c in ("from", "to", "value", "slow")), strict=True
        )
    }
    return Table(
        f"{unit}; each row sends to the columns",
        (TableColumn(f"from {kind}", "left"), *(TableColumn(end) for end in ends)),
        tuple((sender, *(values.get((sender, end)) for end in ends)) for sender in ends),
    )


def _colors(values: pd.Series[float]) -> tuple[pd.Series[float], alt.Scale]:
    """Return where each value lies in the range of colours, 0 to 1, and their scale."""
    least, most = float(values.min()), float(values.max())
    if least > 0 and most / least >= LOGARITHMIC:
        scale = alt.Scale(type="log", domain=[least, most])
        return np.log(values / least) / math.log(most / least), scale
    return values / (most or 1.0), alt.Scale(domain=[0, most])


def _band(ends: Sequence[str]) -> alt.Scale:
    return alt.Scale(domain=list(ends))


def _labels(ends: Sequence[str]) -> alt.Axis:
    level = len(ends) > MOST_VALUES or max(map(len, ends)) * len(ends) * CHARACTER < PHONE
    return alt.Axis(
        labelAngle=0 if level else -40, labelOverlap=True, labelSeparation=6, labelLimit=120
    )


def _charts(run: ReportRun) -> Iterator[Chart]:
    for number, one in enumerate(find_examinations([run], "links".__eq__)):
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
    base = pd.DataFrame(
        {
            "from": frame["sender"].map(labels),
            "to": frame["receiver"].map(labels),
            "slow": [pair in slow for pair in pairs],
        }
    )
    alone = frame["alone"].notna().all()
    bandwidth = base.assign(value=(rates / scale).map(_rounded))
    if alone and frame["at_once"].notna().any():
        at_once = (frame["at_once"].astype(float) / scale).map(_rounded)
        bandwidth["all pairs at once"] = [None if pd.isna(v) else f"{v:g} {unit}" for v in at_once]
    latency = base.assign(value=(frame["s"] * 1e6).map(_rounded), slow=False)
    ends = list(labels.values())
    outlined = " Outlined: slow each time it was measured." if slow else ""
    yield Chart(
        f"links-bandwidth{name}",
        f"Bandwidth, {where}",
        f"What each {kind} sends to each other one, in {unit}, "
        f"{'one pair at a time' if alone else 'all pairs at once'}; more is better.{outlined}",
        draw_matrix(bandwidth, ends, kind, unit),
        build_matrix(bandwidth, ends, kind, unit),
    )
    yield Chart(
        f"links-latency{name}",
        f"Latency, {where}",
        "Half a round trip of a small message, median, in µs; less is better.",
        draw_matrix(latency, ends, kind, "µs"),
        build_matrix(latency, ends, kind, "µs"),
    )


def _name_ends(figures: Mapping[str, Any]) -> dict[int, str]:
    """Return a short name for each end: its host, its rank, or both if there is room."""
    hosts = {host for _, host in figures["ends"]}
    if figures["kind"] == "hosts" and len(hosts) == len(figures["ends"]):
        return dict(figures["ends"])
    if len(hosts) == 1 or len(figures["ends"]) > MOST_VALUES:
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
