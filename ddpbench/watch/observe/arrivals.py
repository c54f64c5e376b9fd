"""When this rank arrived at each collective, on every group and from every API.

Times come from torch's Flight Recorder; nothing is added to a call. Sends and receives, and calls
over mpi4py, are left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from zlib import crc32

from msgspec import structs

from ddpbench.hang import flight_recorder
from ddpbench.hang.flight_recorder import BATCH, Entry, Group, Recorder, list_groups, name_dtype
from ddpbench.records.wording import spans
from ddpbench.watch.observe.steps import Step
from ddpbench.watch.window import CALLS, JoinedCall, Round

SETTING = "set TORCH_FR_BUFFER_SIZE=2000 (torch 2.7: TORCH_NCCL_TRACE_BUFFER_SIZE)"
READ_ROUNDS = 6  # from one read of a recorder, in up to 50 ms, to the next


class Arrivals:
    """Reads the calls of a rank since a time, by the system clock; those of a step once it ended.

    unavailable: a sentence on what cannot be read, and what to do; "" if all can be read.
    """

    def __init__(self, rank: int, since_ns: int) -> None:
        self.unavailable = ""
        self._rank, self._since_ns = rank, since_ns  # earlier calls may be of groups that have gone
        self._newest: dict[str, int] = {}  # recorder → the newest entry that was read
        self._groups: dict[str, Group] = {}
        self._waiting: list[JoinedCall] = []  # for the end of their step

    def read(self, steps: Sequence[Step], round_: Round, final: bool = False) -> list[JoinedCall]:
        """Return the calls since the last read up to this round, the newest CALLS, oldest first.

        steps: the latest of this rank, to find in which one a call was made; final: nothing will be
        read after this. Otherwise recorders are read in every READ_ROUNDS-th round, the same one in
        all ranks.
        """
        until_ns, steps = round_.began_ns, list(steps)
        if steps and not final:
            until_ns = min(until_ns, steps[-1].ended_ns)
        self._groups |= {group.name: group for group in list_groups()}
        calls = self._waiting
        if final or round_.number % READ_ROUNDS == 0:
            calls += self._read_recorders()
        calls.sort(key=lambda call: call.last_ns)
        count = bisect_right(calls, until_ns, key=lambda call: call.last_ns)
        self._waiting = calls[count:][-CALLS:]
        # A batch of nccl has several entries with one number.
        ended = {(call.group, call.number): call for call in calls[:count]}
        return [
            structs.replace(call, step=_find_step(steps, call.last_ns))
            for call in [*ended.values()][-CALLS:]
        ]

    def _read_recorders(self) -> Iterator[JoinedCall]:
        backends = {backend for group in self._groups.values() for backend in group.backends}
        recorders = flight_recorder.find_recorders()
        self.unavailable = _explain_unavailable(backends, recorders)
        for name, recorder in recorders.items():
            before = self._newest.get(name, -1)
            entries = [
                entry
                for entry in flight_recorder.read_dump(recorder).entries
                if entry.record_id > before and entry.time_created_ns >= self._since_ns
            ]
            self._newest[name] = max((entry.record_id for entry in entries), default=before)
            for entry in entries[-CALLS:]:
                # nccl ends a batch with an entry of its own, which is no call.
                is_call = not entry.is_p2p and not entry.profiling_name.endswith(BATCH)
                group = self._groups.get(entry.process_group[0])
                if is_call and group is not None:
                    yield self._read_entry(entry, group)

    def _read_entry(self, entry: Entry, group: Group) -> JoinedCall:
        read = _count_bytes(entry.input_sizes, entry.input_dtypes)
        written = _count_bytes(entry.output_sizes, entry.output_dtypes)
        nbytes = max(read, written)
        if entry.operation in ("scatter", "gather"):  # of which only the root has the whole
            nbytes = len(group.members) * (written if entry.operation == "scatter" else read)
        return JoinedCall(
            group=_name_group(group),
            number=entry.collective_seq_id,
            operation=entry.operation,
            nbytes=nbytes,
            step=-1,
            first_ns=entry.time_created_ns,
            second_ns=0,
            last_ns=entry.time_created_ns,
            last_rank=self._rank,
        )


def _explain_unavailable(backends: set[str], recorders: Mapping[str, Recorder]) -> str:
    for backend in sorted(backends):
        recorder = recorders.get("_dump_nccl_trace" if backend == "nccl" else "_dump_fr_trace")
        sentence = f"calls of {backend} cannot be read, so the collectives below lack them: "
        if backend not in ("gloo", "nccl") or recorder is None:
            return f"{sentence}this torch does not record them"
        if not flight_recorder.read_dump(recorder, calls=False).pg_config:
            return f"{sentence}{SETTING} before init_process_group"
    return ""


def _find_step(steps: Sequence[Step], ns: int) -> int:
    """Return the number of the step at this time, -1 if it is unknown."""
    at = bisect_right(steps, ns, key=lambda step: step.began_ns) - 1
    return steps[at].number if at >= 0 and ns < steps[at].ended_ns else -1


def _count_bytes(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    import torch

    types = [getattr(torch, name_dtype(name), torch.uint8) for name in dtypes]
    return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(sizes, types, strict=False))


def _name_group(group: Group) -> str:
    """Name a group alike in all of its ranks; groups that were split off share a name."""
    text = spans(group.members)
    if len(text) > 40:
        text = f"{len(group.members)} ranks, {crc32(repr(group.members).encode()):08x}"
    return f"{group.name} ({text})"
