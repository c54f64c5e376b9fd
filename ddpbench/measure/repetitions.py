"""Warm-up and number of repetitions of a case: until its precision or the end of its time slice.

Rank 0 decides how many repetitions come next and sends the number to the other ranks. Decisions,
checks and gathering happen between bursts, never inside a timed span. At the end, it summarises
the samples.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddpbench.analysis import clocks, stats
from ddpbench.analysis.stats import Kept
from ddpbench.hang.places import find_error_place, is_of_program
from ddpbench.measure import clock, memory
from ddpbench.measure.loop import Bench
from ddpbench.records.schema import LAUNCH_HIDDEN, Case, Plan, Result, Wrong
from ddpbench.runtime import control
from ddpbench.runtime.subgroups import Subgroup
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch

WARM_UP, WINDOW, WARM_UP_MOST = 10, 20, 500
WARM_UP_SHARE = 0.25  # of the time slice, so that a long operation is not warmed up for seconds
FEWEST = 6  # timed repetitions, even if they take long: an interval of the median needs them
FIRST_LOOK = 120  # repetitions before the precision is first checked; then at every doubling
# Precision ends a case only after this share of its slice: 120 calls of 5 µs take less than a
# millisecond, and one quiet or noisy moment would represent the case. The p99 needs 368 calls.
LEAST_SHARE = 0.1
BURST_SECONDS = 0.5  # longest time without a decision, in which Ctrl-C has no effect
INTERRUPTED = -1


@dataclass
class Samples:
    """The samples of one case.

    Only rank 0 has `cold`, `warm_up` and `timed`: int64[world, repetition, 3], in ns, of (entry,
    exit, device time or -1).
    """

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
    page_faults: float | None = None  # of this rank per timed repetition, the mean
    unhidden_share: float | None = None  # of this rank's timed repetitions: Bench.unhidden


def measure(
    case: Case,
    plan: Plan,
    world: World,
    subgroup: Subgroup,
    device: torch.device,
    *,
    shortest_seconds: float,
    objection: str | None,
    ahead_ns: int = 0,
) -> Samples:
    """Measure one case on all ranks together, or skip it on all ranks together.

    The operation runs in this rank's subgroup. Repetitions shorter than `shortest_seconds` are
    timed in batches. `objection` is this rank's reason to skip the case. `ahead_ns` is how far this
    rank's clock is ahead of rank 0's; all stamps are converted to rank 0's clock. Ranks
    other than 0 get only `objection`, `checks` and `stop_reason`.
    """
    subgroups = subgroup.partition.subgroups if subgroup.partition.size < world.world_size else ()
    samples = Samples(warm_up=Kept(subgroups), timed=Kept(subgroups))
    bench = None
    if objection is None:
        try:
            bench = Bench(case, plan, world, subgroup, device)
        except (OSError, MemoryError, RuntimeError, TypeError, AttributeError) as error:
            objection = _explain(error, device, "cannot allocate the buffers")
    samples.objection = control.agree_objection(world, objection)
    if samples.objection is not None or bench is None:
        return samples
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # later collections skip today's objects, which saves 14 ms per case
    gc.disable()
    try:
        _measure(Bursts(bench, samples, ahead_ns=ahead_ns), shortest_seconds)
    finally:
        if enabled:
            gc.enable()
    return samples


def _measure(bursts: Bursts, shortest_seconds: float) -> None:
    bench, samples = bursts.bench, bursts.samples
    began = time.monotonic()
    until = began + bench.plan.slice_seconds
    cold = _call_first(bench, samples)
    if samples.objection is not None or cold is None:
        return
    bursts.seconds = samples.measuring_seconds = time.monotonic() - began
    samples.cold = bursts.gather_stamps(cold)
    bursts.check(-1)
    bench.rest()
    samples.calls = samples.cold_calls = bench.calls
    bursts.batch = _warm_up(bursts, until, shortest_seconds)
    samples.calls *= bursts.batch
    _take_timed(bursts, until)
    if bursts.batch > 1:  # check one call of the same buffers: repeated sums in place are not exact
        bench.refill()
        bench.repeat(1)
        bursts.check(-1)


def _call_first(bench: Bench, samples: Samples) -> npt.NDArray[np.int64] | None:
    """Make the first call. If it fails in some ranks, skip the case in all ranks together."""
    objection, cold, timer = None, None, None
    try:
        cold = bench.repeat(1)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, MemoryError) as error:
        objection = _explain(error, bench.device, "not supported")
        # If the other ranks wait for this one in the call, nothing else would end that.
        cause, place = f"{type(error).__name__}: {objection}", find_error_place(error)
        seconds = bench.plan.timeout_seconds / 2
        timer = threading.Timer(seconds, bench.world.watchdog.end, (cause,), {"place": place})
        timer.daemon = True
        timer.start()
    samples.objection = control.agree_objection(bench.world, objection)
    if timer is not None:
        timer.cancel()
    return cold


def _explain(error: Exception, device: torch.device, what: str) -> str:
    """Return why this machine or backend cannot run a case; raise other errors again."""
    shortage = memory.describe_shortage(error, device.type, "use smaller --sizes")
    if shortage is None and is_of_program(error) and not isinstance(error, NotImplementedError):
        raise error
    return shortage or f"{what}: {control.first_line(error)}"


@dataclass
class Bursts:
    """Runs bursts of repetitions whose number rank 0 decides. Tracks how long one takes."""

    bench: Bench
    samples: Samples
    ahead_ns: int
    seconds: float = 0.0  # of one repetition and its start, in this rank
    batch: int = 1  # calls of `bench` in one repetition
    done: int = 0  # repetitions since the warm-up

    def gather_stamps(self, stamps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Gather all ranks' stamps at rank 0, in its clock; None in other ranks."""
        ahead = np.array([self.ahead_ns, self.ahead_ns, 0], dtype=np.int64)
        return control.gather_to_rank_0(self.bench.world, stamps - ahead)

    def fit_burst(self, count: int, until: float, least: int = 1) -> int:
        """Return how many of `count` repetitions fit into a burst that ends at `until`.

        At least one, and at least `least` if those fit into a burst.
        """
        if not self.seconds:
            return 1
        left = min(until - time.monotonic(), BURST_SECONDS)
        least = min(least, int(BURST_SECONDS / self.seconds))
        most = max(1, stats.GATHERED_STAMPS // self.bench.world.world_size)
        return max(1, least, min(count, most, int(left / self.seconds)))

    def run_burst(self, count: int, into: Kept, check: bool = False) -> bool:
        """Repeat rank 0's `count` times and gather stamps there; False if rank 0 stops."""
        world = self.bench.world
        if world.rank == 0 and world.watchdog.signal is not None:
            count = INTERRUPTED
        count = control.broadcast_decision(world, count)
        if count == INTERRUPTED:
            self.samples.stop_reason = "interrupted"
        if count <= 0:
            return False
        world.watchdog.rearm()
        gathered = self.gather_stamps(self._repeat(count, check))
        if gathered is not None:
            into.add(gathered)
        return True

    def _repeat(self, count: int, check: bool) -> npt.NDArray[np.int64]:
        """Run the burst. With `check`, check the outputs of a random repetition and of the last."""
        bench, stamps, position = self.bench, [], 0
        stretches = []  # (repetitions, whether to check the last)
        if check and self.batch == 1 and bench.plan.check:
            # All ranks draw the same number: seed, case and burst are the same.
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
            stamps.append(bench.repeat(stretch, self.batch))
            spent = time.monotonic() - began
            self.samples.measuring_seconds += spent
            # A single repetition may have been unusually slow, so it counts half.
            mean = spent / stretch
            self.seconds = mean if stretch >= 3 else (self.seconds + mean) / 2
            self.done += stretch
            if checked:
                self.check(self.done - 1)
                bench.rest()
        return np.concatenate(stamps)

    def check(self, repetition: int) -> None:
        """Compare the outputs with the expected ones. Keep this rank's first wrong element."""
        bench, samples = self.bench, self.samples
        if bench.plan.check and bench.operation.sized:
            samples.checks += 1
            wrong = bench.find_wrong(repetition)
            if wrong is not None and not samples.wrong:
                samples.wrong.append(wrong)


def _warm_up(bursts: Bursts, until: float, shortest_seconds: float) -> int:
    """Repeat until two successive windows agree. Return the number of calls per repetition."""
    samples, rank = bursts.samples, bursts.bench.world.rank
    most = time.monotonic() + WARM_UP_SHARE * (until - time.monotonic())
    windows = samples.warm_up
    going = True
    while going:
        count = 0
        if rank == 0:
            cut = time.monotonic() > most or windows.repetitions >= WARM_UP_MOST
            latest = [over.times(samples.calls) for over in windows.over[-2:]]
            settled = len(windows.over) > 2 and stats.windows_agree(*latest)
            if not windows.over or not (cut or settled):
                count = bursts.fit_burst(WINDOW if windows.over else WARM_UP, most)
        going = bursts.run_burst(count, windows)
    batch = 1
    if rank == 0 and windows.over:
        median = float(np.median(windows.over[-1].times(1)))
        if median < shortest_seconds:  # 0: shorter than the step of a device's clock
            batch = int(shortest_seconds / (median or shortest_seconds / clock.STEPS)) + 1
    return control.broadcast_decision(bursts.bench.world, batch)


def _take_timed(bursts: Bursts, until: float) -> None:
    """Repeat until the precision, the end of the slice or the most repetitions is reached."""
    bench, samples, plan = bursts.bench, bursts.samples, bursts.bench.plan
    times, look = np.empty(0), FIRST_LOOK
    least = time.monotonic() + LEAST_SHARE * plan.slice_seconds
    bursts.seconds *= bursts.batch
    bursts.done = bench.page_faults = bench.unhidden = 0
    going = samples.stop_reason != "interrupted"
    while going:
        count = 0
        if bench.world.rank == 0:
            precise = False
            if len(times) >= look:
                look *= 2
                interval = stats.median_interval(times)
                precise = interval is not None and interval.half_width <= plan.precision
            if len(times) >= plan.max_repetitions:
                samples.stop_reason = "most repetitions"
            elif precise and time.monotonic() > least:
                samples.stop_reason = "precision"
            elif len(times) >= FEWEST and time.monotonic() > until:
                samples.stop_reason = "time slice"
            else:
                look_at = min(look, plan.max_repetitions)
                count = bursts.fit_burst(look_at - len(times), until, FEWEST - len(times))
        going = bursts.run_burst(count, samples.timed, check=True)
        if going and bench.world.rank == 0:
            times = np.append(times, samples.timed.over[-1].times(samples.calls))
    if bursts.done:
        samples.page_faults = bench.page_faults / bursts.done
        samples.unhidden_share = bench.unhidden / bursts.done if bench.hides_launch else None


def gather_wrong(world: World, samples: Samples) -> list[Wrong]:
    """Gather the first wrong element of each rank that has one, in every rank."""
    if not control.agree_any(bool(samples.wrong)):
        return []
    everyones = control.gather_values(world, [vars(w) for w in samples.wrong])
    return [Wrong(**wrong) for ranks_own in everyones for wrong in ranks_own]


def summarise_result(
    result: Result, samples: Samples, clock_off_seconds: float | None
) -> tuple[Result, dict[str, Any] | None]:
    """Return the result with its summary, and the columns of its samples, if there are any.

    clock_off_seconds: largest error between stamps of different ranks, as in `Result`.
    """
    if not samples.timed.repetitions:
        return result, None
    assert samples.cold is not None
    single = result.case.issue == "isolated" and samples.calls == samples.cold_calls
    over = stats.join_repetitions(samples.timed.over)
    common_clock = clocks.comparable(clock_off_seconds, float(np.median(over.times(1))))
    result = replace(
        result,
        calls=samples.calls,
        batch=samples.calls // samples.cold_calls,
        cold_seconds=float(stats.over_ranks(samples.cold).times(samples.cold_calls)[0]),
        warm_up=samples.warm_up.repetitions,
        stop_reason=samples.stop_reason,
        checks=samples.checks,
        measuring_seconds=samples.measuring_seconds,
        summary=stats.summary(
            over,
            samples.calls,
            common_clock,
            single,
            hidden_launch=result.case.time_definition in LAUNCH_HIDDEN,
        ),
        clock_off_seconds=clock_off_seconds,
    )
    return result, _list_columns(result, samples)


def _list_columns(result: Result, samples: Samples) -> dict[str, Any]:
    """Return SAMPLE_COLUMNS. Warm-ups have repetitions below 0, the cold call the lowest."""
    import pyarrow as pa

    assert samples.cold is not None
    cold = Kept(samples.timed.subgroups)
    cold.add(samples.cold)
    first, warm_up = cold.rows(), samples.warm_up.rows()
    first[:, 0] -= 1 + samples.warm_up.repetitions
    warm_up[:, 0] -= samples.warm_up.repetitions
    rows = np.concatenate([first, warm_up, samples.timed.rows()])
    repetition, rank, entry, exits, device = rows.T
    return {
        "case": pa.DictionaryArray.from_arrays(np.zeros(len(rank), np.int32), [result.case.key]),
        "launch": np.full(len(rank), result.launch, dtype=np.int32),
        "repetition": repetition.astype(np.int32),
        "rank": rank.astype(np.int32),
        "entry_ns": entry,
        "exit_ns": exits,
        "device_ns": device,
        "warm_up": repetition < 0,
    }
