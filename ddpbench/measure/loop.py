"""The timing loop, the only place that stamps a call, and a case set up for it.

A repetition is: start together, stamp, call, stamp. Nothing else lies between the stamps. How often
it is repeated is decided in pace.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddpbench.catalog import payload
from ddpbench.catalog.operations import Buffers, Operation
from ddpbench.measure import clock
from ddpbench.measure.start import STARTS
from ddpbench.records.schema import Case, Plan, Wrong
from ddpbench.runtime.group import Group

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


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
