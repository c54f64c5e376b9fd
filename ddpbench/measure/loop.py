"""The timing loop, the only place that stamps a call, and a case set up for it.

A repetition is: start together, stamp, call, stamp. Nothing else lies between the stamps. How often
it is repeated is decided in pace.py.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddpbench.catalog import payload
from ddpbench.catalog.operations import Buffers, Operation, idle
from ddpbench.measure import clock, memory, start
from ddpbench.records.schema import Case, Plan, Wrong
from ddpbench.runtime.subgroups import Subgroup
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch

    from ddpbench.catalog.operations import Call


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
    """One case set up in one rank: buffers filled, call bound, ready to be repeated.

    `world` is all ranks, which keep in step; the operation runs in this rank's subgroup.
    """

    def __init__(
        self, case: Case, operation: Operation, plan: Plan, world: World, subgroup: Subgroup,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Raises whatever allocation raises; no communication."""
        self.case, self.operation, self.plan, self.world = case, operation, plan, world
        self.subgroup, self.device = subgroup, device
        self._tables: dict[tuple[int | None, int], npt.NDArray[np.float64]] = {}
        self.calls = case.depth * operation.messages
        self.start = start.of_team(case.start, subgroup, device)
        # Before a burst: where repetitions have no common start the first has, or it would wait
        # for a rank that still decides or checks.
        self.begin: Callable[[], object] = idle
        if case.start == "none":
            self.begin = start.of_team("barrier", subgroup, device)
        self.buffers: list[Buffers] = []
        self._issues: list[Call] = [idle]
        if subgroup.group is not None:
            rank, its = subgroup.rank, subgroup.group
            self.buffers = [_allocate(case, operation, rank, device) for _ in range(case.depth)]
            self._issues = [operation.bind(case, b, its, rank) for b in self.buffers]
        self._events: list[tuple[Any, Any]] = []
        self.generation = 0
        self.page_faults = 0  # of this process while it repeated
        self.refill()
        tensors = (tensor for b in self.buffers for tensor in (b.input, b.output))
        self.huge_share = memory.huge_share(tensors, case.buffers)

    def refill(self) -> None:
        """New inputs, the same generation in all ranks; poison where a result must come."""
        self.generation += 1
        for buffers in self.buffers:
            if self.operation.sized:
                payload.poison(buffers.output)
                payload.fill(buffers.input, self._table(self.subgroup.rank))

    def rest(self) -> None:
        """Values that a reduction in place leaves as they are, for repetitions not checked.

        A sum in place overflows when repeated. Copying the input back before every repetition
        costs the next call its caches: 5 % at 4 B on mpi, 6 % at 1 MiB on gloo, where this costs
        nothing.
        """
        if self.operation.reduces and self.case.in_place:
            for buffers in self.buffers:
                buffers.input.fill_(1 if self.case.reduce_op == "prod" else 0)

    def repeat(self, count: int, batch: int = 1) -> npt.NDArray[np.int64]:
        """`count` repetitions of `batch` calls: int64[count, 3] of this rank's stamps."""
        call = self._call(batch, count)
        before = _page_faults()
        entry, exits = stamped(count, self.start, call)
        self.page_faults += _page_faults() - before
        device_ns = [-1] * count
        if self.device.type == "cuda":
            device_ns = [round(a.elapsed_time(b) * 1e6) for a, b in self._events[:count]]
        stamps: npt.NDArray[np.int64] = np.array([entry, exits, device_ns], dtype=np.int64).T
        return stamps

    def wrong(self, repetition: int) -> Wrong | None:
        """This rank's first wrong element in the outputs that lie in the buffers now."""
        case = self.case
        for buffers in self.buffers:
            for piece in self.operation.expected(case, self.subgroup.rank):
                power_of_two = case.world_size & (case.world_size - 1) == 0
                tolerance = 0.0 if case.reduce_op != "avg" or power_of_two else 2.0**-6
                found = payload.first_wrong(
                    buffers.output, piece, self._table(piece.rank), tolerance
                )
                if found is not None:
                    return Wrong(self.world.rank, repetition, *found)
        return None

    def _table(self, rank: int | None) -> npt.NDArray[np.float64]:
        key = (rank, self.generation)
        if key not in self._tables:
            self._tables = {k: v for k, v in self._tables.items() if k[1] == self.generation}
            case, n = self.case, self.case.world_size
            # Each subgroup has data of its own: what comes from another is seen to be wrong.
            own = self.generation * case.groups + self.subgroup.number
            self._tables[key] = (
                payload.reduced(own, case.dtype, case.reduce_op or "sum", n)
                if rank is None
                else payload.table(rank, own, case.dtype, case.reduce_op, n)
            )
        return self._tables[key]

    def _call(self, batch: int, count: int) -> Callable[[], object]:
        """The call between the stamps: it returns when the result is there."""
        first, *others = self._issues
        call: Callable[[], object] = first
        if others:  # pipelined

            def call() -> None:
                for work in [issue() for issue in self._issues]:
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

        return self._on_stream(call, count) if self.device.type == "cuda" else call

    def _on_stream(self, call: Callable[[], object], count: int) -> Callable[[], object]:
        """Events around the call on the stream that waits for the result."""
        import torch

        stream = torch.cuda.current_stream(self.device)
        event: Any = torch.cuda.Event
        while len(self._events) < count:  # made and recorded once before, outside of any span
            pair = event(enable_timing=True), event(enable_timing=True)
            pair[0].record(stream)
            pair[1].record(stream)
            self._events.append(pair)
        pairs = iter(self._events)

        def timed() -> None:
            begin, end = next(pairs)
            begin.record(stream)
            call()
            end.record(stream)
            stream.synchronize()

        return timed


def _page_faults() -> int:
    """Of all threads of this process so far, those that no disk was needed for."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def pipeline_depth(nbytes: int, plan: Plan) -> int:
    """Operations in flight: as planned, fewer where their buffers would pass 256 MiB.

    Each has buffers of its own: gloo works on several at once.
    """
    return max(2, min(plan.depth, 2**28 // max(nbytes, 1)))


def needed_nbytes(case: Case, operation: Operation, element_nbytes: int) -> int:
    """Memory one rank needs for a case: buffers, the check, the backend's copy."""
    most = max(sum(operation.elements(case, rank)) for rank in {0, case.root or 0})
    return case.depth * most * element_nbytes + 2 * case.nbytes


def _allocate(case: Case, operation: Operation, rank: int, device: torch.device) -> Buffers:
    """Flat tensors; in place, one lies in the other as torch and nccl-tests have it."""
    import torch

    inputs, outputs = operation.elements(case, rank)
    dtype = getattr(torch, case.dtype)
    if not case.in_place:
        return Buffers(
            memory.zeros(inputs, dtype, device, case.buffers),
            memory.zeros(outputs, dtype, device, case.buffers),
        )
    whole = memory.zeros(max(inputs, outputs), dtype, device, case.buffers)
    block = slice(rank * case.count, (rank + 1) * case.count) if inputs != outputs else slice(None)
    return Buffers(
        whole[block] if inputs < outputs else whole, whole[block] if outputs < inputs else whole
    )


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
