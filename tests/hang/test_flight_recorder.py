"""Collectives of a rank: as torch's recorder has them, and where there is none."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from nccl_entries import GROUP, NcclRecorder
from patience import wait_until
from torch.distributed import distributed_c10d

from ddpbench.hang import flight_recorder
from ddpbench.hang.flight_recorder import RELAXED, Entry, Flight, Group
from ddpbench.hang.verdict import Call, Log, RankStatus, describe_mismatches

RECORDED = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"),
    reason="this torch records no call of gloo's",
)


@pytest.fixture
def alone() -> Iterator[None]:
    """A gloo group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def numbers(log: Log) -> tuple[int, int]:
    """The last call that began and the last that ended."""
    return log.started, log.finished


@RECORDED
@pytest.mark.usefixtures("alone")
def test_the_recorder_of_this_torch_is_understood() -> None:
    """Numbers of the default group and of another, each call's name, dtype, shape and line. The
    last calls of groups stay after their end; a second default group starts from 0 again."""
    flight = Flight()
    dist.all_reduce(torch.zeros(2, 3))
    dist.broadcast(torch.zeros(5, dtype=torch.int64), 0)
    dist.barrier()
    other = dist.new_group([0])
    dist.all_reduce(torch.zeros(4, dtype=torch.bfloat16), group=other)
    default, second = flight.read_logs("", whole=False)
    assert (default.group, default.members, numbers(default)) == ("", (0,), (3, 2))
    assert second.group.startswith("of group ")
    assert second.started == 1

    def read_ended() -> Any:
        logs = flight.read_logs("", whole=True)
        return not any(log.is_open for log in logs) and logs

    default, second = wait_until(read_ended, "the end of all calls")
    assert [str(call).strip() for call in default.calls] == [
        "#1 all_reduce float32[2,3]", "#2 broadcast int64[5]", "#3 barrier",
    ]  # fmt: skip
    (call,) = second.calls
    assert call == Call(1, "all_reduce", "bfloat16[4]", call.place)
    assert call.place.startswith(
        "test_the_recorder_of_this_torch_is_understood (test_flight_recorder.py"
    )
    dist.destroy_process_group()
    assert [log.started for log in flight.read_logs("", whole=True)] == [3, 1]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (again,) = Flight().read_logs("", whole=True)
    assert numbers(again) == (0, 0)


@RECORDED
@pytest.mark.usefixtures("alone")
def test_a_group_of_others_hides_no_record() -> None:
    """torch keeps an entry for groups of which this rank is no member."""
    dist.all_reduce(torch.zeros(2))
    distributed_c10d._world.pg_group_ranks[dist.GroupMember.NON_GROUP_MEMBER] = {1: 0}
    (log,) = Flight().read_logs("", whole=True)
    assert (log.started, len(log.calls)) == (1, 1)


@pytest.mark.usefixtures("alone")
def test_without_a_record_of_gloo_nothing_is_concluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own count contains messages as well: it shows progress only."""
    monkeypatch.setattr(flight_recorder, "find_recorders", dict)
    dist.all_reduce(torch.zeros(2))
    (log,) = Flight().read_logs("all_reduce", whole=True)
    assert (*numbers(log), log.calls, log.moves) == (0, 0, (), 1)


def test_each_backend_of_a_group_is_asked_for_its_own_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The group itself has none. The main thread's call may be on the backend that counts one."""
    import_module("unrecorded_backends")
    dist.init_process_group("cpu:silent,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(flight_recorder, "find_recorders", dict)
    for _ in range(3):
        dist.all_reduce(torch.zeros(2))
    gloo, silent = Flight().read_logs("all_reduce", whole=True)
    dist.destroy_process_group()
    assert (gloo.group, *numbers(gloo)) == ("on gloo", 0, 0)
    assert (silent.group, *numbers(silent)) == ("on silent", 3, 2)
    assert silent.calls == (Call(3, "all_reduce"),)


# --- nccl -----------------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Log]:
    """A function that reads a recorder of a group of two ranks on nccl."""

    def read(recorder: NcclRecorder, count: int | None = None, inside: str = "") -> Log:
        counted = recorder.collectives if count is None else count
        group = Group(GROUP, "", (0, 1), ("nccl",), lambda backend: counted)
        monkeypatch.setattr(flight_recorder, "list_groups", lambda: [group])
        recorders = {"_dump_nccl_trace": recorder.dump}
        monkeypatch.setattr(flight_recorder, "find_recorders", lambda: recorders)
        (log,) = Flight().read_logs(inside, whole=True)
        return log

    return read


@pytest.mark.parametrize("sends", [6, 900], ids=("as many sends", "more sends"))
def test_an_open_collective_of_nccl_is_seen_whatever_was_sent(
    sends: int, read: Callable[..., Log]
) -> None:
    """Sends have numbers of their own."""
    recorder = NcclRecorder()
    for call in [recorder.send] * sends + [recorder.collective] * 5 + [recorder.send] * sends:
        call()
    assert numbers(read(recorder)) == (5, 5)
    recorder.collective(ends=False)
    assert numbers(read(recorder)) == (6, 5)
    recorder.end(6)
    assert numbers(read(recorder)) == (6, 6)
    assert numbers(read(recorder, count=-1)) == (6, 6)  # after the end of the group


def test_a_batch_of_sends_is_no_collective(read: Callable[..., Log]) -> None:
    """nccl ends it with an entry that looks like one, with the previous collective's number. A rank
    that only sends has called none; a collective keeps its name, and other ranks agree."""
    recorder, other = NcclRecorder(), NcclRecorder()
    recorder.batch()
    assert (*numbers(read(recorder)), read(recorder).calls) == (0, 0, ())
    for each in (recorder, other):
        each.collective()
        each.collective("broadcast")
    recorder.batch()
    recorder.batch(ends=False)
    logs = [read(recorder), read(other)]
    assert [numbers(log) for log in logs] == [(2, 2), (2, 2)]
    assert [call.name for call in logs[0].calls] == ["all_reduce", "broadcast"]
    statuses = {rank: RankStatus("f (x.py:1)", logs=(log,)) for rank, log in enumerate(logs)}
    assert describe_mismatches(statuses) == []
    recorder.collective(ends=False)
    assert numbers(read(recorder)) == (3, 2)


def test_a_batch_of_collectives_is_one_collective(read: Callable[..., Log]) -> None:
    """It ends with its last entry, also after sends; one that was captured into a CUDA graph ends
    with the next collective."""
    recorder = NcclRecorder()
    recorder.send()
    recorder.collective_batch("reduce", "reduce", ends=False)
    assert numbers(read(recorder)) == (1, 0)
    recorder.end(1)
    assert numbers(read(recorder)) == (1, 1)
    recorder.captured_batch("reduce", "reduce")
    recorder.collective()
    assert numbers(read(recorder)) == (3, 3)


def test_a_call_that_nccl_has_counted_but_not_recorded_is_open(read: Callable[..., Log]) -> None:
    """nccl counts a call before it connects the ranks, and records it only then."""
    recorder = NcclRecorder()
    first = read(recorder, 1, "all_reduce")
    assert (*numbers(first), first.calls) == (1, 0, (Call(1, "all_reduce"),))
    recorder.collective()
    recorder.collective("broadcast")
    third = read(recorder, 3, "all_reduce")
    assert (*numbers(third), third.calls[-1]) == (3, 2, Call(3, "all_reduce"))
    for log in (read(recorder, 3), read(recorder, 2, "all_reduce")):
        assert (*numbers(log), len(log.calls)) == (2, 2, 2)


def test_a_dump_is_made_with_a_relaxed_capture_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would end a capture of a CUDA graph."""
    modes: list[int] = []
    names = {"cudaThreadExchangeStreamCaptureMode": lambda mode: modes.append(mode._obj.value)}
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(**names))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    flight_recorder.read_dump(lambda **_: pickle.dumps({}))
    assert modes == [RELAXED]


# --- entries --------------------------------------------------------------------------------------


def an_entry(number: int, **others: Any) -> Entry:
    """As the recorder dumps it."""
    fields = {
        "pg_id": 3, "process_group": ["0", "default_pg"], "collective_seq_id": number,
        "profiling_name": "gloo:_all_gather_base", "input_sizes": [[4], [4], [4]],
        "input_dtypes": ["Half", "Half", "Half"], "output_sizes": [[8]], "output_dtypes": ["Half"],
        "state": "scheduled", "retired": False, "is_p2p": False, **others,
    }  # fmt: skip
    return msgspec.convert(fields, Entry)


def test_what_is_open_is_found_by_state_and_retirement() -> None:
    """The first open call counts. Of groups with equal names, the newest is in use."""
    ended = [an_entry(1, retired=True), an_entry(2, state="completed")]
    entries = [an_entry(7, pg_id=2), *ended, an_entry(3), an_entry(4, retired=True)]
    records = flight_recorder._read_entries([*entries, an_entry(9, is_p2p=True)])
    record = records["0", "gloo"]
    assert numbers(record) == (4, 2)
    assert record.calls[0] == Call(1, "all_gather", "float16[4], float16[4] and 1 more")


def test_what_the_root_alone_gives_is_not_compared() -> None:
    """A scatter is described by what each rank gets."""
    entry = an_entry(1, profiling_name="gloo:scatter", output_dtypes=["Char"])
    assert flight_recorder._read_call(entry) == Call(1, "scatter", "int8[8]")
