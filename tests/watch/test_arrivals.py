"""The arrivals of real ranks at real collectives."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import Process
from nccl_entries import NcclRecorder

from ddpbench.hang import flight_recorder
from ddpbench.watch.observe import arrivals
from ddpbench.watch.observe.arrivals import Arrivals
from ddpbench.watch.observe.steps import Step
from ddpbench.watch.window import CALLS, JoinedCall, Round

DUMP = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
pytestmark = pytest.mark.skipif(DUMP is None, reason="this torch records no call of gloo's")
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Job = Callable[[int], Any]


@pytest.fixture
def alone() -> Iterator[None]:
    """A gloo group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _run_rank(job: Job, store: Path, rank: int, size: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    file = dist.FileStore(str(store), size)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=size)
    pipe.send(job(rank))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(job: Job, folder: Path, size: int = 2) -> list[Any]:
    """Run a job in forked ranks on gloo, and return what it returns in each."""
    store = folder / f"{time.monotonic_ns()}"
    ranks = [Process(partial(_run_rank, job, store, rank, size)) for rank in range(size)]
    answers = [rank.answer() for rank in ranks]
    for rank in ranks:
        rank.process.join(20)
    return answers


def open_arrivals() -> Arrivals:
    """Read the calls from now on."""
    return Arrivals(dist.get_rank(), time.time_ns())


def read_all(watched: Arrivals, steps: Sequence[Step] = ()) -> list[JoinedCall]:
    """Read all calls, for the last time."""
    return watched.read(steps, Round(7, time.time_ns()), final=True)


@pytest.mark.usefixtures("alone")
def test_no_more_than_a_window_of_calls_is_returned() -> None:
    """Of many calls, the newest CALLS are returned, with consecutive numbers."""
    dist.all_reduce(torch.zeros(3))
    watched = open_arrivals()
    for _ in range(700):
        dist.all_reduce(torch.zeros(3))
    calls = read_all(watched)
    assert len(calls) == CALLS
    assert [call.number for call in calls] == list(range(701 - CALLS + 1, 702))


@pytest.mark.usefixtures("alone")
def test_batches_of_nccl_are_read_as_their_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of sends is none, although its last entry has the number of the previous one; a batch
    of collectives keeps name and size of its calls."""
    recorder = NcclRecorder()
    recorder.collective()
    recorder.batch()
    recorder.collective_batch("reduce", "reduce")
    recorder.batch()
    recorders = {"_dump_fr_trace": recorder.dump}
    monkeypatch.setattr(flight_recorder, "find_recorders", lambda *_: recorders)
    called = [(call.number, call.operation, call.nbytes) for call in read_all(Arrivals(0, 0))]
    assert called == [(1, "all_reduce", 16), (2, "reduce", 16)]


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_read_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder that is off is noted with what to set; a missing one is noted."""
    watched = open_arrivals()
    dist.all_reduce(torch.zeros(3))
    assert read_all(watched)
    assert watched.unavailable == ""
    off = {"_dump_fr_trace": lambda **_: pickle.dumps({})}
    for recorders, remedy in ((off, "set TORCH_FR_BUFFER_SIZE=2000"), ({}, "does not record")):
        monkeypatch.setattr(flight_recorder, "find_recorders", lambda *_, found=recorders: found)
        assert read_all(watched) == []
        assert remedy in watched.unavailable


@pytest.mark.usefixtures("alone")
def test_calls_wait_for_the_end_of_their_step() -> None:
    """A call is returned once, when its step has ended, and only in every READ_ROUNDS-th round;
    calls after the beginning of the round are left for the next one."""
    watched = open_arrivals()
    began_ns = time.time_ns()
    dist.all_reduce(torch.zeros(3))
    middle_ns = time.time_ns()
    dist.all_reduce(torch.zeros(3))
    ended_ns = time.time_ns()
    steps = [Step(4, began_ns, middle_ns, ()), Step(5, middle_ns, ended_ns, ())]
    dist.all_reduce(torch.zeros(3))
    found = [
        [call.step for call in watched.read(steps[:count], Round(number, until))]
        for count, number, until in (
            (1, arrivals.READ_ROUNDS + 1, time.time_ns()),
            (1, arrivals.READ_ROUNDS, middle_ns),
            (1, 2 * arrivals.READ_ROUNDS, time.time_ns()),
            (2, 2 * arrivals.READ_ROUNDS + 1, time.time_ns()),
        )
    ]
    assert found == [[], [4], [], [5]]
    assert [call.step for call in read_all(watched, steps)] == [-1]


def job_calls(rank: int) -> Any:
    """Call many operations, with the time before and after each call that blocks."""
    watched, around = open_arrivals(), []
    four, eight, parts = torch.zeros(4), torch.zeros(8), [torch.zeros(4), torch.zeros(4)]
    group = dist.new_group([0, 1])
    alone = [dist.new_group([each]) for each in range(2)][rank]
    blocking: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(four),
        lambda: dist.broadcast(four.double(), 0, group=group),
        lambda: gather(eight, four, group=group),
        lambda: dist.all_gather(parts, four),
        lambda: dist.scatter(four, parts if rank == 0 else None),
        lambda: dist.gather(four, parts if rank == 0 else None),
        lambda: dist.send(four, 1) if rank == 0 else dist.recv(four, 0),
        lambda: dist.all_to_all_single(torch.zeros(4), four),
        lambda: dist.all_reduce(four, group=alone),
        dist.barrier,
    ]
    for call in blocking:
        before_ns = time.time_ns()
        call()
        around.append((before_ns, time.time_ns()))
    work: Any = dist.all_reduce(four.half(), async_op=True)
    work.wait()
    return read_all(watched), around


def test_calls_are_the_same_in_all_ranks(tmp_path: Path) -> None:
    """Every call on every group is known by the same group, number, operation and size in each
    rank, with the time when it was made; sends and receives are left out."""
    ranks = run_ranks(job_calls, tmp_path)
    whole, other = "0 (0-1)", "1 (0-1)"
    for rank, (calls, around) in enumerate(ranks):
        found = [(c.group, c.number, c.operation, c.nbytes) for c in calls]
        assert found == [
            (whole, 1, "all_reduce", 16),
            (other, 1, "broadcast", 32),
            (other, 2, "all_gather", 32),
            (whole, 2, "all_gather", 32),
            (whole, 3, "scatter", 32),
            (whole, 4, "gather", 32),
            (whole, 5, "all_to_all", 16),
            (f"{2 + rank} ({rank})", 1, "all_reduce", 16),
            (whole, 6, "barrier", 0),
            (whole, 7, "all_reduce", 8),
        ]
        del around[6]  # send or receive
        for call, (before_ns, after_ns) in zip(calls, around, strict=False):
            assert before_ns <= call.last_ns <= after_ns
            assert call.step == -1
            assert (call.ranks, call.last_rank) == (1, rank)
