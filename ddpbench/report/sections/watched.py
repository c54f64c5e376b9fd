"""A watched job: its step and its ranks over time, loss and load, collectives and links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpbench.records.schema import Run
from ddpbench.records.watched import Watched
from ddpbench.report.chart import Chart, ReportRun, Section, side_by_side
from ddpbench.report.charts import watch_communication, watch_over_time, watch_ranks
from ddpbench.report.charts.watch_timeline import build_timeline


def section(runs: Sequence[ReportRun]) -> Section | None:
    """Return the charts of all watched jobs; None if no run is of a job with steps or calls."""
    made = {run.label: list(_rows(run.run)) for run in runs}
    watched = [run for run in runs if made[run.label]]
    if not watched:
        return None
    rows = tuple(made[watched[0].label])
    if len(watched) > 1:
        rows = side_by_side(watched, lambda run: [c for row in made[run.label] for c in row])
    return Section(
        "watch",
        "Watched job",
        "Where the time of a step went while the job ran. Seconds are of one step; a rank's own "
        "time is all but what it is blocked in collectives.",
        rows=rows,
    )


def _rows(run: Run) -> Iterator[tuple[Chart, ...]]:
    for result in run.steps:
        if result.watched is not None:
            yield from filter(None, _rows_of(run, result.watched, result.case.backend))


def _rows_of(run: Run, watched: Watched, backend: str) -> Iterator[tuple[Chart, ...]]:
    if len(watched.moments) > 1:
        timeline = build_timeline(run, watched)
        for chart in watch_over_time.draw(timeline, backend):
            yield (chart,)
    yield (*watch_ranks.draw_ranks(run, watched), *watch_ranks.draw_extra(run, watched))
    yield tuple(watch_communication.draw_collectives(watched))
    yield tuple(watch_communication.draw_links(run, watched))
