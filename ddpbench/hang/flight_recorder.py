"""Read the calls of this rank from existing records, at no cost to a collective.

The records are torch's Flight Recorder, the counts of the mpi4py group, or a group's sequence
number. Private names of torch are probed: if one is missing, the report contains less. A dump of
the recorder holds the interpreter for 40 ms if it has 2000 entries; its status, for heartbeats,
takes microseconds. gloo's status shows which calls have ended. On nccl only the entries of a dump
do: a heartbeat assumes that the last call is open, and the watchdog dumps before it raises an
alarm. The dump is torch's own pickle, written and read in this process: unlike the JSON, it
contains the lines of code that made each call.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from ddpbench.hang import places, torch_settings
from ddpbench.hang.cuda import relaxed_capture
from ddpbench.hang.process_groups import UNKNOWN, Group, list_groups
from ddpbench.hang.status import Call, Log

RECENT = 64  # calls of a group that are reported
NATIVE = ("gloo", "nccl", "xccl", "mpi4py")  # in the general recorder, without a name
NCCL = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")  # in the records all are "nccl"
# Their status counts sends and collectives apart, but in the same field: after 900 sends, with
# all_reduce #6 open, it reports #6 as the last begun, and #900 as the last ended.
MIXED = ("nccl", "xccl")
UNREAD = -1  # the number of a call that only the entries contain
BATCH = ":coalesced"
# Waits that are not collectives, or that ranks may call a different number of times.
OTHER = (
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "wait", "store."),
    *("new_", "split_group", "init_process_group", "destroy_process_group"),
)
DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


Key = tuple[str, str]  # a group's name, a backend
Records = dict[Key, Log]  # still without the group and its members


@dataclass(frozen=True)
class Recorder:
    """A recorder of torch: functions for its status, as JSON, and for its calls, as a pickle."""

    status: Callable[..., bytes]
    entries: Callable[..., bytes]


class Entry(msgspec.Struct, gc=False):
    """A call as torch has recorded it. pg_id: a number of its group, unique in the process."""

    pg_id: int
    process_group: tuple[str, str]  # name, description
    collective_seq_id: int
    profiling_name: str
    state: str
    retired: bool
    is_p2p: bool
    input_sizes: list[list[int]]
    input_dtypes: list[str]
    output_sizes: list[list[int]]
    output_dtypes: list[str]
    record_id: int = 0
    p2p_seq_id: int = 0
    time_created_ns: int = 0
    duration_ms: float = -1.0
    frames: list[dict[str, Any]] = []

    @property
    def operation(self) -> str:
        """The operation: "all_gather" for "nccl:_all_gather_base"."""
        name = self.profiling_name.partition(":")[2] or self.profiling_name
        return name.removeprefix("_").removesuffix("_base")

    @property
    def key(self) -> Key:
        """The name of its group, and its backend."""
        backend = self.profiling_name.partition(":")[0]
        return self.process_group[0], "nccl" if backend.startswith("nccl") else backend

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended: gloo retires entries, nccl sets the state as well."""
        return self.retired or self.state == "completed"


class GroupStatus(msgspec.Struct):
    """The numbers that a recorder has of a group; -1 for none."""

    last_enqueued_collective: int = -1
    last_completed_collective: int = -1


class Dump(msgspec.Struct):
    """The content of a recorder: its entries, the oldest first, and a status for each pg_id.

    pg_config: has an entry for each group if the recorder is on.
    """

    entries: list[Entry] = []
    pg_config: dict[str, Any] = {}
    pg_status: dict[int, GroupStatus] = {}


def find_recorders(backends: Iterable[str] = ()) -> dict[str, Recorder]:
    """Return the recorders of this torch by their names in it.

    From torch 2.15 on, some backends have one of their own, by the name of the backend.
    """
    from torch._C import _distributed_c10d as c10d

    recorders = {
        name: Recorder(getattr(c10d, f"{name}_json"), getattr(c10d, name))
        for name in ("_dump_fr_trace", "_dump_nccl_trace")
        if hasattr(c10d, f"{name}_json") and hasattr(c10d, name)
    }
    if torch_settings.find_blocking_wait():  # a dump would query events that no longer exist
        recorders.pop("_dump_nccl_trace", None)
    general = recorders.get("_dump_fr_trace")
    if general is not None and "backend" in (general.status.__doc__ or ""):
        others = {backend for backend in backends if backend not in NATIVE}
        # "nccl" may be another implementation, which does not record by itself.
        for backend in others | ({"nccl", "nccl2"} if "nccl" in backends else set()):
            status = partial(general.status, backend=backend)
            recorders[backend] = Recorder(status, partial(general.entries, backend=backend))
    return recorders


def read_dump(recorder: Recorder, lines: bool = False) -> Dump:
    """Return the content of a recorder. lines: with the lines of code that made each call.

    Raises msgspec.ValidationError, a ValueError, if torch's format has changed.
    """
    with relaxed_capture(), _uncompiled() if lines else contextlib.nullcontext(False) as ready:
        return _convert(pickle.loads(recorder.entries(includeStackTraces=ready)))


def _read_status(recorder: Recorder) -> Dump:
    return _convert(json.loads(recorder.status(includeCollectives=False)))


def _convert(data: dict[str, Any]) -> Dump:
    known = {name: part for name, part in data.items() if part}
    return msgspec.convert(known, Dump, strict=False)


def find_missing_setting(backend: str) -> str:
    """Return the setting that makes torch record a backend's calls; "" if it does, or cannot."""
    recorders = find_recorders({backend})
    recorder = recorders.get("_dump_nccl_trace" if backend in NCCL else "_dump_fr_trace")
    if any(not name.startswith("_dump") for name in recorders):
        is_on = torch_settings.count_entries() > 0
    elif backend in NCCL and (variable := torch_settings.find_blocking_wait()):
        return f"unset {variable}"
    elif backend in ("gloo", *NCCL) and recorder is not None:
        is_on = bool(_read_status(recorder).pg_config)
    else:
        return ""
    name, older = torch_settings.BUFFER_SIZES
    variable = name if "_dump_fr_trace" in recorders else older
    return "" if is_on else f"set {variable}={torch_settings.ENTRIES}"


class Flight:
    """Reads the records, and remembers the group behind each number of a recorder."""

    def __init__(self, fresh: bool = False) -> None:
        """fresh: ignore all records so far, because their groups have ended."""
        self._keys: dict[tuple[str, int], Key | None] = {}  # None: ignored
        self._groups: list[Group] = []
        self._known: frozenset[tuple[int, str]] = frozenset()
        for name, recorder in find_recorders().items() if fresh else ():
            with contextlib.suppress(*UNKNOWN):
                self._keys |= {(name, number): None for number in _read_status(recorder).pg_status}

    def read_logs(self, inside: str, whole: bool, lines: bool = True) -> tuple[Log, ...]:
        """Return one log for each group and backend.

        inside: the function of torch.distributed that the main thread has called, for groups
        without a record; whole: with the latest calls, else numbers only; lines: with the lines
        that made them.
        """
        import torch.distributed as dist

        groups: list[Group] = []
        with contextlib.suppress(*UNKNOWN):
            groups = self._current()
        kept: Records = {}
        backends = {backend for group in self._groups for backend in group.backends}
        for name, recorder in find_recorders(backends).items():
            with contextlib.suppress(*UNKNOWN):
                brief = self._brief(name, recorder)
                read = {key: record for key, record in brief.items() if record.started != UNREAD}
                # Ignore groups that have ended.
                dumps = whole or (brief != read and not dist.is_initialized())
                kept |= read | self._full(name, recorder, whole and lines) if dumps else brief
        kept |= _over_mpi()
        # The main thread's current call has no record yet, unless another call is open.
        names = {group.name for group in groups}
        is_open = any(r.started > r.finished for (name, _), r in kept.items() if name in names)
        claims = whole and inside and not is_open and not inside.startswith(OTHER)
        called = inside if claims else ""
        return tuple(log for group in groups for log in _logs(group, kept, called))

    def explain_unseen_hangs(self) -> str:
        """Return which hangs cannot be seen, and what to do, in one sentence; "" if none.

        Call it once there is a group.
        """
        backends = {backend for group in self._current() for backend in group.backends}
        settings = {
            backend: setting for backend in backends if (setting := find_missing_setting(backend))
        }
        if not settings:
            return ""
        return (
            f"the flight recorder of {' and '.join(sorted(settings))} is off: the watchdog sees a "
            "hang only while a rank is in a call of torch.distributed. Before init_process_group, "
            f"{' and '.join(sorted(set(settings.values())))}"
        )

    def _current(self) -> list[Group]:
        from torch.distributed import distributed_c10d

        names = dict(distributed_c10d._world.pg_names)
        known = frozenset((id(group), str(name)) for group, name in names.items())
        if names and known != self._known:  # without any, keep the last record of the groups
            self._groups, self._known = list_groups(), known
        return self._groups

    def _brief(self, name: str, recorder: Recorder) -> Records:
        numbers = _read_status(recorder).pg_status
        if any((name, number) not in self._keys for number in numbers):
            self._full(name, recorder)
            for number in numbers:  # ignore one whose entries are gone
                self._keys.setdefault((name, number), None)
        kept: Records = {}
        for number, status in sorted(numbers.items()):  # of equal names, the newest is in use
            if (key := self._keys[name, number]) is not None:
                started = max(0, status.last_enqueued_collective)
                finished = max(0, status.last_completed_collective)
                record = Log("", (), started, min(started, finished))
                mixed = Log("", (), UNREAD, UNREAD, moves=started + finished)
                kept[key] = mixed if key[1] in MIXED else record
        return kept

    def _full(self, name: str, recorder: Recorder, lines: bool = False) -> Records:
        dump = read_dump(recorder, lines)
        calls: dict[int, list[Entry]] = {}
        for entry in dump.entries:
            if self._keys.setdefault((name, entry.pg_id), entry.key) is not None:
                calls.setdefault(entry.pg_id, [])
        for entry in _list_collectives(dump.entries):
            if entry.pg_id in calls:
                calls[entry.pg_id].append(entry)
        kept: Records = {}
        for number, own in sorted(calls.items()):
            if (key := self._keys[name, number]) is not None:
                status = dump.pg_status.get(number, GroupStatus())
                counts = None if key[1] in MIXED else status
                kept[key] = _read(own, counts) if own else Log("", (), 0, 0, moves=0)
        return kept


def _logs(group: Group, kept: Records, called: str) -> Iterable[Log]:
    """called: the main thread's current collective, if it has no record; it may belong to any
    group."""
    for backend in group.backends:
        count = group.count(backend)
        record = kept.get((group.name, "nccl" if backend in NCCL else backend))
        # gloo counts sends and receives, too: without a record, collectives cannot be counted.
        counted = 0 if backend == "gloo" else max(count, 0)
        known = record or Log("", (), counted, counted, exact=False)
        if known.started == UNREAD:  # without a dump, the last call may be open
            known = replace(known, started=counted, finished=max(counted - 1, 0))
        # nccl counts a call, then connects the ranks if they are not yet, and only then records it.
        recorded = 0 if record is None else record.started
        if called and recorded < counted:
            calls = (*known.calls, Call(counted, called))
            known = replace(known, started=counted, finished=counted - 1, calls=calls)
        phrase = group.phrase if len(group.backends) == 1 else f"{group.phrase} on {backend}"
        moves = max(count, known.started) if backend == "gloo" else known.moves
        yield replace(known, group=phrase.strip(), members=group.members, moves=moves)


@contextlib.contextmanager
def _uncompiled() -> Iterator[bool]:
    """Yield whether the lines of code can be read at once.

    To find them torch imports torch._inductor, which takes seconds and fails if another thread does
    the same. If it is not imported, no code was compiled.
    """
    import torch

    names = vars(torch)
    if "_inductor" in names or "torch._inductor" in sys.modules:
        yield "_inductor" in names
        return
    names["_inductor"] = None
    try:
        yield True
    finally:
        if names["_inductor"] is None:
            del names["_inductor"]


def _list_collectives(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the entries of collectives.

    nccl ends a batch of calls with an extra entry, "coalesced". After sends and receives this entry
    looks like a collective with the number of the previous one, but follows a later send.
    """
    sent: dict[int, int] = {}  # the number of the last send before each group's last collective
    for entry in entries:
        is_batch = entry.profiling_name.endswith(BATCH)
        ends_sends = is_batch and sent.get(entry.pg_id) != entry.p2p_seq_id
        if not entry.is_p2p and not ends_sends:
            sent[entry.pg_id] = entry.p2p_seq_id
            yield entry


def _read(entries: Sequence[Entry], status: GroupStatus | None) -> Log:
    """Return a group's record from its entries, and from its status unless that mixes sends in.

    gloo's status is right if it counts no sends. nccl's communicator ends calls in their order, so
    the last ended one is sufficient. This matters for a batch that was captured into a CUDA graph:
    its entries never end.
    """
    calls = {entry.collective_seq_id: entry for entry in entries}
    started = max(calls)
    ended = {number for number, entry in calls.items() if entry.ended}
    recent = tuple(_call(calls[number]) for number in sorted(calls)[-RECENT:])
    if status is None:
        return Log("", (), started, max(ended, default=min(calls) - 1), recent, moves=0)
    exact = status.last_enqueued_collective in (-1, started)
    over = status.last_completed_collective if exact else 0
    open_ = [number for number in calls if number > over and number not in ended]
    return Log("", (), started, min(open_) - 1 if open_ else started, recent, exact)


def _call(entry: Entry) -> Call:
    # Only the root has an input to scatter.
    has_output = entry.operation == "scatter" or not entry.input_sizes
    dtypes = entry.output_dtypes if has_output else entry.input_dtypes
    sizes = entry.output_sizes if has_output else entry.input_sizes
    tensors = zip(dtypes, sizes, strict=False)
    shapes = [f"{DTYPES.get(d, d.lower())}[{','.join(map(str, s))}]" for d, s in tensors]
    more = f" and {len(shapes) - 2} more" if len(shapes) > 2 else ""
    lines = [(frame["name"], frame["filename"], frame["line"]) for frame in entry.frames]
    place = places.choose_place(lines) if lines else ""
    return Call(entry.collective_seq_id, entry.operation, ", ".join(shapes[:2]) + more, place)


def _over_mpi() -> Records:
    work = sys.modules.get("ddpbench.mpi_backend.work")
    if work is None:
        return {}
    kept: Records = {}
    for name, started, finished, past, moves in work.recorded():
        calls = [Call(n, op, _count(dtype, nbytes)) for n, op, dtype, nbytes in past[-RECENT:]]
        kept[name, "mpi4py"] = Log("", (), started, finished, tuple(calls), moves=moves)
    return kept


def _count(dtype: Any, nbytes: int) -> str:
    # A group over mpi4py does not keep the shape.
    name = str(dtype).removeprefix("torch.")
    return "" if dtype is None else f"{name}[{nbytes // dtype.itemsize}]"
