"""Read the calls of this rank from existing records, at no cost to a collective.

The records are torch's Flight Recorder, the counts of the mpi4py group, or a group's sequence
number. Private names of torch are probed: if one is missing, the report contains less. A dump of
the recorder holds the interpreter for 40 ms if it has 2000 entries. A heartbeat therefore reads the
groups' numbers only, and assumes that the last call is open: the watchdog dumps before it raises an
alarm. The dump is torch's own pickle, written and read in this process: unlike the JSON, it
contains the lines of code that made each call.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ddpbench.hang import places
from ddpbench.hang.verdict import Call, Log, format_ranks
from ddpbench.records import codec

RECENT = 64  # calls of a group that are reported
BATCH = ":coalesced"
# Waits that are not collectives, or that ranks may call a different number of times.
OTHER = (
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "wait", "store."),
    *("new_", "split_group", "init_process_group", "destroy_process_group"),
)
# Errors of a private function with another signature, or of a group that ends meanwhile.
UNKNOWN = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
RELAXED = 2  # cudaStreamCaptureModeRelaxed


Key = tuple[str, str]  # a group's name, a backend
Records = dict[Key, Log]  # still without the group and its members
Recorder = Callable[..., bytes]  # torch's function that returns a recorder's content as a pickle


@dataclass(frozen=True)
class Group:
    """A process group of this rank.

    phrase: "of group 3"; members: global ranks; count: returns the number of requests to a backend
    of the group, -1 if that backend does not count them.
    """

    name: str
    phrase: str
    members: tuple[int, ...]
    backends: tuple[str, ...]
    count: Callable[[str], int]


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
    frames: list[dict[str, Any]] = []

    @property
    def operation(self) -> str:
        """The operation: "all_gather" for "nccl:_all_gather_base"."""
        name = self.profiling_name.partition(":")[2] or self.profiling_name
        return name.removeprefix("_").removesuffix("_base")

    @property
    def key(self) -> Key:
        """The name of its group, and its backend."""
        return self.process_group[0], self.profiling_name.partition(":")[0]

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended: gloo retires entries, nccl sets the state as well."""
        return self.retired or self.state == "completed"


class Dump(msgspec.Struct):
    """The content of a recorder: its entries, the oldest first.

    pg_config: has an entry for each group if the recorder is on.
    """

    entries: list[Entry] = []
    pg_config: dict[str, Any] = {}


def list_groups() -> list[Group]:
    """Return the groups of which this rank is a member."""
    from torch.distributed import distributed_c10d

    groups = []
    for live, ranks in list(distributed_c10d._world.pg_group_ranks.items()):
        with contextlib.suppress(*UNKNOWN):  # it may end, or begin, just now
            groups.append(_make_group(live, ranks))
    phrases = [group.phrase for group in groups]
    for index, group in enumerate(groups):
        if phrases.count(group.phrase) > 1:
            groups[index] = replace(group, phrase=f"{group.phrase} {group.name[:12]}")
    return groups


def _make_group(group: Any, ranks: Iterable[int]) -> Group:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    pairs = [pair.rpartition(":") for pair in dist.get_backend_config(group).split(",")]
    devices = {backend: torch.device(device) for device, _, backend in pairs}
    name = str(distributed_c10d._world.pg_names.get(group, ""))
    title = getattr(group, "group_desc", "")
    phrase = f"of group {name[:12]}"
    if group is dist.group.WORLD:
        phrase = ""
    elif title not in ("", "undefined"):  # the rows of a mesh share a title
        phrase = f"of group {title!r} ({format_ranks(sorted(ranks))})"
    # A group ends with its last owner.
    count = partial(_count_requests, weakref.ref(group), devices)
    return Group(name, phrase, tuple(sorted(ranks)), tuple(sorted(devices)), count)


def _count_requests(group: weakref.ref[Any], devices: Mapping[str, Any], backend: str) -> int:
    """Ask the backend itself: a group on two backends has no number of its own.

    nccl counts no sends and receives.
    """
    live: Any = group()
    try:
        return int(live._get_backend(devices[backend])._get_sequence_number_for_group())
    except UNKNOWN:  # a group in Python has no backends
        with contextlib.suppress(*UNKNOWN):
            return int(live._get_sequence_number_for_group())
    return -1


def find_recorders() -> dict[str, Recorder]:
    """Return the recorders of this torch by their names in it."""
    from torch._C import _distributed_c10d as c10d

    names = ("_dump_fr_trace", "_dump_nccl_trace")
    return {name: getattr(c10d, name) for name in names if hasattr(c10d, name)}


def read_dump(recorder: Recorder, lines: bool = False, calls: bool = True) -> Dump:
    """Return the content of a recorder. lines: with the lines of code that made each call.

    Raises msgspec.ValidationError, a ValueError, if torch's format has changed.
    """
    import torch

    _relax_capture()
    names = vars(torch)
    # To find lines torch imports torch._inductor, which takes seconds and fails if another thread
    # does the same. If it is not imported, no code was compiled.
    hides = lines and "_inductor" not in names and "torch._inductor" not in sys.modules
    if hides:
        names["_inductor"] = None
    try:
        found = lines and "_inductor" in names
        data = pickle.loads(recorder(includeCollectives=calls, includeStackTraces=found))
    finally:
        if hides and names["_inductor"] is None:
            del names["_inductor"]
    return codec.decode(Dump, {name: part for name, part in data.items() if part}, strict=False)


def _relax_capture() -> None:
    """Let this thread query events while another captures a CUDA graph, as nccl's recorder does.

    By default, such a query ends the capture with an error.
    """
    import torch

    if torch.version.cuda is not None and torch.cuda.is_initialized():
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))


class Flight:
    """Reads the records, and remembers the groups of this rank after their end."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def read_logs(self, inside: str, whole: bool) -> tuple[Log, ...]:
        """Return one log for each group and backend.

        inside: the function of torch.distributed that the main thread has called, for groups
        without a record; whole: with the latest calls, else numbers only.
        """
        with contextlib.suppress(*UNKNOWN):
            self._groups = list_groups() or self._groups
        pairs = [(group, backend) for group in self._groups for backend in group.backends]
        records: Records = _read_mpi()
        for recorder in find_recorders().values() if whole else ():
            with contextlib.suppress(*UNKNOWN):
                records |= _read_entries(read_dump(recorder, lines=True).entries)
        # The main thread's current call has no record yet, unless another call is open.
        names = {group.name for group in self._groups}
        is_open = any(record.is_open for (name, _), record in records.items() if name in names)
        called = "" if is_open or inside.startswith(OTHER) else inside
        logs = []
        for group, backend in pairs:
            count, record = group.count(backend), records.get((group.name, backend))
            if whole:
                log = _find_log(backend, count, record, called)
            else:  # the last call may have ended
                log = record or Log("", (), max(count, 0), max(count - 1, 0), moves=count)
                log = replace(log, calls=())
            suffix = f"on {backend}" if len(group.backends) > 1 else ""
            phrase = f"{group.phrase} {suffix}".strip()
            logs.append(replace(log, group=phrase, members=group.members))
        return tuple(logs)


def _find_log(backend: str, count: int, record: Log | None, called: str) -> Log:
    """Return the log of a group.

    called: the main thread's current collective, if it has no record; it may belong to any group.
    """
    if count == 0:
        record = None  # of an earlier group with this name
    # gloo counts sends and receives, too: without a record, collectives cannot be counted.
    counted = 0 if backend == "gloo" else max(count, 0)
    log = record or Log("", (), counted, counted)
    # nccl counts a call, then connects the ranks if they are not yet, and only then records it.
    if called and counted > (record.started if record else 0):
        calls = (*log.calls, Call(counted, called))
        log = replace(log, started=counted, finished=counted - 1, calls=calls)
    return replace(log, moves=max(count, log.moves))


def _read_entries(entries: Sequence[Entry]) -> Records:
    """Return the record of each group; of groups with equal names, the newest is in use.

    nccl ends a batch of calls with an extra entry, "coalesced". After sends and receives this entry
    looks like a collective with the number of the previous one, but follows a later send.
    """
    calls: dict[int, list[Entry]] = {}
    sent: dict[int, int] = {}  # the number of the last send before each group's last collective
    for entry in entries:
        is_batch = entry.profiling_name.endswith(BATCH)
        ends_sends = is_batch and sent.get(entry.pg_id) != entry.p2p_seq_id
        if not entry.is_p2p and not ends_sends:
            sent[entry.pg_id] = entry.p2p_seq_id
            calls.setdefault(entry.pg_id, []).append(entry)
    return {own[0].key: _read_group(own) for _, own in sorted(calls.items())}


def _read_group(entries: Sequence[Entry]) -> Log:
    """Return a group's record from its entries.

    nccl's communicator ends calls in their order, so the last ended one is sufficient. This matters
    for a call that was captured into a CUDA graph: its entry never ends.
    """
    calls = {entry.collective_seq_id: entry for entry in entries}
    started = max(calls)
    ended = [number for number, entry in calls.items() if entry.ended]
    finished = max(ended, default=min(calls) - 1)
    if entries[0].key[1] not in ("nccl", "xccl"):
        finished = min(calls.keys() - ended, default=started + 1) - 1
    recent = tuple(_read_call(calls[number]) for number in sorted(calls)[-RECENT:])
    return Log("", (), started, finished, recent)


def _read_call(entry: Entry) -> Call:
    # Only the root has an input to scatter.
    has_output = entry.operation == "scatter" or not entry.input_sizes
    dtypes = entry.output_dtypes if has_output else entry.input_dtypes
    sizes = entry.output_sizes if has_output else entry.input_sizes
    tensors = zip(dtypes, sizes, strict=False)
    shapes = [f"{name_dtype(d)}[{','.join(map(str, s))}]" for d, s in tensors]
    more = f" and {len(shapes) - 2} more" if len(shapes) > 2 else ""
    lines = [(frame["name"], frame["filename"], frame["line"]) for frame in entry.frames]
    place = places.choose_place(lines) if lines else ""
    return Call(entry.collective_seq_id, entry.operation, ", ".join(shapes[:2]) + more, place)


def name_dtype(name: str) -> str:
    """Return torch's name of a dtype, "float32" for "Float"."""
    import torch

    storage = getattr(torch, f"{name}Storage", None)
    return str(storage._dtype).removeprefix("torch.") if storage else name.lower()


def _read_mpi() -> Records:
    work = sys.modules.get("ddpbench.mpi_backend.work")
    records: Records = {}
    for queue in work.live_queues() if work else ():
        started, finished, past, moves = queue.recorded()
        calls = []
        for number, operation, dtype, nbytes in past[-RECENT:]:
            what = ""
            if dtype is not None:  # a group over mpi4py does not keep the shape
                what = f"{str(dtype).removeprefix('torch.')}[{nbytes // dtype.itemsize}]"
            calls.append(Call(number, operation, what))
        records[queue.group, "mpi4py"] = Log("", (), started, finished, tuple(calls), moves=moves)
    return records
