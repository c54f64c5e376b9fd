"""The timing loop for operations, and the set-up of a case for it.

A repetition is: start together, stamp, call, stamp. Only the call is between the stamps. On a
device with its own clock, events in the order of its work are added. repetitions.py decides on the
warm-up and how many repetitions there are.

For an isolated call of a few µs, the kernel launch takes longer than the kernel, so events around
it measure the host. `HiddenLaunch` keeps the device busy during the kernel launch: a sleep on the
device, a start of all ranks on the device, the first event, the call, and the second event are all
enqueued before the sleep ends. Only the call is then between the events. If the first event is
taken before the second one is enqueued, the launch was not hidden, and the next sleeps are longer.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ddpbench.analysis.lines import UNHIDDEN_SHARE
from ddpbench.catalog import payload
from ddpbench.catalog.operations import OPERATIONS, Buffers, Operation, idle
from ddpbench.measure import clock, start
from ddpbench.records.schema import LAUNCH_HIDDEN, Case, Plan, Wrong
from ddpbench.runtime import devices
from ddpbench.runtime.devices import Event
from ddpbench.runtime.subgroups import Subgroup
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch

    from ddpbench.catalog.operations import Call

FIRST_SECONDS, MOST_SECONDS = 100e-6, 5e-3  # of a sleep
LONGER = 1.5  # how much longer than the usual kernel launch a sleep must be


def stamped(
    count: int, start: Callable[[], object], call: Callable[[], object]
) -> tuple[list[int], list[int]]:
    """Call `start` and `call` `count` times. Return the entry and exit stamps of `call` in ns."""
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
    """One case set up in one rank, with filled buffers and a bound call.

    All ranks of the world repeat in step. The operation runs in this rank's subgroup.
    """

    def __init__(
        self, case: Case, plan: Plan, world: World, subgroup: Subgroup, device: torch.device
    ) -> None:
        """Allocate the buffers, without communication. Raises what the allocation raises."""
        operation = OPERATIONS[case.operation]
        self.case, self.operation, self.plan, self.world = case, operation, plan, world
        self.subgroup, self.device = subgroup, device
        # One period of each rank's input in this generation; None: of the reduction over all.
        self._tables: dict[int | None, npt.NDArray[np.float64]] = {}
        self.calls = case.depth * operation.messages
        self.start = start.bind_start(case.start, subgroup, device)
        # Called before a burst. Even with --sync none, the first repetition starts together:
        # otherwise it would wait for a rank that is still deciding or checking.
        self.begin: Callable[[], object] = idle
        if case.start == "none":
            self.begin = start.bind_start("barrier", subgroup, device)
        self.buffers: list[Buffers] = []
        self._issues: list[Call] = [idle]
        if subgroup.group is not None:
            rank, group = subgroup.rank, subgroup.group
            self.buffers = [_allocate(case, operation, rank, device) for _ in range(case.depth)]
            self._issues = [operation.bind(case, b, group, rank) for b in self.buffers]
        self.hides_launch = case.time_definition in LAUNCH_HIDDEN
        self._spans: Spans | None = None
        if self.hides_launch:
            self._spans = HiddenLaunch(device, start.bind_device_start(subgroup, device))
        elif devices.of(device).clock == "device":
            self._spans = Spans(device)
        self.generation = 0
        self.page_faults = 0  # of this process during repetitions
        self.unhidden = 0  # repetitions whose kernel launch should have been hidden, but was not
        self.refill()

    def refill(self) -> None:
        """Write inputs of the next generation, the same in all ranks, and poison the outputs."""
        self.generation += 1
        self._tables.clear()
        for buffers in self.buffers:
            if self.operation.sized:
                payload.poison(buffers.output)
                payload.fill(buffers.input, self._table(self.subgroup.rank))

    def rest(self) -> None:
        """Write values that a reduction in place does not change, for unchecked repetitions.

        A repeated sum in place overflows. Restoring the input before every repetition would evict
        the next call's data from the caches: 5 % slower at 4 B on mpi, 6 % at 1 MiB on gloo.
        """
        if self.operation.reduces and self.case.in_place:
            for buffers in self.buffers:
                buffers.input.fill_(1 if self.case.reduce_op == "prod" else 0)

    def repeat(self, count: int, batch: int = 1) -> npt.NDArray[np.int64]:
        """Time `count` repetitions of `batch` calls. Return this rank's stamps, int64[count, 3]."""
        call = self._call(batch)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        if self._spans:
            entry, exits, unhidden = self._spans.stamped(count, self.start, call, batch)
            self.unhidden += unhidden
        else:
            entry, exits = stamped(count, self.start, call)
        self.page_faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        device_ns = self._spans.elapsed_ns(count) if self._spans else [-1] * count
        stamps: npt.NDArray[np.int64] = np.array([entry, exits, device_ns], dtype=np.int64).T
        return stamps

    def find_wrong(self, repetition: int) -> Wrong | None:
        """Return this rank's first wrong output element, or None."""
        case = self.case
        power_of_two = case.world_size & (case.world_size - 1) == 0
        tolerance = 0.0 if case.reduce_op != "avg" or power_of_two else 2.0**-6
        for buffers in self.buffers:
            for piece in self.operation.expected(case, self.subgroup.rank):
                table = self._table(piece.rank)
                wrong = payload.find_wrong(buffers.output, piece, table, tolerance)
                if wrong is not None:
                    return Wrong(self.world.rank, repetition, *wrong)
        return None

    def _table(self, rank: int | None) -> npt.NDArray[np.float64]:
        if rank not in self._tables:
            case, n = self.case, self.case.world_size
            # Each subgroup has different data, so data from another subgroup are detected as wrong.
            own = self.generation * case.groups + self.subgroup.number
            self._tables[rank] = (
                payload.reduced(own, case.dtype, case.reduce_op or "sum", n)
                if rank is None
                else payload.table(rank, own, case.dtype, case.reduce_op, n)
            )
        return self._tables[rank]

    def _call(self, batch: int) -> Callable[[], object]:
        """Return the call between the stamps.

        It returns once the result has arrived, or will arrive before the device's next work.
        """
        issues, first = self._issues, self._issues[0]
        if len(issues) > 1:  # pipelined

            def call() -> None:
                for _ in range(batch):
                    for work in [issue() for issue in issues]:
                        if work is not None:
                            work.wait()
        elif self.case.async_op:

            def call() -> None:
                for _ in range(batch):
                    work = first()
                    if work is not None:
                        work.wait()
        elif batch > 1:

            def call() -> None:
                for _ in range(batch):
                    first()
        else:
            return first
        return call


def pipeline_depth(nbytes: int, plan: Plan) -> int:
    """Return the operations in flight: the plan's, or fewer to keep the buffers below 256 MiB.

    Each operation has its own buffers because gloo works on several at once.
    """
    return max(2, min(plan.depth, 2**28 // max(nbytes, 1)))


def needed_nbytes(case: Case, operation: Operation, element_nbytes: int) -> int:
    """Return the memory that one rank needs: buffers, the check and the backend's copy."""
    most = max(sum(operation.elements(case, rank)) for rank in {0, case.root or 0})
    return case.depth * most * element_nbytes + 2 * case.nbytes


def _allocate(case: Case, operation: Operation, rank: int, device: torch.device) -> Buffers:
    """Allocate flat tensors. In place, one is a view of the other, as in torch and nccl-tests."""
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


def settle() -> None:
    """Keep torch's worker threads and the garbage collector out of the timed spans of a sweep.

    torch's worker threads spin for a while after a fill or a check, on the cores that a backend's
    threads need: a gloo all_reduce of 1 MiB took four times as long. The garbage collector runs
    between cases and skips the objects that exist now.
    """
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


class Spans:
    """Spans on a device, between pairs of events that are made outside the timed spans."""

    def __init__(self, device: torch.device) -> None:
        self.kind, self.device = devices.of(device), device
        self._pairs: list[tuple[Event, Event]] = []

    def pairs(self, count: int) -> Iterator[tuple[Event, Event]]:
        """Return the events of this many spans, which may have been used before."""
        while len(self._pairs) < count:
            pair = self.kind.event(self.device), self.kind.event(self.device)
            for event in pair:
                event.record()  # the first time takes longer
            self._pairs.append(pair)
        return iter(self._pairs[:count])

    def elapsed_ns(self, count: int) -> list[int]:
        return [devices.elapsed_ns(*pair) for pair in self.pairs(count)]

    def stamped(
        self, count: int, start: Callable[[], object], call: Callable[[], object], calls: int
    ) -> tuple[list[int], list[int], int]:
        """Run `start` and `call` `count` times; `call` makes this number of `calls`.

        Return the host's stamps before the call and after the device has done its work, in ns, and
        how many kernel launches were not hidden although they should have been: none.
        """
        pairs, wait, device = self.pairs(count), self.kind.synchronize_stream, self.device

        def timed() -> None:
            begin, end = next(pairs)
            begin.record()
            call()
            end.record()
            wait(device)

        return *stamped(count, start, timed), 0


class HiddenLaunch(Spans):
    """Spans of calls that are enqueued while the device sleeps."""

    def __init__(self, device: torch.device, together: Callable[[], object]) -> None:
        """`together` starts the ranks on their devices, without waiting for it."""
        super().__init__(device)
        self._together = together
        self.seconds = FIRST_SECONDS  # of the sleep for one call
        self.kind.sleep(device, 0.0)  # the first sleep measures the speed of the clock

    def stamped(
        self, count: int, start: Callable[[], object], call: Callable[[], object], calls: int
    ) -> tuple[list[int], list[int], int]:
        """Do as in Spans. The host's stamps span the kernel launch alone."""
        now, kind, device = clock.now_ns, self.kind, self.device
        together, seconds = self._together, min(self.seconds * calls, MOST_SECONDS)
        entry: list[int] = []
        exits: list[int] = []
        issue: list[int] = []
        unhidden = 0
        for begin, end in self.pairs(count):
            start()
            first = now()
            kind.sleep(device, seconds)
            together()
            begin.record()
            began = now()
            call()
            ended = now()
            end.record()
            unhidden += begin.query()
            issue.append(now() - first)
            kind.synchronize_stream(device)
            entry.append(began)
            exits.append(ended)
        # A single repetition shows little: the first call of a case takes far longer than others.
        if count > 1 and unhidden > UNHIDDEN_SHARE * count:
            usual = LONGER * median(issue) * 1e-9 / calls
            self.seconds = min(max(2 * self.seconds, usual), MOST_SECONDS)
        return entry, exits, unhidden
