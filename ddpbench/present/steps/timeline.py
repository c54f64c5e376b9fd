"""A typical DDP step as a timeline: a lane for each rank, its buckets above its compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Spans
from ddpbench.present.document import Chart, ReportRun, draw_chart
from ddpbench.present.steps.columns import ms
from ddpbench.records.schema import Bucket, StepSummary

MOST_LANES = 8  # ranks
PHASES = ("forward", "backward", "optimizer")
CAPTION = (
    "Median of each span over the steps of the launch with the median step, summed over "
    "micro-batches. The stamps of the ranks are aligned where their steps begin."
)
BUCKETS = (
    "Above: each bucket of gradients of the last micro-batch from its handover until it is "
    "reduced; pale while it waits for other ranks. Blocked: backward has handed over its last "
    "bucket and waits."
)


@dataclass(frozen=True)
class Lane:
    """The median step of one rank, in seconds."""

    name: str
    phases: tuple[float, ...]  # by PHASES
    # Of each bucket: handed over and reduced, since the last backward began, and its transfer.
    buckets: tuple[tuple[float, ...], ...]

    @property
    def own_seconds(self) -> float:
        """The time until the rank has computed all gradients."""
        return self.phases[0] + max((bucket[0] for bucket in self.buckets), default=self.phases[1])

    def spans(self, infos: Sequence[Bucket], accumulate: int) -> Iterator[dict[str, Any]]:
        """Yield what was when, and above the lane the buckets, the first one uppermost.

        accumulate: the micro-batches; their backwards are one span, whose end is the last one's.
        """
        forward, backward, optimizer = self.phases
        ends = forward + backward
        reduced = max((bucket[1] for bucket in self.buckets), default=0.0)
        began = forward if accumulate == 1 else ends - reduced
        handed = max((bucket[0] for bucket in self.buckets), default=backward)
        blocked = min(ends, max(forward, began + handed))
        phases = ("forward", "backward", "blocked", "optimizer")
        places = (0.0, forward, blocked, ends, ends + optimizer)
        for phase, begin, end in zip(phases, places, places[1:], strict=False):
            yield {"span": phase, "_phase": phase, "_begin": begin, "_end": end}
        buckets = zip(infos, self.buckets, strict=True)
        for above, (info, (begin, end, wire)) in enumerate(buckets, 1):
            what = f"bucket {info.index}, {info.nbytes / 1e6:.2f} MB"
            alone = began + max(begin, end - wire)
            span = {"_phase": "transfer", "_above": above}
            wait = {"span": f"{what}: wait", "_begin": began + begin, "_end": alone, "_pale": True}
            yield {**span, **wait}
            yield {**span, "span": f"{what}: transfer", "_begin": alone, "_end": began + end}


def draw_timeline(name: str, title: str, run: ReportRun, line: StepLine) -> Iterator[Chart]:
    """Yield the timeline of a case, in the launch whose step is the median of all.

    It needs the samples.
    """
    measured = [(r.launch, r.summary) for r in line.results if r.summary is not None]
    if not measured:
        return
    measured.sort(key=lambda each: each[1].step.value)
    launch, summary = measured[(len(measured) - 1) // 2]
    late = _late_ranks(line)
    lanes = _choose_lanes(_list_lanes(run.samples, line.case.key, launch, summary), late)
    if lanes:
        drawing = _draw(lanes, late, line, summary.buckets)
        yield draw_chart(name, title, _caption(line, lanes), drawing)


def _late_ranks(line: StepLine) -> set[int]:
    """Return the ranks for which the others wait."""
    summary = line.summary
    if summary is None:
        return set()
    late = {bucket.late_rank for bucket in summary.buckets}
    late |= {part.rank for part in summary.budget if part.resolved}
    return {rank for rank in late if rank is not None}


def _caption(line: StepLine, lanes: Sequence[Lane]) -> str:
    texts = [CAPTION]
    if len(lanes) < line.case.world_size:
        shown = f"{len(lanes)} of {line.case.world_size} ranks"
        texts.append(f"{shown}: those that compute longest and shortest.")
    texts += [BUCKETS] if lanes[0].buckets else []
    return " ".join(texts)


def _choose_lanes(lanes: dict[int, Lane], late: set[int]) -> list[Lane]:
    """Return at most MOST_LANES: those that compute longest and shortest."""
    if len(lanes) <= MOST_LANES:
        return list(lanes.values())
    order = sorted(lanes, key=lambda rank: (rank not in late, -lanes[rank].own_seconds))
    half = MOST_LANES // 2
    return [lanes[rank] for rank in sorted({*order[:half], *order[-half:]})]


def _list_lanes(
    samples: pd.DataFrame | None, key: str, launch: int, summary: StepSummary
) -> dict[int, Lane]:
    """Return the median step of each rank; empty without samples.

    If the buckets were timed, these are the steps in which they were: the last of each round.
    """
    if samples is None:
        return {}
    arm = "timed" if summary.buckets else "ddp"
    cases = [f"{key}/{arm}/{phase}" for phase in PHASES]
    cases += [f"{key}/bucket/{number}" for number in range(len(summary.buckets))]
    number = pd.Index(cases).get_indexer(samples["case"])  # -1: another case
    chosen = samples[["launch", "rank", "repetition", "entry_ns", "exit_ns"]].assign(number=number)
    last = (chosen["repetition"] + 1) % summary.in_a_row == 0
    kept = (number >= len(PHASES)) | ((number >= 0) & (last if summary.buckets else True))
    chosen = chosen[kept & (chosen["launch"] == launch)]
    if chosen["number"].nunique() < len(cases):
        return {}
    chosen["spent"] = chosen["exit_ns"] - chosen["entry_ns"]
    middle = chosen.groupby(["rank", "number"])[["entry_ns", "exit_ns", "spent"]].median() * 1e-9
    wire = chosen.groupby(["number", "repetition"])["spent"].min().groupby("number").median() * 1e-9
    ranks = middle.index.unique("rank")
    # [rank, number] of the begin, the end, and the time of each span
    begin, end, spent = (middle[name].unstack().to_numpy() for name in middle)
    count = len(PHASES)
    return {
        int(rank): Lane(
            f"rank {rank}",
            tuple(map(float, spent[row, :count])),
            tuple(
                (float(begin[row, n]), float(end[row, n]), float(wire[n]))
                for n in range(count, len(cases))
            ),
        )
        for row, rank in enumerate(ranks)
    }


def _draw(lanes: Sequence[Lane], late: set[int], line: StepLine, infos: Sequence[Bucket]) -> Spans:
    marked = {f"rank {rank}": f"rank {rank}: late" for rank in late}
    rows = [
        {"_pale": False, "_above": 0, "of": lane.name, **span}
        for lane in lanes
        for span in lane.spans(infos, line.case.accumulate)
        if span["_end"] > span["_begin"]
    ]
    for row in rows:
        begin, end = row["_begin"], row["_end"]
        times = {"begin ms": begin, "end ms": end, "ms": end - begin}
        row |= {name: ms(seconds, line.seconds) for name, seconds in times.items()}
        row["_lane"] = marked.get(row["of"], row["of"])
    return Spans(
        data=rows,
        x=Axis("time since the step began", theme.TIME_LABELS),
        lane="_lane",
        above=max(len(lane.buckets) for lane in lanes),
        color="_phase",
        order=theme.PHASES,
    )
