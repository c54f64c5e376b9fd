"""A typical DDP step as a timeline: a lane per rank, with its buckets above its compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ddpbench.analysis.step_lines import StepLine
from ddpbench.present import theme
from ddpbench.present.charts.kinds import Axis, Spans
from ddpbench.present.document import Chart, ReportRun, draw_chart
from ddpbench.present.steps.columns import format_ms
from ddpbench.records.schema import Bucket, StepSummary

MOST_LANES = 8  # ranks
PHASES = ("forward", "backward", "optimizer")
CAPTION = (
    "Median of each span over the steps of the launch with the median step, summed over "
    "micro-batches. The stamps of the ranks are aligned at the beginning of their steps."
)
BUCKETS = (
    "Above: each bucket of gradients of the last micro-batch from its handover until it is "
    "reduced; pale while it waits for other ranks or buckets, or takes longer than alone. Blocked: "
    "backward has handed over its last bucket and waits."
)


@dataclass(frozen=True)
class Lane:
    """The median step of one rank, in seconds."""

    rank: int
    phases: tuple[float, ...]  # by PHASES
    # Of each bucket: handed over and reduced, since the last backward began, and its transfer.
    buckets: tuple[tuple[float, float, float], ...]

    @property
    def handed_seconds(self) -> float:
        """Return the time from the start of backward until the last bucket is handed over."""
        return max((bucket[0] for bucket in self.buckets), default=self.phases[1])

    def list_spans(self, infos: Sequence[Bucket], accumulate: int) -> Iterator[dict[str, Any]]:
        """Yield the spans of the lane, then those of the buckets above it, the first uppermost.

        accumulate: the micro-batches; their backwards are one span, which ends with the last one.
        """
        forward, backward, optimizer = self.phases
        ends = forward + backward
        reduced = max((bucket[1] for bucket in self.buckets), default=0.0)
        began = forward if accumulate == 1 else ends - reduced
        blocked = min(ends, max(forward, began + self.handed_seconds))
        places = (0.0, forward, blocked, ends, ends + optimizer)
        for i, phase in enumerate(("forward", "backward", "blocked", "optimizer")):
            yield {"span": phase, "_phase": phase, "_begin": places[i], "_end": places[i + 1]}
        buckets = zip(infos, self.buckets, strict=True)
        for above, (info, (begin, end, wire)) in enumerate(buckets, 1):
            what = f"bucket {info.index}, {info.nbytes / 1e6:.2f} MB"
            span = {"_phase": "transfer", "_above": above}
            place = began + begin
            for name, seconds, is_pale in _divide_bucket(info, end - begin, wire):
                part = {"span": f"{what}: {name}", "_begin": place, "_end": place + seconds}
                yield {**span, **part, "_pale": is_pale}
                place += seconds


def _divide_bucket(info: Bucket, seconds: float, wire: float) -> Iterator[tuple[str, float, bool]]:
    """Yield the parts of a bucket's time: name, seconds, and whether other ranks or work cause it.

    seconds: from its handover until it is reduced. wire: without the wait for other ranks.
    """
    yield "wait", max(0.0, seconds - wire), True
    left = min(wire, seconds)
    if info.queue is not None and info.alone is not None:
        queue = min(left, max(0.0, info.queue.value))
        yield "beside other buckets", queue, True
        transfer = min(left - queue, info.alone.value)
        yield "transfer", transfer, False
        yield "slower than alone", left - queue - transfer, True
    else:
        yield "transfer", left, False


def draw_timeline(name: str, title: str, run: ReportRun, line: StepLine) -> Iterator[Chart]:
    """Yield the timeline of a case, in the launch whose step is the median, if it has samples."""
    measured = [(r.launch, r.summary) for r in line.results if r.summary is not None]
    if not measured or run.samples is None:
        return
    measured.sort(key=lambda each: each[1].step.value)
    launch, summary = measured[(len(measured) - 1) // 2]
    late = {bucket.late_rank for bucket in line.summary.buckets} if line.summary else set()
    late |= {part.rank for part in line.summary.budget if part.resolved} if line.summary else set()
    lanes = _measure_lanes(run.samples, line.case.key, launch, summary)
    if len(lanes) > MOST_LANES:  # those that compute longest and shortest
        half = MOST_LANES // 2
        lanes.sort(key=lambda x: (x.rank not in late, -x.phases[0] - x.handed_seconds))
        lanes = sorted(lanes[:half] + lanes[-half:], key=lambda lane: lane.rank)
    if lanes:
        texts = [CAPTION]
        if len(lanes) < line.case.world_size:
            shown = f"{len(lanes)} of {line.case.world_size} ranks"
            texts.append(f"{shown}: those that compute longest and shortest.")
        texts += [BUCKETS] if lanes[0].buckets else []
        drawing = _draw(lanes, late, line, summary.buckets)
        yield draw_chart(name, title, " ".join(texts), drawing)


def _measure_lanes(
    samples: pd.DataFrame, key: str, launch: int, summary: StepSummary
) -> list[Lane]:
    """Return the median step of each rank; empty if samples are missing.

    If the buckets were timed, these are the steps in which they were: the last of each round.
    """
    arm = "timed" if summary.buckets else "ddp"
    cases = [f"{key}/{arm}/{phase}" for phase in PHASES]
    cases += [f"{key}/bucket/{number}" for number in range(len(summary.buckets))]
    number = pd.Index(cases).get_indexer(samples["case"])  # -1: another case
    chosen = samples[["launch", "rank", "repetition", "entry_ns", "exit_ns"]].assign(number=number)
    last = (chosen["repetition"] + 1) % summary.in_a_row == 0
    kept = (number >= len(PHASES)) | ((number >= 0) & (last if summary.buckets else True))
    chosen = chosen[kept & (chosen["launch"] == launch)]
    if chosen["number"].nunique() < len(cases):
        return []
    chosen["spent"] = chosen["exit_ns"] - chosen["entry_ns"]
    middle = chosen.groupby(["rank", "number"])[["entry_ns", "exit_ns", "spent"]].median() * 1e-9
    wire = chosen.groupby(["number", "repetition"])["spent"].min().groupby("number").median() * 1e-9
    # [rank, number] of the begin, the end, and the time of each span
    begin, end, spent = (middle[name].unstack().to_numpy().tolist() for name in middle)
    count, wires = len(PHASES), wire.tolist()
    return [
        Lane(
            int(rank),
            tuple(spent[row][:count]),
            tuple(zip(begin[row][count:], end[row][count:], wires[count:], strict=True)),
        )
        for row, rank in enumerate(middle.index.unique("rank"))
    ]


def _draw(
    lanes: Sequence[Lane], late: set[int | None], line: StepLine, infos: Sequence[Bucket]
) -> Spans:
    rows = []
    for lane in lanes:
        name = f"rank {lane.rank}"
        label = f"{name}: late" if lane.rank in late else name
        for span in lane.list_spans(infos, line.case.accumulate):
            begin, end = span["_begin"], span["_end"]
            times = {"begin ms": begin, "end ms": end, "ms": end - begin}
            texts = {
                heading: format_ms(seconds, line.seconds) for heading, seconds in times.items()
            }
            row = {"_pale": False, "_above": 0, "of": name, **span, **texts, "_lane": label}
            rows += [row] if end > begin else []
    return Spans(
        data=rows,
        x=Axis("time since the step began", theme.TIME_LABELS),
        lane="_lane",
        above=max(len(lane.buckets) for lane in lanes),
        color="_phase",
        order=theme.PHASES,
    )
