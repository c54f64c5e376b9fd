"""Plots of every kind of run for a terminal: the values of its tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from ddpbench.analysis import lines, step_lines, steps
from ddpbench.catalog.sizes import readable
from ddpbench.records.schema import Run, StepResult
from ddpbench.records.terminal_text import escape_record
from ddpbench.records.watched import Watched
from ddpbench.render.collective_tables import group_by_title
from ddpbench.report.terminal.drawing import Axis, Bars, Lines, Point, draw, read_screen

MOST_LABELS = 6  # of an axis
MOST_BARS = 16


def make_plots(run: Run, stream: TextIO) -> str:
    """Return the plots of a run as this stream can show them, or a sentence if it has none."""
    screen, run = read_screen(stream), escape_record(run)
    plots = (*_operations(run), *_steps(run), *_examinations(run))
    return "\n".join(draw(plot, screen) for plot in plots) or "this run has nothing to plot\n"


def _operations(run: Run) -> Iterator[Lines | Bars]:
    """Yield time over message size for each table, with a line for each backend."""
    shown = [line for line in lines.lines(run) if line.seconds]
    for title, group in group_by_title(shown).items():
        series: dict[str, list[Point]] = {}
        for line in group:
            point = (float(line.case.nbytes), line.seconds or 0.0)
            series.setdefault(line.case.backend, []).append(point)
        if len({line.case.nbytes for line in group}) > 1:
            yield _over_size(f"{title}: time of a call", series)
        else:
            yield _bars(
                f"{title}: time of a call, ",
                {name: points[0][1] for name, points in series.items()},
            )


def _over_size(title: str, series: Mapping[str, Sequence[Point]]) -> Lines:
    """Return lines in a frame whose axes are logarithmic."""
    sizes, seconds = zip(*(point for points in series.values() for point in points), strict=True)
    return Lines(
        title,
        {
            name: [(math.log2(x), math.log10(y)) for x, y in points]
            for name, points in series.items()
        },
        Axis("message size", _label_sizes(min(sizes), max(sizes))),
        Axis("", _label_seconds(min(seconds), max(seconds))),
    )


def _label_sizes(low: float, high: float) -> dict[float, str]:
    """Return labels of a logarithmic axis of sizes: powers of two, or the ends around few."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    if last <= first:
        return {math.log2(size): readable(int(size)) for size in (low, high)}
    step = (last - first) // MOST_LABELS + 1
    return {power: readable(2**power) for power in range(first, last + 1, step)}


def _label_seconds(low: float, high: float) -> dict[float, str]:
    """Return labels of a logarithmic axis: the decades within, or 1, 2 and 5 around few."""
    factors = (1, 2, 5) if high < 50 * low else (1,)
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 2)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    if len(factors) > 1:
        low = max(tick for tick in ticks if tick <= low * 1.001)
        high = min(tick for tick in ticks if tick >= high * 0.999)
    return {math.log10(tick): _duration(tick) for tick in ticks if low <= tick <= high}


def _duration(seconds: float) -> str:
    factor, unit = _unit(seconds)
    return f"{seconds * factor:g} {unit}"


def _unit(seconds: float) -> tuple[float, str]:
    """Return how many of a unit a second has, and the unit that suits this time."""
    factors = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))
    return next(((f, unit) for f, unit in factors if seconds * f > 0.9999), factors[-1])


def _bars(title: str, seconds: Mapping[str, float]) -> Bars:
    factor, unit = _unit(max(seconds.values()))
    return Bars(f"{title}{unit}", {k: max(0.0, v) * factor for k, v in seconds.items()})


def _steps(run: Run) -> Iterator[Lines | Bars]:
    """Yield where the time of a step goes, then what changed over time, for each case."""
    for line in step_lines.lines(run):
        title = f"{line.case.workload} on {line.case.backend}"
        watched = next((result.watched for result in line.results if result.watched), None)
        if watched is not None:
            yield from _watched(title, watched)
        elif line.summary is not None:
            parts = {part.name: part.figure.value for part in line.summary.budget}
            first = [name for name in steps.CHAINS[0] if name in parts]
            phases = {phase.name: phase.slowest.value for phase in line.summary.phases}
            shown = {name: parts[name] for name in first} or phases
            if shown:
                yield _bars(f"{title}: parts of a step, ", shown)
        yield from _losses(title, line.results)


def _watched(title: str, watched: Watched) -> Iterator[Lines | Bars]:
    """Yield the phases of a watched step, and its time over the steps."""
    phases = {phase.name: phase.seconds for phase in watched.phases}
    if phases:
        yield _bars(f"{title}: phases of a step on the median rank, ", phases)
    moments = watched.moments
    if len(moments) > 1:
        factor, unit = _unit(max(moment.step_seconds for moment in moments))
        yield Lines(
            f"{title}: time of a step, {unit}",
            {
                "step": [(m.step, m.step_seconds * factor) for m in moments],
                "exposed communication": [(m.step, m.exposed_seconds * factor) for m in moments],
            },
            Axis("step", {}),
            Axis("", {}),
        )


def _losses(title: str, results: Sequence[StepResult]) -> Iterator[Lines]:
    """Yield the loss over the epochs of the first launch that trained."""
    epochs = next((result.epochs for result in results if len(result.epochs) > 1), ())
    losses = {
        "training": [(float(e.number), e.train_loss) for e in epochs],
        "validation": [(float(e.number), e.validation_loss) for e in epochs],
    }
    finite = {
        name: [(x, loss) for x, loss in points if loss is not None]
        for name, points in losses.items()
    }
    if series := {name: points for name, points in finite.items() if points}:
        yield Lines(f"{title}: loss", series, Axis("epoch", {}), Axis("", {}))


def _examinations(run: Run) -> Iterator[Bars]:
    """Yield the speed of each rank and the bandwidth of each link; of many, the slowest."""
    for examination in run.examinations:
        figures = examination.figures
        if examination.name == "stragglers" and figures.get("ranks"):
            load = next(iter(figures["loads"]))
            ranks = [rank["seconds"]["alone"][load] for rank in figures["ranks"]]
            shown = sorted(range(len(ranks)), key=lambda rank: -ranks[rank])[:MOST_BARS]
            seconds = {f"rank {rank}": ranks[rank] for rank in sorted(shown)}
            yield _bars(f"time of {load} on each rank alone, ", seconds)
        if examination.name == "links" and figures.get("cells"):
            kind = figures["kind"]
            ends = {n: host if kind == "hosts" else f"rank {n}" for n, host in figures["ends"]}
            rates = {
                f"{ends[one]} to {ends[other]}": (alone or at_once or 0.0) / 1e9
                for one, other, alone, at_once, _ in figures["cells"]
            }
            links = sorted(rates, key=lambda link: rates[link])[:MOST_BARS]
            title = f"bandwidth between {kind} on {examination.backend}, GB/s"
            yield Bars(title, {link: rates[link] for link in links})
