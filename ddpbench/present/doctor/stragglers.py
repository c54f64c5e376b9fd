"""Speed of each rank: how fast it computes and copies, how long it waits, what held it up."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import pandas as pd

from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Lines
from ddpbench.present.doctor.section import Examined, find_examinations
from ddpbench.present.document import Chart, ReportRun, draw_chart

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


def draw(run: ReportRun) -> Iterator[Chart]:
    """Yield the charts of a run."""
    examined = [
        one
        for one in find_examinations([run], "stragglers")
        if len(one.examination.figures.get("ranks") or []) > 1
    ]
    loads = {
        name: load for one in examined for name, load in one.examination.figures["loads"].items()
    }
    for name, load in loads.items():
        dots = [dot for one in examined for dot in _rates(one, name, load)]
        chart = f"stragglers-{name.replace(' ', '-')}", f"Speed of each rank: {name}"
        caption = f"Rate in the best round, in {load['unit']}; more is better. {ALONE}"
        yield from _chart(*chart, caption, dots, load["unit"])
    waits = [dot for one in examined for dot in _waits(one)]
    yield from _chart("stragglers-wait", "Wait of each rank", WAIT, waits, "ms")
    kept = [dot for one in examined for dot in _kept(one)]
    there = {dot["series"] for dot in kept if dot["_y"]}
    kept = [dot for dot in kept if dot["series"] in there]
    held_up = "stragglers-held-up", "What held up each rank"
    yield from _chart(*held_up, HELD_UP, kept, "% of the time")


def _rates(one: Examined, name: str, load: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    ranks = one.examination.figures["ranks"]
    slow = _named(one, "slow-rank")
    for when in WHEN:
        known = {r: s for r, x in enumerate(ranks) if (s := x["seconds"].get(when, {}).get(name))}
        for rank, seconds in known.items():
            others = [value for other, value in known.items() if other not in slow]
            marked = rank in slow and seconds >= RATIO * statistics.median(others or [seconds])
            rate = load["amount"] / seconds / 1e9
            yield _dot(one, rank, WHEN[when], rate, "slow" if marked else "")


def _waits(one: Examined) -> Iterator[dict[str, Any]]:
    late = _named(one, "late-rank")
    for rank, shown in enumerate(one.examination.figures["ranks"]):
        if (wait := shown["wait_seconds"]) is not None:
            series = one.examination.backend
            yield _dot(one, rank, series, wait * 1e3, "late" if rank in late else "")


def _kept(one: Examined) -> Iterator[dict[str, Any]]:
    for rank, shown in enumerate(one.examination.figures["ranks"]):
        for reason, words in KEPT.items():
            if (share := shown["kept"].get("alone", {}).get(reason)) is not None:
                yield _dot(one, rank, words, min(share, 1.0) * 100, "")


def _dot(one: Examined, rank: int, series: str, value: float, mark: str) -> dict[str, Any]:
    """Return a value of a rank. series: what it is, which has a colour of its own."""
    shown = one.examination
    return {
        "rank": rank,
        "host": shown.figures["ranks"][rank]["host"],
        "backend": shown.backend,
        "launch": shown.launch,
        "series": series,
        "_x": rank,
        "_y": float(f"{value:.3g}"),
        "_marked": mark,
    }


def _named(one: Examined, code: str) -> set[int]:
    """Return the ranks that findings of this code name."""
    places = [found.place for found in one.examination.findings if found.code == code]
    return {rank for place in places for rank in place.get("ranks", [place["rank"]])}


def _chart(
    name: str, title: str, caption: str, dots: Sequence[dict[str, Any]], unit: str
) -> Iterator[Chart]:
    """Yield the dots as a chart; none without any."""
    if not dots:
        return
    data = pd.DataFrame(dots)
    marks = [mark for mark in data["_marked"].unique() if mark]
    if marks:
        caption += f" Marked: found {' and '.join(marks)}."
    values = data["_y"].map("{:g}".format).str.cat(data["_marked"], " ").str.strip()
    # The colours of SERIES are those of no backend.
    known = [*theme.BACKENDS, *SERIES, *data["series"]]
    order = tuple(dict.fromkeys(known))
    ranks = data["rank"]
    drawing = Lines(
        data=data.assign(**{unit: values}),
        x=Axis("rank", theme.COUNT_LABELS, domain=(ranks.min() - 0.5, ranks.max() + 0.5)),
        y=Axis(unit, theme.NUMBER_LABELS, zero=True),
        color="series",
        order=order,
        connected=False,
        shape="series",
        shapes=dict(zip(order, cycle(SHAPES), strict=False)),
    )
    yield draw_chart(name, title, caption, drawing)
