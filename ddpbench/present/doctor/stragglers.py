"""Speed of each rank: how fast it computes and copies, how long it waits, what held it up."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Colors, Lines
from ddpbench.present.doctor.section import Examined, find_examinations, make_section
from ddpbench.present.document import Chart, ReportRun, Section, make_table
from ddpbench.records.table import Table

WHEN = {"alone": "alone", "together": "all at once"}
KEPT = {"queued": "waiting for a core", "throttled": "throttled", "stolen": "stolen"}
SERIES = (*WHEN.values(), *KEPT.values())
# Of the backends, then of the series, whose colours are those of no backend.
SHAPES = ("circle", "square", "triangle-up", "circle", "square", "triangle-up", "diamond", "cross")
RATIO = 1.4  # of the others' time, from which the doctor calls a rank slow at a load
ALONE = "Alone: while the host's other ranks rest."
WAIT = (
    "How long the rank waits for the latest one in an all_reduce after equal work, median. The "
    "rank that the others wait for waits least."
)
HELD_UP = (
    "Share of the time in which the rank could not run while it computed alone; less is better."
)


def section(runs: Sequence[ReportRun]) -> Section | None:
    return make_section("stragglers", "Stragglers", runs, _charts)


def _charts(run: ReportRun) -> Iterator[Chart]:
    examined = [
        one
        for one in find_examinations([run], "stragglers".__eq__)
        if len(one.examination.figures.get("ranks") or []) > 1
    ]
    loads = {
        name: load for one in examined for name, load in one.examination.figures["loads"].items()
    }
    for name, load in loads.items():
        dots = pd.DataFrame([dot for one in examined for dot in _rates(one, name, load)])
        yield _chart(
            f"stragglers-{name.replace(' ', '-')}",
            f"Speed of each rank: {name}",
            f"Rate in the best round, in {load['unit']}; more is better. {ALONE}",
            dots,
            load["unit"],
        )
    waits = pd.DataFrame([dot for one in examined for dot in _waits(one)])
    if not waits.empty:
        yield _chart("stragglers-wait", "Wait of each rank", WAIT, waits, "ms", by="backend")
    kept = pd.DataFrame([dot for one in examined for dot in _kept(one)])
    kept = kept[kept.groupby("series")["value"].transform("max") > 0] if len(kept) else kept
    if not kept.empty:
        title = "What held up each rank"
        yield _chart("stragglers-held-up", title, HELD_UP, kept, "% of the time")


def _rates(one: Examined, name: str, load: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    ranks = one.examination.figures["ranks"]
    slow = _named(one, "slow-rank")
    for when in WHEN:
        known = {r: s for r, x in enumerate(ranks) if (s := x["seconds"].get(when, {}).get(name))}
        for rank, seconds in known.items():
            others = [value for other, value in known.items() if other not in slow]
            marked = rank in slow and seconds >= RATIO * statistics.median(others or [seconds])
            yield {
                **_place(one, rank),
                "series": WHEN[when],
                "value": _rounded(load["amount"] / seconds / 1e9),
                "marked": "slow" if marked else "",
            }


def _waits(one: Examined) -> Iterator[dict[str, Any]]:
    late = _named(one, "late-rank")
    for rank, shown in enumerate(one.examination.figures["ranks"]):
        if (wait := shown["wait_seconds"]) is not None:
            value = _rounded(wait * 1e3)
            mark = "late" if rank in late else ""
            yield {**_place(one, rank), "series": "wait", "value": value, "marked": mark}


def _kept(one: Examined) -> Iterator[dict[str, Any]]:
    for rank, shown in enumerate(one.examination.figures["ranks"]):
        for reason, words in KEPT.items():
            if (share := shown["kept"].get("alone", {}).get(reason)) is not None:
                value = _rounded(min(share, 1.0) * 100)
                yield {**_place(one, rank), "series": words, "value": value, "marked": ""}


def _place(one: Examined, rank: int) -> dict[str, Any]:
    shown = one.examination
    host = shown.figures["ranks"][rank]["host"]
    where = {"backend": shown.backend, "launch": shown.launch, "where": one.where}
    return {"rank": rank, "host": host, **where}


def _named(one: Examined, code: str) -> set[int]:
    """Return the ranks that findings of this code name."""
    places = [found.place for found in one.examination.findings if found.code == code]
    return {rank for place in places for rank in place.get("ranks", [place["rank"]])}


def _chart(
    name: str, title: str, caption: str, dots: pd.DataFrame, unit: str, *, by: str = "series"
) -> Chart:
    """Return the dots as a chart and a table.

    by: the column whose values have colours and shapes of their own, "series" or "backend".
    """
    marks = [mark for mark in dots["marked"].unique() if mark]
    marked = f" Marked: found {' and '.join(marks)}." if marks else ""
    return Chart(name, title, caption + marked, _draw(dots, unit, by), _tabulate(dots, title, unit))


def _draw(dots: pd.DataFrame, unit: str, by: str) -> Lines:
    every = (*theme.BACKENDS, *SERIES) if by == "series" else theme.order_backends(dots["backend"])
    ranks = dots["rank"]
    tips = ("rank", "host", "backend", "launch", "series")
    return Lines(
        data=dots,
        x=Axis("rank", "rank", theme.COUNT_LABELS, domain=(ranks.min() - 0.5, ranks.max() + 0.5)),
        y=Axis("value", unit, theme.NUMBER_LABELS, zero=True),
        tips={**{name: name for name in tips}, "value": unit},
        colors=Colors(by, tuple(every)),
        connected=False,
        shape=by,
        shapes=dict(zip(every, SHAPES, strict=False)),
    )


def _tabulate(dots: pd.DataFrame, title: str, unit: str) -> Table:
    """Return a row for each rank, a column for each series of each launch."""
    columns = list(dict.fromkeys(zip(dots["where"], dots["series"], strict=True)))
    cells = {
        (rank, where, series): f"{value:g} {mark}" if mark else value
        for rank, where, series, value, mark in zip(
            *(dots[name] for name in ("rank", "where", "series", "value", "marked")), strict=True
        )
    }
    hosts = dict(zip(dots["rank"], dots["host"], strict=True))
    headings = ["rank", "host", *(", ".join(filter(None, column)) for column in columns)]
    rows = [
        (rank, host, *(cells.get((rank, *column)) for column in columns))
        for rank, host in sorted(hosts.items())
    ]
    return make_table(f"{title}, {unit}", headings, rows, left=("host",))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
