"""What is read of a rank's collectives: from torch's recorder, and where there is none."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from itertools import chain
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from frozen import Frozen
from nccl_entries import GROUP, NcclRecorder
from patience import wait_until
from torch.distributed import distributed_c10d

from ddpbench.hang import flight_recorder, torch_settings
from ddpbench.hang.flight_recorder import Entry, Flight, Recorder
from ddpbench.hang.process_groups import Group
from ddpbench.hang.status import Call, Log, RankStatus
from ddpbench.hang.verdict import describe_mismatches

RECORDED = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"),
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


def settled(source: Flight) -> Any:
    """The logs once all has ended: the recorder hears of it a moment after who waits."""

    def read_ended() -> Any:
        logs = source.read_logs("", whole=True)
        return all(log.started == log.finished for log in logs) and logs

    return wait_until(read_ended, "the end of all calls")


@RECORDED
@pytest.mark.usefixtures("alone")
def test_the_recorder_of_this_torch_is_understood() -> None:
    """Numbers of the default group and of another, each call's name, dtype, shape and line; what
    groups did last is known after their end; a second default group in the same process starts
    from 0 again."""
    source = Flight()
    dist.all_reduce(torch.zeros(2, 3))
    dist.broadcast(torch.zeros(5, dtype=torch.int64), 0)
    dist.barrier()
    other = dist.new_group([0])
    dist.all_reduce(torch.zeros(4, dtype=torch.bfloat16), group=other)
    default, second = source.read_logs("", whole=False)
    assert (default.group, default.members, default.started, default.calls) == ("", (0,), 3, ())
    assert second.group.startswith("of group ")
    assert second.started == 1
    default, second = settled(source)
    assert [str(call).strip() for call in default.calls] == [
        "#1 all_reduce float32[2,3]", "#2 broadcast int64[5]", "#3 barrier",
    ]  # fmt: skip
    (call,) = second.calls
    assert call == Call(1, "all_reduce", "bfloat16[4]", call.place)
    assert call.place.startswith(
        "test_the_recorder_of_this_torch_is_understood (test_flight_recorder.py"
    )
    assert default.exact
    dist.destroy_process_group()
    assert [log.started for log in source.read_logs("", whole=True)] == [3, 1]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (again,) = Flight(fresh=True).read_logs("", whole=True)
    assert (again.started, again.finished) == (0, 0)


@RECORDED
@pytest.mark.usefixtures("alone")
def test_a_group_of_others_hides_no_record() -> None:
    """torch keeps an entry for groups that this rank is no member of: they have nothing to say,
    and the others' records are read all the same."""
    dist.all_reduce(torch.zeros(2))
    distributed_c10d._world.pg_group_ranks[dist.GroupMember.NON_GROUP_MEMBER] = {1: 0}
    (log,) = Flight().read_logs("", whole=True)
    assert (log.started, len(log.calls)) == (1, 1)


@pytest.mark.usefixtures("alone")
def test_without_a_record_of_gloo_nothing_is_concluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own count contains messages as well: it shows progress only."""
    monkeypatch.setattr(flight_recorder, "find_recorders", lambda *_: {})
    dist.all_reduce(torch.zeros(2))
    (log,) = Flight().read_logs("all_reduce", whole=True)
    assert (log.started, log.finished, log.calls, log.exact) == (0, 0, (), False)
    assert log.moves == 1


def test_with_the_checks_of_torch_s_debug_level_nothing_is_concluded() -> None:
    """torch waits for all ranks before it counts a call, and records no name of the group."""
    level, source = dist.get_debug_level(), Flight(fresh=True)
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.zeros(2))
        (log,) = source.read_logs("all_reduce", whole=True)
        dist.destroy_process_group()
    finally:
        dist.set_debug_level(level)
    assert (log.started, log.finished, log.calls, log.exact) == (0, 0, (), False)


@pytest.fixture
def mixed() -> Iterator[None]:
    """A group of one on two backends; the one for CPU tensors is gloo under another name."""
    import_module("unrecorded_backends")
    dist.init_process_group("cpu:silent,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("mixed")
def test_each_backend_of_a_group_is_asked_for_its_own_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The group itself has none. What the main thread is in may be a call on the backend that has
    counted one."""
    monkeypatch.setattr(flight_recorder, "find_recorders", lambda *_: {})
    for _ in range(3):
        dist.all_reduce(torch.zeros(2))
    gloo, silent = Flight().read_logs("all_reduce", whole=True)
    assert (gloo.group, gloo.started, gloo.finished) == ("on gloo", 0, 0)
    assert (silent.group, silent.started, silent.finished) == ("on silent", 3, 2)
    assert silent.calls == (Call(3, "all_reduce"),)
    # A heartbeat claims nothing: the same line may be in another call by now.
    assert [log.finished for log in Flight().read_logs("all_reduce", whole=False)] == [0, 3]


def log_of_nccl(record: Log | None, count: int, called: str, backend: str = "nccl") -> Any:
    """The log of a group on nccl that has this record, and has counted so many calls."""
    group = Group("0", "", (0, 1), (backend,), lambda backend: count)
    kept = {("0", "nccl"): record} if record else {}
    (log,) = flight_recorder._logs(group, kept, called)
    return log


def watch_nccl(recorder: NcclRecorder, monkeypatch: pytest.MonkeyPatch) -> Flight:
    """What reads this recorder, of a group of two ranks on nccl."""
    flight = Flight()
    group = Group(GROUP, "", (0, 1), ("nccl",), lambda backend: recorder.collectives)
    monkeypatch.setattr(flight, "_current", lambda: [group])
    recorders = {"_dump_nccl_trace": recorder.functions}
    monkeypatch.setattr(flight_recorder, "find_recorders", lambda *_: recorders)
    return flight


def numbers(logs: Any) -> tuple[int, int]:
    """The last call that began and the last that ended."""
    (log,) = logs
    return log.started, log.finished


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("sends", [6, 900], ids=("as many sends", "more sends"))
@pytest.mark.parametrize("order", ["sends first", "sends later"])
def test_an_open_collective_of_nccl_is_seen_whatever_was_sent(
    sends: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status then says that a later number, or the same, has ended: only the entries know."""
    recorder = NcclRecorder()
    flight = watch_nccl(recorder, monkeypatch)
    calls = [recorder.send] * sends, [recorder.collective] * 5
    for call in chain(*(calls if order == "sends first" else calls[::-1])):
        call()
        flight.read_logs("", whole=False)
    assert numbers(flight.read_logs("", whole=True)) == (5, 5)
    recorder.collective(ends=False)
    recorder.completed = sends
    assert numbers(flight.read_logs("", whole=True)) == (6, 5)
    heartbeat = flight.read_logs("", whole=False)
    assert numbers(heartbeat) == (6, 5)
    recorder.end(6)
    assert numbers(flight.read_logs("", whole=True)) == (6, 6)
    recorder.send()
    assert flight.read_logs("", whole=False) != heartbeat  # which is progress


def test_what_nccl_did_last_is_known_after_the_end_of_its_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group that is gone has no count, but its entries are there: the last heartbeat of a rank
    that leaves early says after which collective."""
    recorder = NcclRecorder()
    recorder.collective()
    recorder.send()
    recorder.collective()
    flight = watch_nccl(recorder, monkeypatch)
    recorder.collectives = -1
    assert numbers(flight.read_logs("", whole=False)) == (2, 2)


def test_a_batch_of_sends_is_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """nccl ends it with an entry that looks like one, with the previous collective's number. A rank
    that only sends has called none; a collective keeps its name."""
    recorder = NcclRecorder()
    flight = watch_nccl(recorder, monkeypatch)
    recorder.batch()
    (log,) = flight.read_logs("", whole=True)
    assert (log.started, log.finished, log.calls) == (0, 0, ())
    recorder.collective()
    recorder.collective("broadcast")
    recorder.batch()
    recorder.batch(ends=False)
    (log,) = flight.read_logs("", whole=True)
    assert (log.started, log.finished) == (2, 2)
    assert [call.name for call in log.calls] == ["all_reduce", "broadcast"]
    recorder.collective(ends=False)
    assert numbers(flight.read_logs("", whole=True)) == (3, 2)


def test_a_batch_of_collectives_is_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with its last entry, also after sends; one that was captured into a CUDA graph ends
    with the next collective."""
    recorder = NcclRecorder()
    flight = watch_nccl(recorder, monkeypatch)
    recorder.send()
    recorder.collective_batch("reduce", "reduce", ends=False)
    assert numbers(flight.read_logs("", whole=True)) == (1, 0)
    recorder.end(1)
    assert numbers(flight.read_logs("", whole=True)) == (1, 1)
    recorder.captured_batch("reduce", "reduce")
    recorder.collective()
    assert numbers(flight.read_logs("", whole=True)) == (3, 3)


def test_two_ranks_of_nccl_agree_after_a_batch_that_one_of_them_has_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 sends to a rank of another stage, and rank 1 does not: no mismatch of collectives."""
    statuses = {}
    for rank in range(2):
        recorder = NcclRecorder()
        flight = watch_nccl(recorder, monkeypatch)
        for _ in range(5):
            recorder.collective()
        if rank == 0:
            recorder.batch()
        statuses[rank] = RankStatus("step (train.py:9)", logs=flight.read_logs("", whole=True))
    assert describe_mismatches(statuses) == []


def test_a_call_that_nccl_has_counted_but_not_recorded_is_open() -> None:
    """nccl counts a call before it connects the ranks, and records it only then."""
    before = Log("", (), 2, 2, (Call(2, "broadcast"),))
    log = log_of_nccl(before, 3, "all_reduce")
    assert (log.started, log.finished) == (3, 2)
    assert log.calls == (Call(2, "broadcast"), Call(3, "all_reduce"))
    first = log_of_nccl(None, 1, "all_reduce")
    assert (first.started, first.finished, first.calls) == (1, 0, (Call(1, "all_reduce"),))
    for log in (log_of_nccl(before, 3, ""), log_of_nccl(before, 2, "all_reduce")):
        assert (log.started, log.finished, log.calls) == (2, 2, before.calls)


@pytest.mark.parametrize("backend", ["nccl", "nccl2", "nccl-legacy"])
def test_every_implementation_of_nccl_is_found_under_its_name_in_the_records(backend: str) -> None:
    """torch 2.15 has several, and all record as nccl."""
    log = log_of_nccl(Log("", (), 7, 6), 7, "all_reduce", backend)
    assert (log.started, log.finished) == (7, 6)


def a_status(on: bool) -> Any:
    """A recorder that is on, or off, before any call."""
    config = {"": {"desc": "", "ranks": "[0]"}} if on else {}
    text = json.dumps({"pg_config": config, "pg_status": {}}).encode()
    return Recorder(status=lambda includeCollectives: text, entries=lambda **_: b"")  # noqa: N803


@pytest.mark.parametrize(
    ("recorders", "variables", "remedy"),
    [
        ({"_dump_nccl_trace": True}, {}, ""),
        ({"_dump_nccl_trace": False}, {}, "TORCH_NCCL_TRACE_BUFFER_SIZE=2000"),
        (
            {"_dump_nccl_trace": False, "_dump_fr_trace": True},
            {"TORCH_FR_BUFFER_SIZE": "0"},
            "TORCH_FR_BUFFER_SIZE=2000",
        ),
        ({"_dump_fr_trace": True}, {"TORCH_NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT"),
        ({"_dump_fr_trace": True, "nccl2": False}, {}, ""),
        (
            {"_dump_fr_trace": True, "nccl2": False},
            {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"},
            "TORCH_FR_BUFFER_SIZE=2000",
        ),
        ({}, {}, ""),
    ],
    ids=("older on", "older off", "off", "waits on the host", "nccl2", "nccl2 off", "none"),
)
def test_what_cannot_be_seen_of_nccl_is_told_with_the_remedy(
    frozen: Frozen,
    recorders: dict[str, bool],
    variables: dict[str, str],
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With torch 2.7, with a recorder that is off, with waits on the host, and with a torch that
    records nccl by a hook of its own."""
    for name in (*torch_settings.BUFFER_SIZES, *torch_settings.BLOCKING_WAITS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = {name: a_status(on) for name, on in recorders.items()}
    monkeypatch.setattr(flight_recorder, "find_recorders", lambda *_: made)
    flight = Flight()
    flight._groups = [Group("0", "", (0,), ("nccl",), lambda backend: 0)]
    sentence = flight.explain_unseen_hangs()
    assert (remedy in sentence) if remedy else sentence == ""
    frozen.text(sentence)


def test_no_dump_of_nccl_is_read_while_it_waits_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nccl then drops the events that the recorder would ask."""
    c10d = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace", "_dump_nccl_trace_json"):
        monkeypatch.setattr(c10d, name, lambda **_: b"", raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    assert "_dump_nccl_trace" in flight_recorder.find_recorders()
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    assert "_dump_nccl_trace" not in flight_recorder.find_recorders()


OLDER = "TORCH_NCCL_TRACE_BUFFER_SIZE"


@pytest.mark.parametrize("given", [{}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}])
def test_own_ranks_record_unless_the_user_decides(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only while groups are made; nccl's monitor then comes after the time-out of the groups."""
    names = (*torch_settings.BUFFER_SIZES, torch_settings.HEARTBEAT)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with torch_settings.watched_groups(timedelta(seconds=900)):
        within = {name: os.environ[name] for name in names if name in os.environ}
    assert within.pop(torch_settings.HEARTBEAT) == "960"
    assert len(within) == 1
    assert within == given or set(within.values()) == {"2000"}
    assert {name: os.environ[name] for name in names if name in os.environ} == given


@pytest.mark.parametrize(("has", "name"), [(True, "TORCH_FR_BUFFER_SIZE"), (False, OLDER)])
def test_the_recorder_is_set_up_by_the_name_that_this_torch_knows(
    has: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.7 knows the older name only. Later versions warn of it in every rank."""
    for other in torch_settings.BUFFER_SIZES:
        monkeypatch.delenv(other, raising=False)
    c10d = torch._C._distributed_c10d
    if has:
        monkeypatch.setattr(c10d, "_dump_fr_trace", None, raising=False)
    else:
        monkeypatch.delattr(c10d, "_dump_fr_trace", raising=False)
    with torch_settings.watched_groups(timedelta(seconds=900)):
        assert [one for one in torch_settings.BUFFER_SIZES if one in os.environ] == [name]


def an_entry(number: int, **others: Any) -> dict[str, Any]:
    """As the recorder dumps it."""
    return {
        "pg_id": 3, "process_group": ["0", "default_pg"], "collective_seq_id": number,
        "profiling_name": "nccl:_all_gather_base", "input_sizes": [[4], [4], [4]],
        "input_dtypes": ["Half", "Half", "Half"], "output_sizes": [[8]], "output_dtypes": ["Half"],
        "state": "scheduled", "retired": False, "is_p2p": False, **others,
    }  # fmt: skip


def a_dump(*entries: dict[str, Any], enqueued: int, completed: int) -> Any:
    """A recorder with one group."""
    numbers = {"last_enqueued_collective": enqueued, "last_completed_collective": completed}
    status = {"3": {name: str(number) for name, number in numbers.items()}}

    return Recorder(
        status=lambda includeCollectives: json.dumps({"pg_status": status}).encode(),  # noqa: N803
        entries=lambda includeStackTraces: pickle.dumps(  # noqa: N803
            {"pg_status": status, "entries": list(entries)}
        ),
    )


def test_what_is_open_is_found_by_state_retirement_and_status() -> None:
    """An entry has ended when it says so in any of three ways; the first open one counts."""
    entries = [an_entry(1), an_entry(2, retired=True), an_entry(3, state="completed"), an_entry(4)]
    dump = a_dump(*entries, an_entry(9, is_p2p=True), enqueued=4, completed=1)
    ((key, record),) = Flight()._full("fr", dump).items()
    assert key == ("0", "nccl")
    assert (record.started, record.finished, record.exact) == (4, 3, True)
    assert record.calls[0] == Call(1, "all_gather", "float16[4], float16[4] and 1 more")


def test_a_status_that_counts_more_is_not_exact() -> None:
    """gloo's status counts what is sent from rank to rank too."""
    gloo = {"profiling_name": "gloo:all_reduce"}
    entries = [an_entry(1, retired=True, **gloo), an_entry(2, **gloo)]
    dump = a_dump(*entries, enqueued=7, completed=6)
    (record,) = Flight()._full("fr", dump).values()
    assert (record.started, record.finished, record.exact) == (2, 1, False)


def test_what_the_root_alone_gives_is_not_compared() -> None:
    """A scatter is told by what each rank gets."""
    entry = an_entry(1, profiling_name="gloo:scatter", output_dtypes=["Char"])
    assert flight_recorder._call(msgspec.convert(entry, Entry)) == Call(1, "scatter", "int8[8]")
