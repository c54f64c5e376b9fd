"""The timing loop: the only place that stamps a call, and how often it is called.

A repetition is: start together, stamp, call, stamp. Nothing else lies between the stamps. Rank 0
decides how many repetitions come next and tells the others in between; checks, gathering and
decisions happen there too. See `Samples` for what comes out.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddpbench.analysis import stats
from ddpbench.catalog import payload
from ddpbench.catalog.operations import Buffers, Operation
from ddpbench.measure import clock
from ddpbench.measure.start import STARTS
from ddpbench.records.schema import Case, Plan, Wrong
from ddpbench.runtime import agree
from ddpbench.runtime.group import Group

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

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
    """What a case gave. The arrays are in rank 0 only: int64[world, repetition, 3] of ns,
    (entry, exit, device time or -1)."""

    calls: int = 1
    cold: npt.NDArray[np.int64] | None = None
    cold_calls: int = 1
    warm_up: list[npt.NDArray[np.int64]] = field(default_factory=list)
    timed: list[npt.NDArray[np.int64]] = field(default_factory=list)
    stop_reason: str = ""
    checks: int = 0
    wrong: list[Wrong] = field(default_factory=list)
    measuring_seconds: float = 0.0
    objection: str | None = None  # why the case was skipped on all ranks


def stamped(
    count: int, start: Callable[[], object], call: Callable[[], object]
) -> tuple[list[int], list[int]]:
    """Repeat `call`, each time started together: entry and exit stamps in ns."""
    now = clock.now_ns
    entry: list[int] = []
    exits: list[int] = []
    for _ in range(count):
        start()
        began = now()
        call()
        ended = now()
        entry.append(began)
        exits.append(ended)
    return entry, exits


class Bench:
    """One case set up in one rank: buffers filled, call bound, ready to be repeated."""

    def __init__(
        self, case: Case, operation: Operation, plan: Plan, group: Group,
        tested: dist.ProcessGroup, device: torch.device,
    ) -> None:  # fmt: skip
        """Raises whatever allocation raises; no communication."""
        self.case, self.operation, self.plan, self.group = case, operation, plan, group
        self.device = device
        self._tables: dict[tuple[int | None, int], npt.NDArray[np.float64]] = {}
        sets = pipeline_depth(case, operation, plan) if case.issue == "pipelined" else 1
        self.buffers = [_allocate(case, operation, group.rank, device) for _ in range(sets)]
        self.calls = sets * operation.messages
        self.start = STARTS[case.start](tested, device)
        self._issues = [operation.bind(case, b, tested, group.rank) for b in self.buffers]
        self._events: list[tuple[Any, Any]] = []
        self.generation = 0
        self.refill()

    def refill(self) -> None:
        """New inputs, the same generation in all ranks; poison where a result must come."""
        self.generation += 1
        rank = self.group.rank
        for buffers in self.buffers:
            if self.operation.sized:
                payload.poison(buffers.output)
                payload.fill(buffers.input, self._table(rank))

    def rest(self) -> None:
        """Values that a reduction in place leaves as they are, for repetitions not checked.

        A sum in place overflows when repeated. Copying the input back before every repetition
        costs the next call its caches: 5 % at 4 B on mpi, 6 % at 1 MiB on gloo, where this costs
        nothing (tests/perf/overhead.py).
        """
        if self.operation.reduces and self.case.in_place:
            for buffers in self.buffers:
                buffers.input.fill_(1 if self.case.reduce_op == "prod" else 0)

    def repeat(self, count: int, batch: int = 1) -> npt.NDArray[np.int64]:
        """`count` repetitions of `batch` calls: int64[count, 3] of this rank's stamps."""
        call = self._call(batch)
        entry, exits = stamped(count, self.start, call)
        device_ns = [-1] * count
        if self.device.type == "cuda":
            device_ns = [round(a.elapsed_time(b) * 1e6) for a, b in self._events]
            self._events.clear()
        stamps: npt.NDArray[np.int64] = np.array([entry, exits, device_ns], dtype=np.int64).T
        return stamps

    def wrong(self, repetition: int) -> Wrong | None:
        """This rank's first wrong element in the outputs that lie in the buffers now."""
        case = self.case
        for buffers in self.buffers:
            for piece in self.operation.expected(case, self.group.rank):
                power_of_two = case.world_size & (case.world_size - 1) == 0
                tolerance = 0.0 if case.reduce_op != "avg" or power_of_two else 2.0**-6
                found = payload.first_wrong(
                    buffers.output, piece, self._table(piece.rank), tolerance
                )
                if found is not None:
                    return Wrong(self.group.rank, repetition, *found)
        return None

    def _table(self, rank: int | None) -> npt.NDArray[np.float64]:
        key = (rank, self.generation)
        if key not in self._tables:
            self._tables = {k: v for k, v in self._tables.items() if k[1] == self.generation}
            case, n = self.case, self.case.world_size
            self._tables[key] = (
                payload.reduced(self.generation, case.dtype, case.reduce_op or "sum", n)
                if rank is None
                else payload.table(rank, self.generation, case.dtype, case.reduce_op, n)
            )
        return self._tables[key]

    def _call(self, batch: int) -> Callable[[], object]:
        """The call between the stamps: it returns when the result is there."""
        issues = self._issues * batch
        call: Callable[[], object] = issues[0]
        if self.case.async_op:

            def call() -> None:
                for work in [issue() for issue in issues]:
                    if work is not None:
                        work.wait()
        elif batch > 1:

            def call() -> None:
                for issue in issues:
                    issue()

        return self._on_stream(call) if self.device.type == "cuda" else call

    def _on_stream(self, call: Callable[[], object]) -> Callable[[], object]:
        """Events around the call on the stream that waits for the result."""
        import torch

        stream = torch.cuda.current_stream(self.device)
        event: Any = torch.cuda.Event

        def timed() -> None:
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record(stream)
            call()
            end.record(stream)
            stream.synchronize()
            self._events.append((begin, end))

        return timed


def pipeline_depth(case: Case, operation: Operation, plan: Plan) -> int:
    """Operations in flight: as planned, fewer where their buffers would pass 256 MiB.

    Each has buffers of its own: gloo works on several at once.
    """
    return max(2, min(plan.depth, 2**28 // max(case.nbytes, 1)))


def needed_nbytes(case: Case, operation: Operation, plan: Plan, element_nbytes: int) -> int:
    """Memory one rank needs for a case: buffers, the check, the backend's copy."""
    most = max(sum(operation.elements(case, rank)) for rank in {0, case.root or 0})
    sets = pipeline_depth(case, operation, plan) if case.issue == "pipelined" else 1
    return sets * most * element_nbytes + 2 * case.nbytes


def _allocate(case: Case, operation: Operation, rank: int, device: torch.device) -> Buffers:
    """Flat tensors; in place, one lies in the other as torch and nccl-tests have it."""
    import torch

    inputs, outputs = operation.elements(case, rank)
    dtype = getattr(torch, case.dtype)
    if not case.in_place:
        return Buffers(
            torch.zeros(inputs, dtype=dtype, device=device),
            torch.zeros(outputs, dtype=dtype, device=device),
        )
    whole = torch.zeros(max(inputs, outputs), dtype=dtype, device=device)
    block = slice(rank * case.count, (rank + 1) * case.count) if inputs != outputs else slice(None)
    return Buffers(
        whole[block] if inputs < outputs else whole, whole[block] if outputs < inputs else whole
    )


def measure(
    case: Case, operation: Operation, plan: Plan, group: Group, tested: dist.ProcessGroup,
    device: torch.device, shortest_seconds: float, objection: str | None,
) -> Samples:  # fmt: skip
    """Measure one case on all ranks together, or skip it on all ranks together.

    objection: this rank's reason not to, found before. Returns what rank 0 gathered; in other
    ranks only `objection`, `checks` and `stop_reason` mean something.
    """
    samples = Samples()
    bench = None
    if objection is None:
        try:
            bench = Bench(case, operation, plan, group, tested, device)
        except (MemoryError, RuntimeError, TypeError, AttributeError) as error:
            objection = f"cannot make the buffers: {_first_line(error)}"
    samples.objection = agree.first_objection(group, objection)
    if samples.objection is not None or bench is None:
        return samples
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        _measure(bench, samples, shortest_seconds)
    finally:
        if enabled:
            gc.enable()
    return samples


def settle() -> None:
    """Once before a sweep: keep this process's own helpers out of the timed spans.

    torch's worker threads spin for a while after a fill or a check, on the cores that a backend's
    threads need (a gloo all_reduce of 1 MiB took four times as long); and what lives now is not
    looked at again by the garbage collector, which runs between cases.
    """
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def _measure(bench: Bench, samples: Samples, shortest_seconds: float) -> None:
    group, plan = bench.group, bench.plan
    began = time.monotonic()
    until = began + plan.slice_seconds
    objection = None
    try:
        cold = bench.repeat(1)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        objection = f"not supported: {_first_line(error)}"
    samples.objection = agree.first_objection(group, objection)
    if samples.objection is not None:
        return
    pace = Pace(bench, samples, seconds=time.monotonic() - began)
    pace.measuring = pace.seconds
    samples.cold = agree.at_rank_0(group, cold)
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
    done: int = 0  # timed repetitions so far

    def fitting(self, wanted: int, until: float) -> int:
        """How many of the wanted repetitions fit the time left and a burst; at least one."""
        left = min(until - time.monotonic(), BURST_SECONDS)
        return max(1, min(wanted, int(left / self.seconds) if self.seconds else 1))

    def burst(
        self, wanted: int, batch: int, check: bool, into: list[npt.NDArray[np.int64]]
    ) -> bool:
        """Repeat as often as rank 0 says and gather into its list; False when it says stop."""
        bench, group = self.bench, self.bench.group
        if group.rank == 0 and group.watchdog.signal is not None:
            wanted = INTERRUPTED
        count = agree.decision(group, wanted)
        if count <= 0:
            if count == INTERRUPTED:
                self.samples.stop_reason = "interrupted"
            return False
        group.watchdog.rearm()
        stamps = self._repeat(count, batch, check and batch == 1 and bench.plan.check)
        gathered = agree.at_rank_0(group, stamps)
        if gathered is not None:
            into.append(gathered)
        return True

    def _repeat(self, count: int, batch: int, check: bool) -> npt.NDArray[np.int64]:
        """The burst; with `check`, a random repetition and the last are checked."""
        bench = self.bench
        ends = [count]
        if check:
            # The same draw in every rank: seed, case and burst are the same.
            draw = random.Random(f"{bench.plan.seed}/{bench.case.key}/{bench.generation}")
            ends = sorted({draw.randint(1, count), count})
        stamps, position = [], 0
        for end in ends:
            for stretch, checked in (
                ((end - 1 - position, False), (1, True)) if check else ((end - position, False),)
            ):
                if stretch <= 0:
                    continue
                if checked:
                    bench.refill()
                began = time.monotonic()
                stamps.append(bench.repeat(stretch, batch))
                spent = time.monotonic() - began
                self.measuring += spent
                # One repetition alone may have been a slow one; it counts half.
                each = spent / stretch
                self.seconds = each if stretch >= 3 else (self.seconds + each) / 2
                if checked:
                    _check(bench, self.samples, self.done + end - 1)
                    bench.rest()
            position = end
        self.done += count if check else 0
        return np.concatenate(stamps)


def _warm_up(pace: Pace, until: float, shortest_seconds: float) -> int:
    """Repeat until two neighbouring windows agree; then the number of calls in one repetition."""
    samples, rank = pace.samples, pace.bench.group.rank
    most = time.monotonic() + WARM_UP_SHARE * (until - time.monotonic())
    windows = samples.warm_up
    while True:
        wanted = 0
        if rank == 0:
            count = sum(window.shape[1] for window in windows)
            cut = time.monotonic() > most or count >= WARM_UP_MOST
            if not windows or not (cut or _settled(windows, samples.calls)):
                wanted = pace.fitting(WINDOW if windows else WARM_UP, most)
        if not pace.burst(wanted, 1, check=False, into=windows):
            break
    batch = 1
    if rank == 0 and windows:
        median = float(np.median(stats.t_max(windows[-1], 1)))
        if 0 < median < shortest_seconds:
            batch = int(shortest_seconds / median) + 1
    return agree.decision(pace.bench.group, batch)


def _settled(windows: list[npt.NDArray[np.int64]], calls: int) -> bool:
    return len(windows) > 2 and stats.settled(
        stats.t_max(windows[-2], calls), stats.t_max(windows[-1], calls)
    )


def _timed(pace: Pace, until: float, batch: int) -> None:
    """Repeat until the median is known well enough, the slice is over, or there are enough."""
    samples, plan, rank = pace.samples, pace.bench.plan, pace.bench.group.rank
    reasons = ["", "precision", "time slice", "most repetitions"]
    reason = 0
    times = np.empty(0)
    look = FIRST_LOOK
    least = time.monotonic() + LEAST_SHARE * plan.slice_seconds
    pace.seconds *= batch
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
                wanted = pace.fitting(min(look, plan.max_repetitions) - len(times), until)
        if not pace.burst(wanted, batch, check=True, into=samples.timed):
            break
        if rank == 0:
            times = np.append(times, stats.t_max(samples.timed[-1], samples.calls))
    samples.stop_reason = samples.stop_reason or reasons[reason]


def _check(bench: Bench, samples: Samples, repetition: int) -> None:
    """Compare the outputs with what they must be; each rank keeps its first wrong element."""
    if not bench.plan.check or not bench.operation.sized:
        return
    samples.checks += 1
    wrong = bench.wrong(repetition)
    if wrong is not None and not samples.wrong:
        samples.wrong.append(wrong)


def everyones_wrong(group: Group, samples: Samples) -> list[Wrong]:
    """The first wrong element of each rank that has one, in every rank."""
    found = agree.everyones(group, [vars(w) for w in samples.wrong])
    return [Wrong(**wrong) for mine in found for wrong in mine]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
