"""Figures of a DDP step from its samples: pure functions of arrays.

A case is measured in rounds. In each round each arm takes `in_a_row` steps: "ddp" is the real step,
"noop" communicates nothing, "no_sync" does not copy into buckets either, "timed" takes a stamp of
each bucket. Differences between arms are taken round by round, so that drift of the machine
cancels. The time of an arm in a round is the time of its steps together on the slowest rank,
divided by their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ddpbench.analysis import stats
from ddpbench.analysis.stats import Floats
from ddpbench.records.schema import Bucket, Figure, Interval, Part, Phase, StepSummary

Ints = npt.NDArray[np.int64]

LATE_SHARE = 0.02  # of the step: a rank is reported as late only if the others wait for longer
PHASES = {"forward": (0, 1), "backward": (1, 2), "optimizer": (2, 3), "step": (0, 3)}
# The parts of the budget. The first three, or EITHER and the third, make the step.
COMPUTE, COPIES, EXPOSED = "compute", "bucket copies", "exposed communication"
EITHER = "compute and copies"  # if no arm separates them
TRANSFER, OVERHEAD = "exposed transfer", "communication overhead"  # make EXPOSED
HIDDEN, COMMUNICATION = "hidden communication", "communication"  # TRANSFER and HIDDEN make the last
CHAIN = (COMPUTE, EITHER, COPIES, EXPOSED)  # make the step
IN_FLIGHT, AFTER = "in flight", "after"  # times from the stamps of buckets, beside those of arms
# A part is the time of the first arm less those of the others:
# exposed communication   how much longer the step is than without communication
# communication           the time in which any bucket is in flight, in the rank that waits least
# exposed transfer        its part after the last bucket is handed over, when backward has nothing
#                         left to compute
# hidden communication    communication - exposed transfer: never below 0, and 0 for one bucket
# communication overhead  exposed communication - exposed transfer: waking threads, bookkeeping,
#                         ranks out of step, backward slowed by hidden communication
PARTS = {
    COMPUTE: ("no_sync",),
    EITHER: ("noop",),
    COPIES: ("noop", "no_sync"),
    EXPOSED: ("ddp", "noop"),
    TRANSFER: (AFTER,),
    OVERHEAD: ("ddp", "noop", AFTER),
    HIDDEN: (IN_FLIGHT, AFTER),
    COMMUNICATION: (IN_FLIGHT,),
}
WAITING = "waiting for rank"
# The parts of a step whose collectives were timed one by one.
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
EXPOSED_OF = {name: f"exposed {name}" for name in OPERATIONS}
HIDDEN_OF = {name: f"hidden {name}" for name in OPERATIONS}


@dataclass(frozen=True)
class BucketInfo:
    """One of DDP's buckets, as passed to its communication hook."""

    index: int  # in the order of reduction
    nbytes: int
    parameters: int
    first: str  # name of the first parameter in it
    last: str


@dataclass(frozen=True)
class Span:
    """One collective of a step. Times are ns since the step began in this rank.

    exposed_ns is how long the compute waited for the collective: in the call, and in its wait.
    """

    operation: str  # "all_gather", "reduce_scatter", "all_reduce"
    layers: str  # the group of layers: "blocks.3", or "root" for all modules in no other group
    phase: str  # "forward" or "backward"
    nbytes: int  # of the total buffer: all slots of an all_gather, all slices of a reduce_scatter
    begin_ns: int
    exposed_ns: int
    end_ns: int
    ranks: tuple[int, ...] = ()  # of the process group, by their numbers in the default group


@dataclass(frozen=True)
class Timed:
    """The collectives of a step, in the order of the calls, and their times in the arm "timed".

    spans   of one step of rank 0; other ranks differ in times and process groups only
    groups  for each collective, the ranks of the process groups that carry it out at once
    ns      [world, round, collective, 3] of the last step of a round: from the begin of the step
            until the call; exposed; from the begin of the step until the end of the collective
    """

    spans: Sequence[Span]
    groups: Sequence[tuple[tuple[int, ...], ...]]
    ns: Ints


@dataclass(frozen=True)
class Samples:
    """The raw times of one case, on rank 0. Stamps of different ranks are not comparable."""

    stamps: dict[str, Ints]  # arm → ns[world, round, K, 4]: begin, end of forward, backward, step
    walls: dict[str, Ints]  # arm → ns[world, round]: K steps without verification
    buckets: list[BucketInfo]
    # ns[world, round, bucket, 2] of the last step of "timed": from the start of backward until the
    # bucket was handed over, until it was reduced.
    bucket_stamps: Ints | None
    verify: Ints  # ns[world, verification], not part of `walls`
    timed: Timed | None = None  # collectives of a sharded step
    alone: Ints | None = None  # ns[world, repetition, bucket]: reductions while nothing else runs
    peak_nbytes: Ints | None = None  # [world]: memory at the peak of a step

    @property
    def world(self) -> int:
        return len(self.walls["ddp"])

    @property
    def rounds(self) -> int:
        """The number of complete rounds; a run can stop in the middle of a round."""
        return int(min(each.shape[1] for each in (*self.walls.values(), *self.stamps.values())))


def summarise(samples: Samples, batch_of_all_ranks: int, warm_up: int) -> StepSummary:
    """Return all figures of one case in one launch.

    samples: of at least one complete round, with the arm "ddp". batch_of_all_ranks: samples of a
    step on all ranks together. warm_up: steps before the first round.
    """
    ddp = samples.stamps["ddp"][:, : samples.rounds]
    step = figure(arm_seconds(samples, "ddp"))
    return StepSummary(
        rounds=samples.rounds,
        in_a_row=ddp.shape[2],
        warm_up=warm_up,
        step=step,
        samples_per_second=batch_of_all_ranks / step.value,
        phases=tuple(_phase(name, ddp) for name in PHASES),
        budget=tuple(_budget(samples, step.value)),
        buckets=tuple(_buckets(samples, step.value)),
    )


def compute_cost(samples: Samples, step_seconds: float) -> tuple[Figure | None, float | None]:
    """Return the median time of a verification on its slowest rank, and as a share of a step.

    Returns None, None without verifications.
    """
    if not samples.verify.shape[1]:
        return None, None
    cost = figure(samples.verify.max(axis=0) * 1e-9, of="verifications")
    return cost, cost.value / step_seconds


def figure(values: Floats, confidence: float = 0.95, of: str = "rounds") -> Figure:
    """Return the median of the values, at least one, and its exact interval."""
    interval = stats.median_interval(values, confidence)
    if interval is not None:
        interval = replace(interval, of=interval.of.replace("repetitions", of))
    return Figure(float(np.median(values)), interval)


def arm_seconds(samples: Samples, name: str) -> Floats:
    """Return seconds[round] of a step of an arm that was measured."""
    slowest = samples.walls[name][:, : samples.rounds].max(axis=0)
    return np.asarray(slowest * 1e-9 / samples.stamps[name].shape[2], dtype=np.float64)


def _phase(name: str, stamps: Ints) -> Phase:
    begin, end = PHASES[name]
    spans = stamps[..., end] - stamps[..., begin]
    slowest = figure(spans.max(axis=0).mean(axis=-1) * 1e-9)
    rank, share = _most_often(spans.argmax(axis=0))
    fastest = float(np.median(spans.min(axis=0).mean(axis=-1))) * 1e-9
    return Phase(name, slowest, fastest, rank, share)


def _most_often(ranks: npt.NDArray[np.intp]) -> tuple[int, float]:
    """Return the most frequent rank, and its share."""
    counts = np.bincount(ranks.ravel())
    return int(counts.argmax()), float(counts.max() / ranks.size)


def _budget(samples: Samples, step: float) -> Iterator[Part]:
    """Yield the parts that follow from what was measured; without other ranks, the compute only."""
    times = {name: arm_seconds(samples, name) for name in samples.stamps}
    if (stamps := _bucket_stamps(samples)) is not None:
        times[IN_FLIGHT], times[AFTER] = _communication(stamps)
    alone = samples.world == 1
    for name, (first, *less) in PARTS.items():
        is_known = times.keys() >= {first, *less} and not (name == EITHER and "no_sync" in times)
        if is_known and (name == COMPUTE or not alone):
            yield difference(name, step, times[first], *(times[each] for each in less))
    if not alone and not times.keys().isdisjoint(("noop", "no_sync")):
        yield _waiting(samples, step)


def difference(name: str, step: float, first: Floats, *less: Floats) -> Part:
    """Return the median of the first less the medians of the others, so that parts add up.

    The interval is of the median of the differences, paired by round. The two medians may differ a
    little.
    """
    value = float(np.median(first) - sum(np.median(each) for each in less))
    part = holding(value, figure(first - sum(less)).interval)
    resolved = part.interval is not None and part.interval.low > 0
    return Part(name, part, value / step, resolved)


def holding(value: float, interval: Interval | None) -> Figure:
    """Return the value with its interval, widened if it does not contain the value."""
    if interval is not None:
        low, high = min(interval.low, value), max(interval.high, value)
        interval = replace(interval, low=low, high=high)
    return Figure(value, interval)


def _communication(stamps: Ints) -> tuple[Floats, Floats]:
    """Return seconds[round] with any bucket in flight: in all, and after the last handover.

    They are of the rank with the least such time. The last rank does not wait, while on the other
    ranks waiting for it looks like hidden communication.
    """
    last = stamps[..., 0].max(axis=2)[:, :, None, None]
    whole, after = _busy(stamps), _busy(np.maximum(stamps, last))
    least = whole.argmin(axis=0)[None]
    return tuple(np.take_along_axis(each, least, axis=0)[0] * 1e-9 for each in (whole, after))


def _busy(stamps: Ints) -> Ints:
    """Return ns[world, round] covered by the spans of the buckets; overlaps count once."""
    order = stamps[..., :1].argsort(axis=2)
    begins, ends = np.moveaxis(np.take_along_axis(stamps, order, axis=2), 3, 0)
    ends = np.maximum.accumulate(ends, axis=2)
    begins = np.concatenate([begins[..., :1], np.maximum(begins[..., 1:], ends[..., :-1])], axis=2)
    return np.asarray(np.maximum(0, ends - begins).sum(axis=2), dtype=np.int64)


def _waiting(samples: Samples, step: float) -> Part:
    """Return how much longer the slowest rank takes than the mean of the others, without waits.

    It was chosen out of all ranks, so the confidence is corrected by their number (Bonferroni).
    """
    stamps = samples.stamps["noop" if "noop" in samples.stamps else "no_sync"][:, : samples.rounds]
    seconds = (stamps[..., 3] - stamps[..., 0]).mean(axis=2) * 1e-9  # [world, round]
    late = int(np.median(seconds, axis=1).argmax())
    longer = figure(seconds[late] - _others(seconds, late), 1 - 0.05 / samples.world)
    resolved = longer.interval is not None and longer.interval.low > LATE_SHARE * step
    return Part(f"{WAITING} {late}", longer, longer.value / step, resolved, late)


def _others(values: Floats, rank: int) -> Floats:
    """Return the mean of [world, round] over all ranks but one."""
    return np.asarray(np.delete(values, rank, axis=0).mean(axis=0), dtype=np.float64)


def _bucket_stamps(samples: Samples) -> Ints | None:
    """Return ns[world, round, bucket, 2]; None if there are none."""
    stamps = samples.bucket_stamps
    if stamps is None or not stamps.size or len(samples.buckets) != stamps.shape[2]:
        return None
    return stamps[:, : samples.rounds]


def _buckets(samples: Samples, step: float) -> Iterator[Bucket]:
    """Yield the figures of each bucket.

    A rank's time of a bucket, (reduced - handed over), is the wire plus its wait for other ranks.
    The rank that hands over last waits least, so the least over ranks is the wire. This does not
    need a common clock.
    """
    stamps = _bucket_stamps(samples)
    if stamps is None:
        return
    seconds: Floats = np.asarray(stamps[..., 1] - stamps[..., 0], np.float64) * 1e-9
    handed = np.median(stamps[..., 0].max(axis=0), axis=0) * 1e-9
    for number, info in enumerate(samples.buckets):
        bucket = seconds[:, :, number]  # [world, round]
        confidence = 1 - 0.05 / samples.world / len(samples.buckets)
        known = Bucket(
            **vars(info),
            handed_seconds=float(handed[number]),
            wire=figure(bucket.min(axis=0)),
            wait=figure(np.ptp(bucket, axis=0)),
            late_rank=late_rank(bucket, confidence, LATE_SHARE * step),
        )
        yield known if samples.alone is None else _explain(known, number, stamps, samples.alone)


def _explain(bucket: Bucket, number: int, stamps: Ints, alone: Ints) -> Bucket:
    """Add where the time of a bucket's wire goes, compared with the reduction alone.

    The rank that waits least shows it. What exceeds the reduction alone is assigned first to the
    time in which other buckets are in flight (gloo reduces two at once), then to the time in which
    backward computes.
    """
    expected = figure(alone[:, :, number].min(axis=0) * 1e-9, of="repetitions")
    last = (stamps[..., 1] - stamps[..., 0])[:, :, number].argmin(axis=0)
    own: Floats = np.take_along_axis(stamps, last[None, :, None, None], axis=0)[0] * 1e-9
    handed, reduced = own[:, number, 0], own[:, number, 1]
    others = np.delete(own, number, axis=1)
    begin = np.maximum(others[..., 0], handed[:, None])
    shared = np.clip(np.minimum(others[..., 1], reduced[:, None]) - begin, 0, None).sum(axis=1)
    computing = np.clip(np.minimum(own[:, :, 0].max(axis=1), reduced) - handed, 0, None)
    excess = reduced - handed - expected.value
    queue = np.minimum(shared, np.maximum(excess, 0))
    contention = np.clip(excess - queue, 0, computing)
    return replace(
        bucket,
        alone=expected,
        queue=figure(queue),
        contention=figure(contention),
        unexplained=figure(excess - queue - contention),
    )


def late_rank(seconds: Floats, confidence: float, least: float) -> int | None:
    """Return the rank that most often waited least; None unless it exceeds the noise.

    The others must wait longer by more than `least` seconds. seconds: [world, round]. The
    confidence is corrected by the number of ranks and buckets (Bonferroni).
    """
    if len(seconds) < 2:
        return None
    rank, _ = _most_often(seconds.argmin(axis=0))
    less = figure(_others(seconds, rank) - seconds[rank], confidence)
    clear = less is not None and less.interval is not None and less.interval.low > least
    return rank if clear else None
