"""From the samples of a DDP step to its figures: pure functions of arrays.

A case is measured in rounds. In each round each arm takes `in_a_row` steps: "ddp" is the real one,
"noop" communicates nothing, "no_sync" does not copy into buckets either, "timed" stamps each
bucket. What the arms differ by is taken round by round, so that drift of the machine cancels.
The time of an arm in a round is that of its steps together, in the slowest rank, over their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ddpbench.analysis import stats
from ddpbench.analysis.stats import Floats
from ddpbench.records.schema import Bucket, Figure, Interval, Part, Phase, StepSummary

Ints = npt.NDArray[np.int64]

LATE_SHARE = 0.02  # of the step: a rank that may keep the others waiting for less is not accused
PHASES = {"forward": (0, 1), "backward": (1, 2), "optimizer": (2, 3), "step": (0, 3)}
# The parts of the budget. The first three, or EITHER and the third, make the step.
COMPUTE, COPIES, EXPOSED = "compute", "bucket copies", "exposed communication"
EITHER = "compute and copies"  # where there is no arm that would tell them apart
TRANSFER, OVERHEAD = "exposed transfer", "communication overhead"  # make EXPOSED
HIDDEN, COMMUNICATION = "hidden communication", "communication"  # TRANSFER and HIDDEN make the last
WAITING = "waiting for rank"
CHAINS = ((COMPUTE, EITHER, COPIES, EXPOSED), (TRANSFER, HIDDEN))  # make the step, COMMUNICATION


@dataclass(frozen=True)
class BucketInfo:
    """One bucket of DDP's, as its communication hook was given it."""

    index: int  # in the order of reduction
    nbytes: int
    parameters: int
    first: str  # name of the first parameter in it
    last: str


@dataclass(frozen=True)
class Samples:
    """The raw times of one case, in rank 0. Stamps of different ranks are not comparable."""

    stamps: dict[str, Ints]  # arm → ns[world, round, K, 4]: begin, end of forward, backward, step
    walls: dict[str, Ints]  # arm → ns[world, round]: K steps, synchronised at both ends, unverified
    timers: dict[str, Floats]  # DDP's own: name → seconds[world, round]; may be empty
    buckets: list[BucketInfo]
    # ns[world, round, bucket, 2] of the last step of "timed": from the start of backward until the
    # bucket was handed over, until it was reduced.
    bucket_stamps: Ints | None
    verify: Ints  # ns[world, verification], not in `walls`

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.walls["ddp"])

    @property
    def rounds(self) -> int:
        """Rounds that every arm took part in; a run that is stopped ends within one."""
        return int(min(each.shape[1] for each in (*self.walls.values(), *self.stamps.values())))

    def arm(self, name: str) -> Ints | None:
        """ns[world, round, K, 4] of the whole rounds of an arm; None: it was not measured."""
        return self.stamps[name][:, : self.rounds] if name in self.stamps else None


def summarise(samples: Samples, batch_of_all_ranks: int, warm_up: int) -> StepSummary:
    """All figures of one case in one launch.

    samples: of at least one whole round, "ddp" among its arms. batch_of_all_ranks: samples that
    all ranks together train on in a step. warm_up: steps before the first round.
    """
    ddp = samples.arm("ddp")
    assert ddp is not None
    in_a_row = ddp.shape[2]
    timed, arm = _time(samples, "timed"), _time(samples, "ddp")
    step = figure(arm)
    assert step is not None
    seconds = step.value
    factor = None
    if samples.world > 1:
        free = "no_sync" if "no_sync" in samples.stamps else "noop"
        factor = figure(arm / _time(samples, free))
    return StepSummary(
        rounds=samples.rounds,
        in_a_row=in_a_row,
        warm_up=warm_up,
        step=step,
        samples_per_second=batch_of_all_ranks / step.value,
        phases=tuple(_phase(name, ddp) for name in PHASES),
        budget=tuple(_budget(samples, arm, seconds)),
        speed_up=factor,
        timers=_timers(samples),
        buckets=tuple(_buckets(samples, seconds)),
        observer=_part("timing hook", timed - arm, seconds),
    )


def cost(samples: Samples, step_seconds: float) -> tuple[Figure | None, float | None]:
    """What a verification takes its slowest rank, median, and as a share of a step.

    None, None where there was none.
    """
    if not samples.verify.shape[1]:
        return None, None
    found = figure(samples.verify.max(axis=0) * 1e-9, of="verifications")
    return found, None if found is None else found.value / step_seconds


def figure(values: Floats, confidence: float = 0.95, of: str = "rounds") -> Figure | None:
    """The median of what is known (not NaN) and its exact interval; None: nothing is known."""
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    found = stats.median_interval(known, confidence)
    if found is not None:
        found = replace(found, of=found.of.replace("repetitions", of))
    return Figure(float(np.median(known)), found)


def _time(samples: Samples, name: str) -> Floats:
    """Seconds[round] of a step of an arm; NaN where it was not measured, as is all made of it."""
    stamps = samples.arm(name)
    if stamps is None:
        return np.full(samples.rounds, np.nan)
    slowest = samples.walls[name][:, : samples.rounds].max(axis=0)
    return np.asarray(slowest * 1e-9 / stamps.shape[2], dtype=np.float64)


def _slowest(stamps: Ints, begin: int, end: int) -> Floats:
    spans = (stamps[..., end] - stamps[..., begin]).max(axis=0)
    return np.asarray(spans.mean(axis=-1) * 1e-9, dtype=np.float64)


def _phase(name: str, stamps: Ints) -> Phase:
    begin, end = PHASES[name]
    spans = stamps[..., end] - stamps[..., begin]
    slowest = figure(_slowest(stamps, begin, end))
    assert slowest is not None
    rank, share = _most_often(spans.argmax(axis=0))
    fastest = float(np.median(spans.min(axis=0).mean(axis=-1))) * 1e-9
    return Phase(name, slowest, fastest, rank, share)


def _most_often(ranks: npt.NDArray[np.intp]) -> tuple[int, float]:
    """The rank that stands there most often, and in which share of the places."""
    counts = np.bincount(ranks.ravel())
    return int(counts.argmax()), float(counts.max() / ranks.size)


def _part(
    name: str, values: Floats, step: float, confidence: float = 0.95, least: float = 0.0,
    rank: int | None = None,
) -> Part | None:  # fmt: skip
    """Resolved: the interval lies above 0, all of it above that share of the step."""
    found = figure(values, confidence)
    if found is None:
        return None
    share = found.value / step
    clear = found.interval is not None and found.interval.low > least * step
    return Part(name, found, share, clear, rank)


def _budget(samples: Samples, ddp: Floats, step: float) -> Iterator[Part]:
    """The parts that can be known from the arms that were measured.

    exposed communication   ddp - noop: what the step is longer by than without communication
    communication           the time in which any bucket is on its way, in the rank that waits least
    exposed transfer        what of it comes after the last bucket is handed over, when backward has
                            nothing left to compute
    hidden communication    communication - exposed transfer, so never below 0, and 0 for one bucket
    communication overhead  exposed communication - exposed transfer: threads that wake up,
                            bookkeeping, ranks out of step, backward slowed by what it hides
    """
    noop, no_sync = _time(samples, "noop"), _time(samples, "no_sync")
    parts: dict[str, tuple[Floats, ...]] = {COMPUTE: (no_sync,)}
    if samples.world > 1:
        if "no_sync" not in samples.stamps:
            parts = {EITHER: (noop,)}
        parts |= {COPIES: (noop, no_sync), EXPOSED: (ddp, noop)}
        if (stamps := _bucket_stamps(samples)) is not None:
            whole, after = _communication(stamps)
            parts |= {
                TRANSFER: (after,),
                OVERHEAD: (ddp, noop, after),
                HIDDEN: (whole, after),
                COMMUNICATION: (whole,),
            }
    found = [_difference(name, step, *values) for name, values in parts.items()]
    yield from (part for part in [*found, _waiting(samples, step)] if part is not None)


def _difference(name: str, step: float, first: Floats, *less: Floats) -> Part | None:
    """The median of the first less the medians of the others, so that parts add up as these do.

    The interval is that of the median of the differences, paired by round. These two medians may
    part a little.
    """
    paired = figure(first - sum(less))
    if paired is None:
        return None
    value = float(np.median(first) - sum(np.median(each) for each in less))
    found = holding(value, paired.interval)
    resolved = found.interval is not None and found.interval.low > 0
    return Part(name, found, value / step, resolved)


def holding(value: float, interval: Interval | None) -> Figure:
    """The value with its interval, which is widened where it does not hold the value."""
    if interval is not None:
        low, high = min(interval.low, value), max(interval.high, value)
        interval = replace(interval, low=low, high=high)
    return Figure(value, interval)


def _communication(stamps: Ints) -> tuple[Floats, Floats]:
    """Seconds[round] in which any bucket was on its way: all of them, and those after the last
    bucket was handed over.

    In the rank where it took least: the last to come waits for nobody, while in the others waiting
    for it looks like communication that is hidden.
    """
    last = stamps[..., 0].max(axis=2)[:, :, None, None]
    whole, after = _busy(stamps), _busy(np.maximum(stamps, last))
    least = whole.argmin(axis=0)[None]
    return tuple(np.take_along_axis(each, least, axis=0)[0] * 1e-9 for each in (whole, after))


def _busy(stamps: Ints) -> Ints:
    """ns[world, round] covered by the buckets' spans, where they overlap once."""
    order = stamps[..., :1].argsort(axis=2)
    ordered = np.take_along_axis(stamps, order, axis=2)
    covered = np.zeros(stamps.shape[:2], dtype=np.int64)
    end = ordered[:, :, 0, 0]
    for bucket in range(ordered.shape[2]):
        handed, reduced = ordered[:, :, bucket, 0], ordered[:, :, bucket, 1]
        covered += np.maximum(0, reduced - np.maximum(handed, end))
        end = np.maximum(end, reduced)
    return covered


def _waiting(samples: Samples, step: float) -> Part | None:
    """What the slowest rank takes longer than the mean of the others where nothing is waited for.

    It was chosen out of all ranks, so the confidence is corrected by their number (Bonferroni).
    """
    stamps = samples.arm("noop" if "noop" in samples.stamps else "no_sync")
    if stamps is None or samples.world < 2:
        return None
    each = (stamps[..., 3] - stamps[..., 0]).mean(axis=2) * 1e-9  # [world, round]
    late = int(np.median(each, axis=1).argmax())
    longer = each[late] - _others(each, late)
    confidence = 1 - 0.05 / samples.world
    return _part(f"{WAITING} {late}", longer, step, confidence, LATE_SHARE, late)


def _others(each: Floats, rank: int) -> Floats:
    """The mean over all ranks but one, of [world, round]."""
    return np.asarray((each.sum(axis=0) - each[rank]) / (len(each) - 1), dtype=np.float64)


def _timers(samples: Samples) -> dict[str, float]:
    found = {name: figure(each.max(axis=0)) for name, each in samples.timers.items()}
    return {name: each.value for name, each in found.items() if each is not None}


def _bucket_stamps(samples: Samples) -> Ints | None:
    """ns[world, round, bucket, 2]; None: there are none."""
    stamps = samples.bucket_stamps
    if stamps is None or not stamps.size or len(samples.buckets) != stamps.shape[2]:
        return None
    return stamps[:, : samples.rounds]


def _buckets(samples: Samples, step: float) -> Iterator[Bucket]:
    """A rank's time of a bucket is (reduced - handed over): the wire and what it waited for others.

    Who hands over last waits least, so the least over ranks is the wire; no common clock is needed.
    """
    stamps = _bucket_stamps(samples)
    if stamps is None:
        return
    each: Floats = np.asarray(stamps[..., 1] - stamps[..., 0], np.float64) * 1e-9
    handed = np.median(stamps[..., 0].max(axis=0), axis=0) * 1e-9
    for number, info in enumerate(samples.buckets):
        mine = each[:, :, number]  # [world, round]
        wire, wait = figure(mine.min(axis=0)), figure(np.ptp(mine, axis=0))
        assert wire is not None
        assert wait is not None
        confidence = 1 - 0.05 / samples.world / len(samples.buckets)
        late = late_rank(mine, confidence, LATE_SHARE * step)
        yield Bucket(
            info.index, info.nbytes, info.parameters, info.first, info.last,
            float(handed[number]), wire, wait, late,
        )  # fmt: skip


def late_rank(each: Floats, confidence: float, least: float) -> int | None:
    """The rank that waited least most often, if it waits less than the others beyond the noise, by
    more than `least` seconds.

    The confidence is corrected by all that are looked at, ranks and buckets (Bonferroni).
    """
    if len(each) < 2:
        return None
    rank, _ = _most_often(each.argmin(axis=0))
    less = figure(_others(each, rank) - each[rank], confidence)
    clear = less is not None and less.interval is not None and less.interval.low > least
    return rank if clear else None
