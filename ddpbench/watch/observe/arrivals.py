"""When this rank arrived at each collective, on every group and from every API.

Times come from torch's Flight Recorder and from the stamps of groups over mpi4py; nothing is added
to a call. gloo's record has no ends. Where ends are known (mpi4py, nccl with
TORCH_NCCL_ENABLE_TIMING=1, DDP's reductions on gloo with time_transfers=True), `wire_ns` of a rank
is its whole time in the call, with its wait for the others. The transfer is the least over the
ranks, because the last rank to arrive waits for nobody. Sends and receives are left out.

gloo reports to nobody when a call ends. With time_transfers=True a communication hook stamps it, on
every DDP module on gloo without a hook of the user's. It reduces as DDP does without one: it
multiplies the bucket by 1/n and adds it up.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from msgspec import structs

from ddpbench.hang.flight_recorder import DTYPES, name_operation
from ddpbench.hang.process_groups import Group, list_groups
from ddpbench.records.wording import spans
from ddpbench.watch.observe.recorder_dump import Entry, RecorderDump
from ddpbench.watch.observe.steps import Step
from ddpbench.watch.window import CALLS, Call

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ddpbench.mpi_backend.stamps import Stamp

# Seconds between reads of the recorder: multiples of the shortest by the system clock, so that all
# ranks read the same calls.
PERIODS = (5, 10, 30, 60, 300)
SHARE = 1e-3  # of the time that reads may take
# To read one entry. It is not measured in each rank, because all ranks must read at the same times.
ENTRY_SECONDS = 15e-6
CHUNK = 64  # calls that are handled before other threads get a turn
PAUSE_SECONDS = 1e-4
KEPT_STEPS = 8192
REDUCTIONS = 2000  # stamps that wait to be taken
MPI_SECONDS = 5  # that a call over MPI takes at most, to be placed: it is read once it has ended
NS = 10**9
UNNAMED = (
    "TORCH_DISTRIBUTED_DEBUG=DETAIL hides the groups of calls, so the collectives below lack them: "
    "unset it"
)


def find_round_ns(now_ns: int) -> int:
    """Return the multiple of PERIODS[0] that ranks report up to at this time.

    A clock may come to it a little after those of other ranks, so that it may be 1 s ahead.
    """
    soon_ns = now_ns + NS
    return soon_ns - soon_ns % (PERIODS[0] * NS)


class Reduction(NamedTuple):
    """When a hook called all_reduce, when that returned and when it ended, by the system clock."""

    called_ns: int
    returned_ns: int
    ended_ns: int


class Reducers:
    """Stamps the reductions of DDP over gloo. find_roots: returns the root modules of the job."""

    def __init__(self, find_roots: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._find_roots = find_roots
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stamps: deque[Reduction] = deque(maxlen=REDUCTIONS)

    def after_step(self, _number: int) -> None:
        """Look for new modules; for the training thread between steps.

        A hook cannot be set in a backward, nor before the user's own, which comes before training.
        """
        from torch.nn.parallel import DistributedDataParallel

        for root in self._find_roots():
            for module in root.modules():
                if isinstance(module, DistributedDataParallel) and module not in self._modules:
                    self._modules.add(module)
                    _stamp_reductions(module, self._stamps)

    def take(self) -> list[Reduction]:
        """Return the reductions that have ended since the last time."""
        return [self._stamps.popleft() for _ in range(len(self._stamps))]


def _stamp_reductions(ddp: Any, stamps: deque[Reduction]) -> None:
    """Set the hook, unless there is one or it would not reduce alike."""
    import torch.distributed as dist

    from ddpbench.runtime import devices

    group, device = ddp.process_group, next(ddp.parameters()).device
    size = group.size()
    # DDP divides gradients that lie in the bucket already. For powers of two that is the product.
    is_equal = not ddp.gradient_as_bucket_view or size & (size - 1) == 0
    if ddp._comm_hooks or not is_equal or devices.of(device).clock == "device":
        return
    # A hook in C++ makes torch refuse a second one.
    with contextlib.suppress(RuntimeError, AttributeError):
        if group._get_backend(device).name() == "gloo":
            dist._register_comm_hook(ddp.reducer, stamps, partial(_reduce, group, 1 / size))


def _reduce(
    group: dist.ProcessGroup, factor: float, stamps: deque[Reduction], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    import torch.distributed as dist

    buffer = bucket.buffer().mul_(factor)
    called_ns = time.time_ns()
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    returned_ns = time.time_ns()

    def end(future: Any) -> Any:
        stamps.append(Reduction(called_ns, returned_ns, time.time_ns()))
        return future.value()[0]

    reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(end)
    return reduced


class Arrivals:
    """Reads the calls that this rank makes from now on; those of a step once it has ended.

    reducers: whose reductions have ends.
    unavailable: a sentence on what cannot be read, and what to do; "" if all can be read.
    """

    def __init__(self, reducers: Reducers | None = None) -> None:
        self.unavailable = ""
        self._reducers = reducers
        self._dump = RecorderDump()
        self._groups: dict[str, Group] = {}
        self._recorders: dict[str, int] = {}  # name of a group → the recorder's latest number of it
        self._since_ns = time.time_ns()  # earlier calls may be of groups that have gone
        self._due_ns = 0  # before this, the recorder is left alone: a read of it may take long
        self._steps: deque[Step] = deque(maxlen=KEPT_STEPS)
        self._later: deque[Call] = deque(maxlen=2 * CALLS)  # of a later read
        self._reductions: deque[Reduction] = deque(maxlen=2 * CALLS)

    def read(self, steps: Sequence[Step], final: bool = False) -> list[Call]:
        """Return the calls since the last read, the newest CALLS, oldest first.

        steps: those that ended since the last read; final: nothing will be read after this.
        Otherwise the calls end with the last multiple of PERIODS[0] by the system clock, so that
        all ranks return the same calls. For this, read soon after such a moment.
        """
        self._steps.extend(steps)
        now_ns = time.time_ns()
        ahead_ns = now_ns - time.perf_counter_ns()
        until_ns = now_ns if final else find_round_ns(now_ns)
        self._groups |= {group.name: group for group in list_groups()}
        found = [*self._later, *self._read_mpi()]
        is_due = final or until_ns >= self._due_ns
        if is_due:
            found += self._read_recorder(until_ns)
            wanted = self._dump.entries * ENTRY_SECONDS / SHARE
            period_ns = next((each for each in PERIODS if each >= wanted), PERIODS[-1]) * NS
            self._due_ns = until_ns - until_ns % period_ns + period_ns
        time.sleep(PAUSE_SECONDS)
        found.sort(key=lambda call: call.entered_ns)
        end_ns = until_ns
        if self._steps and not final:  # where later calls belong is known when their step ends
            end_ns = min(until_ns, self._steps[-1].ended_ns + ahead_ns)
        known = bisect_right([call.entered_ns for call in found], end_ns)
        self._later = deque(found[known:], maxlen=2 * CALLS)
        calls = [
            structs.replace(call, step=self._find_step(call.entered_ns - ahead_ns))
            for call in found[:known]
        ]
        read_ns = until_ns - ahead_ns - MPI_SECONDS * NS  # all earlier calls were read
        while is_due and len(self._steps) > 1 and self._steps[0].ended_ns < read_ns:
            self._steps.popleft()
        return list({(call.group, call.number): call for call in calls}.values())[-CALLS:]

    def close(self) -> None:
        """Stop stamping calls over MPI."""
        if "ddpbench.mpi_backend.stamps" in sys.modules:
            from ddpbench.mpi_backend import stamps

            stamps.end()

    def _find_step(self, ns: int) -> int:
        """Return the number of the step at this time, -1 if it is unknown."""
        at = bisect_right(self._steps, ns, key=lambda step: step.began_ns) - 1
        return self._steps[at].number if at >= 0 and ns < self._steps[at].ended_ns else -1

    def _read_mpi(self) -> list[Call]:
        if "ddpbench.mpi_backend.work" not in sys.modules:
            return []
        from ddpbench.mpi_backend import stamps

        return [
            _read_stamp(stamp, group)
            for name, ended in stamps.take()
            if (group := self._groups.get(name)) is not None
            for stamp in ended
        ]

    def _read_recorder(self, until_ns: int) -> list[Call]:
        self._reductions.extend(self._reducers.take() if self._reducers else ())
        ends = {one.called_ns: one for one in self._reductions}
        called = sorted(ends)
        backends = {backend for group in self._groups.values() for backend in group.backends}
        entries = self._dump.read_new(backends, until_ns, CALLS)
        names = [_read_name(bytes(entry.process_group)) for entry in entries]
        self.unavailable = self._dump.unavailable or (UNNAMED if "" in names else self.unavailable)
        self._recorders |= {n: entry.pg_id for n, entry in zip(names, entries, strict=True)}
        found = []
        for index, (name, entry) in enumerate(zip(names, entries, strict=True)):
            if index % CHUNK == 0:
                time.sleep(PAUSE_SECONDS)
            group = self._groups.get(name)
            # Of groups with equal names, the newest is in use.
            is_current = entry.pg_id == self._recorders[name]
            if group is None or not is_current:
                continue
            if entry.time_created_ns < self._since_ns:
                continue
            call = _read_entry(entry, group)
            at = bisect_right(called, call.entered_ns) - 1
            if at >= 0 and call.entered_ns <= ends[called[at]].returned_ns:
                wire_ns = ends[called[at]].ended_ns - call.entered_ns
                call = structs.replace(call, wire_ns=wire_ns)
            found.append(call)
        return found


def _read_stamp(stamp: Stamp, group: Group) -> Call:
    number, operation, _, nbytes = stamp.noted
    if operation in ("scatter", "gather"):  # one rank's part was noted
        nbytes *= len(group.members)
    return Call(
        group=_name_group(group.name, group.members),
        number=number,
        operation=operation,
        nbytes=nbytes,
        entered_ns=stamp.issued_ns,
        wire_ns=stamp.ended_ns - stamp.began_ns,
    )


def _read_entry(entry: Entry, group: Group) -> Call:
    operation = name_operation(entry.profiling_name)
    sides = (entry.input_sizes, entry.input_dtypes), (entry.output_sizes, entry.output_dtypes)
    read, written = (_count_bytes(bytes(sizes), bytes(dtypes)) for sizes, dtypes in sides)
    nbytes = max(read, written)
    if operation in ("scatter", "gather"):  # only the root has the whole
        nbytes = len(group.members) * (written if operation == "scatter" else read)
    return Call(
        group=_name_group(group.name, group.members),
        number=entry.collective_seq_id,
        operation=operation,
        nbytes=nbytes,
        entered_ns=entry.time_created_ns,
        wire_ns=round(entry.duration_ms * 1e6) if entry.duration_ms >= 0 else -1,
    )


@lru_cache(1024)
def _read_name(data: bytes) -> str:
    return str(json.loads(data)[0])


@lru_cache(1024)
def _count_bytes(sizes: bytes, dtypes: bytes) -> int:
    import torch

    names = [DTYPES.get(name, "uint8") for name in json.loads(dtypes)]
    return sum(
        prod(shape) * getattr(torch, name).itemsize
        for shape, name in zip(json.loads(sizes), names, strict=False)
    )


@lru_cache(1024)
def _name_group(name: str, members: tuple[int, ...]) -> str:
    """Name a group alike in all of its ranks; groups that were split off share a name."""
    text = spans(members)
    if len(text) > 40:
        text = f"{len(members)} ranks, {crc32(repr(members).encode()):08x}"
    return f"{name} ({text})"
