"""How often a case is repeated: warm-up, looks at the precision, the slice; all ranks alike.

Rank 0 decides how many repetitions come next and tells the others in between; checks, gathering and
decisions happen there too, never inside a timed span.
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ddpbench.analysis import kept, stats
from ddpbench.analysis.kept import Kept
from ddpbench.catalog.operations import Operation
from ddpbench.measure.loop import Bench
from ddpbench.records.schema import Case, Plan, Wrong
from ddpbench.runtime import control
from ddpbench.runtime.subgroups import Subgroup
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch

WARM_UP, WINDOW, WARM_UP_MOST = 10, 20, 500
WARM_UP_SHARE = 0.25  # of the time slice: a long operation is not warmed up for seconds
FEWEST = 6  # timed repetitions, however long they take: below, a median has no interval
FIRST_LOOK = 120  # then at every doubling
# No case ends by precision before this share of its slice: 120 calls of 5 µs are over within a
# millisecond, one quiet or noisy moment would stand for the case, and p99 needs 368.
LEAST_SHARE = 0.1
BURST_SECONDS = 0.5  # longest stretch without a decision: Ctrl-C and the slice are noticed
INTERRUPTED = -1


@dataclass
class Samples:
    """What a case gave. `cold` and what is kept are in rank 0 only: int64[world, repetition, 3] of
    ns, (entry, exit, device time or -1)."""

    calls: int = 1
    cold: npt.NDArray[np.int64] | None = None
    cold_calls: int = 1
    warm_up: Kept = field(default_factory=Kept)
    timed: Kept = field(default_factory=Kept)
    stop_reason: str = ""
    checks: int = 0
    wrong: list[Wrong] = field(default_factory=list)
    measuring_seconds: float = 0.0
    objection: str | None = None  # why the case was skipped on all ranks
    huge_share: float | None = None  # of this rank's buffers, as memory.huge_share has it
    page_faults: float | None = None  # of this rank in one timed repetition, the mean


def measure(
    case: Case, operation: Operation, plan: Plan, world: World, subgroup: Subgroup,
    device: torch.device, shortest_seconds: float, objection: str | None, ahead_ns: int = 0,
) -> Samples:  # fmt: skip
    """Measure one case on all ranks together, or skip it on all ranks together.

    The operation runs in this rank's subgroup. objection: its reason not to, found before.
    ahead_ns: how far its clock is ahead of rank 0's, to which all stamps are converted. Returns
    what rank 0 gathered; on other ranks, only `objection`, `checks` and `stop_reason` are set.
    """
    teams = subgroup.partition.subgroups if subgroup.partition.size < world.world_size else ()
    samples = Samples(warm_up=Kept(teams), timed=Kept(teams))
    bench = None
    if objection is None:
        try:
            bench = Bench(case, operation, plan, world, subgroup, device)
        except (OSError, MemoryError, RuntimeError, TypeError, AttributeError) as error:
            objection = f"cannot make the buffers: {control.first_line(error)}"
    samples.objection = control.agree_objection(world, objection)
    if samples.objection is not None or bench is None:
        return samples
    samples.huge_share = bench.huge_share
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # what lives now is not looked at again: 14 ms a case
    gc.disable()
    try:
        _measure(bench, samples, shortest_seconds, ahead_ns)
    finally:
        if enabled:
            gc.enable()
    return samples


def _measure(bench: Bench, samples: Samples, shortest_seconds: float, ahead_ns: int) -> None:
    world, plan = bench.world, bench.plan
    began = time.monotonic()
    until = began + plan.slice_seconds
    objection = None
    try:
        cold = bench.repeat(1)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        objection = f"not supported: {control.first_line(error)}"
    samples.objection = control.agree_objection(world, objection)
    if samples.objection is not None:
        return
    pace = Pace(bench, samples, seconds=time.monotonic() - began, ahead_ns=ahead_ns)
    pace.measuring = pace.seconds
    samples.cold = pace.gathered(cold)
    _check(bench, samples, -1)
    bench.rest()
    samples.calls = samples.cold_calls = bench.calls
    batch = _warm_up(pace, until, shortest_seconds)
    samples.calls *= batch
    _timed(pace, until, batch)
    if batch > 1:  # one call of the very buffers: a batch of sums in place has no exact result
        bench.refill()
        bench.repeat(1)
        _check(bench, samples, -1)
    samples.measuring_seconds = pace.measuring


@dataclass
class Pace:
    """Runs bursts of repetitions that rank 0 chose, and knows how long one takes."""

    bench: Bench
    samples: Samples
    seconds: float = 0.0  # of one repetition with its start, as rank 0 saw it
    measuring: float = 0.0
    done: int = 0  # repetitions since the warm-up
    ahead_ns: int = 0

    def gathered(self, stamps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """At rank 0 all ranks' stamps in its clock."""
        ahead = np.array([self.ahead_ns, self.ahead_ns, 0], dtype=np.int64)
        return control.gather_to_rank_0(self.bench.world, stamps - ahead)

    def fitting(self, wanted: int, until: float, least: int = 1) -> int:
        """How many of the wanted repetitions fit the time left and a burst; where no time is left
        as many of the least as fit a burst, and one."""
        left = min(until - time.monotonic(), BURST_SECONDS)
        wanted = min(wanted, kept.fitting(self.bench.world.world_size))
        if not self.seconds:
            return 1
        least = min(least, int(BURST_SECONDS / self.seconds))
        return max(1, least, min(wanted, int(left / self.seconds)))

    def burst(self, wanted: int, batch: int, check: bool, into: Kept) -> bool:
        """Repeat as often as rank 0 says and gather there; False when it says stop."""
        bench, world = self.bench, self.bench.world
        if world.rank == 0 and world.watchdog.signal is not None:
            wanted = INTERRUPTED
        count = control.broadcast_decision(world, wanted)
        if count <= 0:
            if count == INTERRUPTED:
                self.samples.stop_reason = "interrupted"
            return False
        world.watchdog.rearm()
        stamps = self._repeat(count, batch, check and batch == 1 and bench.plan.check)
        gathered = self.gathered(stamps)
        if gathered is not None:
            into.add(gathered)
        return True

    def _repeat(self, count: int, batch: int, check: bool) -> npt.NDArray[np.int64]:
        """The burst; with `check`, a random repetition and the last are checked."""
        bench, stamps, position = self.bench, [], 0
        stretches = []
        if check:
            # The same draw in every rank: seed, case and burst are the same.
            draw = random.Random(f"{bench.plan.seed}/{bench.case.key}/{bench.generation}")
            for at in sorted({draw.randrange(count), count - 1}):
                stretches += [(at - position, False), (1, True)]
                position = at + 1
        for stretch, checked in [*stretches, (count - position, False)]:
            if not stretch:
                continue
            if checked:
                bench.refill()
            bench.begin()
            began = time.monotonic()
            stamps.append(bench.repeat(stretch, batch))
            spent = time.monotonic() - began
            self.measuring += spent
            # One repetition alone may have been a slow one; it counts half.
            each = spent / stretch
            self.seconds = each if stretch >= 3 else (self.seconds + each) / 2
            self.done += stretch
            if checked:
                _check(bench, self.samples, self.done - 1)
                bench.rest()
        return np.concatenate(stamps)


def _warm_up(pace: Pace, until: float, shortest_seconds: float) -> int:
    """Repeat until two neighbouring windows agree; then the number of calls in one repetition."""
    samples, rank = pace.samples, pace.bench.world.rank
    most = time.monotonic() + WARM_UP_SHARE * (until - time.monotonic())
    windows = samples.warm_up
    while True:
        wanted = 0
        if rank == 0:
            cut = time.monotonic() > most or windows.repetitions >= WARM_UP_MOST
            if not windows.over or not (cut or _settled(windows, samples.calls)):
                wanted = pace.fitting(WINDOW if windows.over else WARM_UP, most)
        if not pace.burst(wanted, 1, check=False, into=windows):
            break
    batch = 1
    if rank == 0 and windows.over:
        median = float(np.median(windows.over[-1].times(1)))
        if 0 < median < shortest_seconds:
            batch = int(shortest_seconds / median) + 1
    return control.broadcast_decision(pace.bench.world, batch)


def _settled(windows: Kept, calls: int) -> bool:
    return len(windows.over) > 2 and stats.settled(
        windows.over[-2].times(calls), windows.over[-1].times(calls)
    )


def _timed(pace: Pace, until: float, batch: int) -> None:
    """Repeat until the median is known well enough, the slice is over, or there are enough."""
    samples, plan, rank = pace.samples, pace.bench.plan, pace.bench.world.rank
    reasons = ["", "precision", "time slice", "most repetitions"]
    reason = 0
    times = np.empty(0)
    look = FIRST_LOOK
    least = time.monotonic() + LEAST_SHARE * plan.slice_seconds
    pace.seconds *= batch
    pace.done = pace.bench.page_faults = 0
    while samples.stop_reason != "interrupted":
        wanted = 0
        if rank == 0:
            if len(times) >= look:
                look *= 2
                interval = stats.median_interval(times)
                known = interval is not None and stats.half_width(interval) <= plan.precision
                if known and time.monotonic() > least:
                    reason = 1
            if len(times) >= plan.max_repetitions:
                reason = 3
            elif not reason and len(times) >= FEWEST and time.monotonic() > until:
                reason = 2
            if not reason:
                look_at = min(look, plan.max_repetitions)
                wanted = pace.fitting(look_at - len(times), until, FEWEST - len(times))
        if not pace.burst(wanted, batch, check=True, into=samples.timed):
            break
        if rank == 0:
            times = np.append(times, samples.timed.over[-1].times(samples.calls))
    samples.stop_reason = samples.stop_reason or reasons[reason]
    if pace.done:
        samples.page_faults = pace.bench.page_faults / pace.done


def _check(bench: Bench, samples: Samples, repetition: int) -> None:
    """Compare the outputs with what they must be; each rank keeps its first wrong element."""
    if not bench.plan.check or not bench.operation.sized:
        return
    samples.checks += 1
    wrong = bench.wrong(repetition)
    if wrong is not None and not samples.wrong:
        samples.wrong.append(wrong)


def everyones_wrong(world: World, samples: Samples) -> list[Wrong]:
    """The first wrong element of each rank that has one, in every rank."""
    if not control.agree_any(bool(samples.wrong)):
        return []
    found = control.gather_values(world, [vars(w) for w in samples.wrong])
    return [Wrong(**wrong) for mine in found for wrong in mine]
