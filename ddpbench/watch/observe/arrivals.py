"""When this rank arrived at each collective, on every group and from every API.

Times come from torch's Flight Recorder and from the stamps of groups over mpi4py; nothing is added
to a call. gloo's record has no ends. Where ends are known (mpi4py, nccl with
TORCH_NCCL_ENABLE_TIMING=1, DDP's reductions on gloo with wire=True), `wire_ns` of a rank is its
whole time in the call, with its wait for the others. The transfer is the least over the ranks,
because the last rank to arrive waits for nobody.

A call that its rank awaits later (async_op=True) cannot be told from one that blocks at once: its
room ends with the next mark or call. Sends and receives are left out.
"""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING
from zlib import crc32

from ddpbench.hang.flight_recorder import DTYPES, name_operation
from ddpbench.hang.process_groups import Group, list_groups
from ddpbench.records.wording import spans
from ddpbench.watch.observe.recorder_dump import Entry, RecorderDump
from ddpbench.watch.observe.steps import BACKWARD, Step
from ddpbench.watch.observe.wire import Reducers, Reduction
from ddpbench.watch.window import BLOCKED, CALLS, Call

if TYPE_CHECKING:
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
MPI_SECONDS = 5  # that a call over MPI takes at most, to be placed: it is read once it has ended
NS = 10**9
UNNAMED = (
    "TORCH_DISTRIBUTED_DEBUG=DETAIL hides the groups of calls, so waits in them outside backward "
    "count as the ranks' own time: unset it"
)


def find_round_ns(now_ns: int) -> int:
    """Return the multiple of PERIODS[0] that ranks report up to at this time.

    A clock may come to it a little after those of other ranks, so that it may be 1 s ahead.
    """
    soon_ns = now_ns + NS
    return soon_ns - soon_ns % (PERIODS[0] * NS)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A call before it is known where in a step it was made.

    thread: that made it; ends_ns: when it was over, if that is known; blocks: whether its thread
    can be blocked in it; in_backward: or even if it is called there.
    """

    group: str
    number: int
    operation: str
    nbytes: int
    entered_ns: int
    thread: str | int
    wire_ns: int = -1
    ends_ns: int = 0
    blocks: bool = True
    in_backward: bool = True


class Arrivals:
    """Reads the calls that this rank makes from now on; those of a step once it has ended.

    reducers: the job's DDP modules, whose reductions in backward block nobody there.
    unavailable: a sentence on what cannot be read, and what to do; "" if all can be read.
    skipped: whether the last read left out torch's recorder, because reads of it take long. Its
    calls follow in a later read. Steps without their calls must not be compared with others.
    """

    def __init__(self, reducers: Reducers | None = None) -> None:
        self.skipped, self.unavailable = False, ""
        self._reducers = reducers
        self._dump = RecorderDump()
        self._groups: dict[str, Group] = {}
        self._recorders: dict[str, int] = {}  # name of a group → the recorder's latest number of it
        self._since_ns = time.time_ns()  # earlier calls may be of groups that have gone
        self._due_ns = 0
        self._steps: deque[Step] = deque(maxlen=KEPT_STEPS)
        self._later: deque[_Arrival] = deque(maxlen=CALLS)  # in a step that has not ended
        self._over_mpi: deque[_Arrival] = deque(maxlen=2 * CALLS)
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
        found = self._read_mpi(until_ns)
        self.skipped = not final and until_ns < self._due_ns
        if not self.skipped:
            found += self._read_recorder(until_ns)
            wanted = self._dump.entries * ENTRY_SECONDS / SHARE
            period_ns = next((each for each in PERIODS if each >= wanted), PERIODS[-1]) * NS
            self._due_ns = until_ns - until_ns % period_ns + period_ns
        time.sleep(PAUSE_SECONDS)
        found = sorted([*self._later, *found], key=lambda arrival: arrival.entered_ns)
        nexts = _find_nexts(found)
        known = len(found)
        if self._steps and not final:  # where later calls belong is known when their step ends
            end_ns = self._steps[-1].ended_ns + ahead_ns
            known = bisect_right([arrival.entered_ns for arrival in found], end_ns)
        self._later = deque(found[known:], maxlen=CALLS)
        places = _Places(self._steps, ahead_ns, found[0].entered_ns if found else now_ns)
        calls = map(places.locate, found[:known], nexts)
        if not self.skipped:
            self._forget_steps(until_ns - ahead_ns - MPI_SECONDS * NS)
        return list({(call.group, call.number): call for call in calls}.values())[-CALLS:]

    def close(self) -> None:
        """Stop stamping calls over MPI."""
        if "ddpbench.mpi_backend.stamps" in sys.modules:
            from ddpbench.mpi_backend import stamps

            stamps.end()

    def _forget_steps(self, before_ns: int) -> None:
        """Forget steps that ended before this, except the last: all their calls were read."""
        while len(self._steps) > 1 and self._steps[0].ended_ns < before_ns:
            self._steps.popleft()

    def _read_mpi(self, until_ns: int) -> list[_Arrival]:
        if "ddpbench.mpi_backend.work" not in sys.modules:
            return []
        from ddpbench.mpi_backend import stamps

        for name, ended in stamps.take():
            group = self._groups.get(name)
            self._over_mpi.extend(_read_stamp(stamp, group) for stamp in ended if group)
        found = [one for one in self._over_mpi if one.entered_ns <= until_ns]
        later = [one for one in self._over_mpi if one.entered_ns > until_ns]
        self._over_mpi = deque(later, self._over_mpi.maxlen)
        return found

    def _read_recorder(self, until_ns: int) -> list[_Arrival]:
        reducing = self._reducers.find_groups() if self._reducers else frozenset()
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
            arrival = _read_entry(entry, group, name in reducing)
            at = bisect_right(called, arrival.entered_ns) - 1
            if at >= 0 and arrival.entered_ns <= ends[called[at]].returned_ns:
                wire_ns = ends[called[at]].ended_ns - arrival.entered_ns
                arrival = replace(arrival, wire_ns=wire_ns)
            found.append(arrival)
        return found


class _Places:
    """The spans of the latest steps, by the system clock.

    ahead_ns: of the system clock before perf_counter; since_ns: the earliest time asked for.
    """

    def __init__(self, steps: Sequence[Step], ahead_ns: int, since_ns: int) -> None:
        self._begins: list[int] = []
        self._spans: list[tuple[int, int, int]] = []  # step, phase, end
        recent = []
        for step in reversed(steps):
            if step.ended_ns + ahead_ns < since_ns:
                break
            recent.append(step)
        for step in reversed(recent):
            for phase, begin_ns, end_ns in step.spans:
                self._begins.append(begin_ns + ahead_ns)
                self._spans.append((step.number, phase, end_ns + ahead_ns))

    def locate(self, arrival: _Arrival, next_ns: int) -> Call:
        """next_ns: the next call of the same thread, or as late as now."""
        at = bisect_right(self._begins, arrival.entered_ns) - 1
        step, phase, end_ns = self._spans[at] if at >= 0 else (-1, -1, 0)
        if end_ns <= arrival.entered_ns:
            step, phase, end_ns = -1, -1, next_ns
        blocks = arrival.blocks and phase != BLOCKED
        if not blocks or (phase == BACKWARD and not arrival.in_backward):
            phase = -1
        return Call(
            group=arrival.group,
            number=arrival.number,
            operation=arrival.operation,
            nbytes=arrival.nbytes,
            entered_ns=arrival.entered_ns,
            room_ns=min(arrival.ends_ns or next_ns, next_ns, end_ns) - arrival.entered_ns,
            step=step,
            phase=phase,
            wire_ns=arrival.wire_ns,
        )


def _find_nexts(arrivals: Sequence[_Arrival]) -> list[int]:
    """Return when each call's thread made its next call, or the time now."""
    nexts: dict[str | int, int] = {}
    now_ns = time.time_ns()
    found = []
    for arrival in reversed(arrivals):
        found.append(nexts.get(arrival.thread, now_ns))
        nexts[arrival.thread] = arrival.entered_ns
    return found[::-1]


def _read_stamp(stamp: Stamp, group: Group) -> _Arrival:
    number, operation, _, nbytes = stamp.noted
    if operation in ("scatter", "gather"):  # one rank's part was noted
        nbytes *= len(group.members)
    return _Arrival(
        group=_name_group(group.name, group.members),
        number=number,
        operation=operation,
        nbytes=nbytes,
        entered_ns=stamp.issued_ns,
        thread="mpi",
        wire_ns=stamp.ended_ns - stamp.began_ns,
        ends_ns=stamp.ended_ns,
        blocks=stamp.waited,
    )


def _read_entry(entry: Entry, group: Group, reduces: bool) -> _Arrival:
    operation = name_operation(entry.profiling_name)
    sides = (entry.input_sizes, entry.input_dtypes), (entry.output_sizes, entry.output_dtypes)
    read, written = (_count_bytes(bytes(sizes), bytes(dtypes)) for sizes, dtypes in sides)
    nbytes = max(read, written)
    if operation in ("scatter", "gather"):  # only the root has the whole
        nbytes = len(group.members) * (written if operation == "scatter" else read)
    return _Arrival(
        group=_name_group(group.name, group.members),
        number=entry.collective_seq_id,
        operation=operation,
        nbytes=nbytes,
        entered_ns=entry.time_created_ns,
        thread=entry.thread_id,
        wire_ns=round(entry.duration_ms * 1e6) if entry.duration_ms >= 0 else -1,
        blocks=not entry.profiling_name.startswith("nccl"),  # there, the stream waits
        in_backward=not (reduces and operation == "all_reduce"),
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
