"""The arrivals at calls over MPI, which the group itself stamps while a watch is on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from mpi_jobs import all_gather_single, run_job, start_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpbench.watch.observe.arrivals import Arrivals
from ddpbench.watch.observe.observer import Observer
from ddpbench.watch.observe.steps import END, Marks
from ddpbench.watch.window import BLOCKED, JoinedCall, Round

pytestmark = pytest.mark.thorough


def train() -> None:
    """Take three steps of DDP."""
    model = DistributedDataParallel(nn.Linear(8, 8))
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()


def list_calls() -> list[Callable[[], Any]]:
    """Return calls that block."""
    four, eight, parts = torch.zeros(4), torch.zeros(8), [torch.zeros(4), torch.zeros(4)]
    first = dist.get_rank() == 0
    return [
        lambda: dist.all_reduce(four),
        lambda: dist.broadcast(four, 0),
        lambda: all_gather_single(eight, four),
        lambda: dist.gather(four, parts if first else None),
        lambda: dist.scatter(four, parts if first else None),
        dist.barrier,
    ]


def make_calls() -> list[tuple[int, int]]:
    """Make calls that block, and return the times before and after each."""
    around = []
    for call in list_calls():
        before_ns = time.time_ns()
        call()
        around.append((before_ns, time.time_ns()))
    return around


def observe_waits() -> list[list[int]]:
    """Return the kinds of the marks that each call adds."""
    marks = Marks()
    observer = Observer(marks)
    model = nn.Linear(8, 8)
    torch.optim.SGD(model.parameters()).step()
    data, peer = torch.zeros(4), 1 - dist.get_rank()
    kinds = []
    for call in (
        *list_calls(),
        lambda: dist.all_reduce(data, async_op=True).wait(),  # type: ignore[union-attr]
        lambda: dist.send(data, peer) if peer else dist.recv(data, peer),
        lambda: (dist.isend if peer else dist.irecv)(data, peer).wait(),  # type: ignore[union-attr]
        lambda: DistributedDataParallel(model),
    ):
        marks.take()
        call()
        kinds.append([mark[0] for mark in marks.take()])
    observer.close()
    return kinds


def read_calls(watched: Arrivals) -> list[JoinedCall]:
    """Return all calls since the last time."""
    return watched.read([], Round(7, time.time_ns()), final=True)


def job_watched(folder: Path) -> None:
    """Write what is known of the calls of this rank."""
    start_group("mpi4py", folder)
    watched = Arrivals(dist.get_rank(), time.time_ns())
    read_calls(watched)  # the first read begins the stamps
    around = make_calls()
    before_ns = time.time_ns()
    work: Any = dist.all_reduce(torch.zeros(4), async_op=True)
    issued_ns = time.time_ns()
    work.wait()
    around.append((before_ns, time.time_ns()))
    calls = read_calls(watched)
    group = dist.new_group()
    read_calls(watched)
    dist.all_reduce(torch.zeros(2), group=group)
    train()
    dist.barrier()  # a worker notes an end a moment after those who waited for it go on
    later = read_calls(watched)
    facts = [calls, later, around, issued_ns, observe_waits()]
    (folder / f"{dist.get_rank()}.json").write_bytes(msgspec.json.encode(facts))
    dist.destroy_process_group()


def test_calls_over_mpi_have_the_time_when_they_were_issued(tmp_path: Path) -> None:
    """It is within the times that the caller saw; ranks agree on group, number, operation and size,
    also where calls are asynchronous, in a new group and in DDP. Whether MPI is called at once or
    by a worker, the wait begins and ends with a mark."""
    process = run_job(job_watched, 2, tmp_path)
    assert process.returncode == 0, process.stderr
    keys = []
    for rank in range(2):
        text = (tmp_path / f"{rank}.json").read_text()
        calls, later, around, issued_ns, waits = json.loads(text)
        found, more = [JoinedCall(*call) for call in calls], [JoinedCall(*call) for call in later]
        more = [call for call in more if call.operation != "barrier"]
        names = "all_reduce broadcast all_gather gather scatter barrier all_reduce"
        assert " ".join(call.operation for call in found) == names
        assert [call.nbytes for call in found] == [16, 16, 32, 32, 32, 0, 16]
        for call, (before_ns, after_ns) in zip(found, around, strict=True):
            assert before_ns <= call.last_ns <= after_ns
        assert found[-1].last_ns <= issued_ns
        assert [call.group for call in more].count(found[0].group) == len(more) - 1
        reduced = [call.nbytes for call in more if call.operation == "all_reduce"]
        assert reduced == [8, 288, 288, 288]  # 8 × 8 weights and 8 biases
        for kinds in waits:
            assert (kinds[0], kinds[-1]) == (BLOCKED, BLOCKED + END)
            assert set(kinds) == {BLOCKED, BLOCKED + END}
        keys.append([(c.group, c.number, c.operation, c.nbytes) for c in [*found, *more]])
    assert keys[0] == keys[1]


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
