"""The arrivals of real ranks at real collectives."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import Process
from nccl_entries import NcclRecorder
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpbench.hang import flight_recorder
from ddpbench.watch.observe import arrivals
from ddpbench.watch.observe.arrivals import Arrivals
from ddpbench.watch.observe.observer import Observer
from ddpbench.watch.observe.steps import Marks, Step, StepBuilder
from ddpbench.watch.window import CALLS, JoinedCall, Round

DUMP = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
pytestmark = pytest.mark.skipif(DUMP is None, reason="this torch records no call of gloo's")
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Job = Callable[[int], Any]


@pytest.fixture(scope="module", autouse=True)
def _load() -> None:
    """Import what forked ranks need; the first step of an optimizer imports most."""
    for name in ("fsdp", "tensor.parallel", "algorithms.ddp_comm_hooks.default_hooks"):
        import_module(f"torch.distributed.{name}")
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter]).step()


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


# --- torch's recorder -----------------------------------------------------------------------------


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


# --- calls ----------------------------------------------------------------------------------------


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


# --- in steps -------------------------------------------------------------------------------------


def train(model: nn.Module, steps: int = 6) -> list[JoinedCall]:
    """Train a model on this rank's own data, and return the calls."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    marks = Marks()
    observer = Observer(marks)
    watched = open_arrivals()
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    observer.close()
    return read_all(watched, StepBuilder().add(marks.take()))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))


def job_models(rank: int) -> Any:
    """Train with DDP, with fully_shard and with tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    sharded, divided = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    torch.manual_seed(0)
    parallelize_module(divided, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    models = DistributedDataParallel(make_model()), fully_shard(sharded, mesh=mesh), divided
    return [train(model) for model in models]


def test_calls_are_in_their_steps(tmp_path: Path) -> None:
    """In each step, DDP broadcasts buffers in forward and reduces gradients in backward;
    fully_shard gathers parameters in both, and reduces gradients in backward; tensor parallelism
    reduces the activations of forward. They are the same calls in all ranks."""
    keys = []
    for ddp, fsdp, divided in run_ranks(job_models, tmp_path):
        for step in range(2, 6):
            operations = [call.operation for call in ddp if call.step == step]
            assert (operations[0], operations[-1]) == ("broadcast", "all_reduce")
        counts = Counter(call.step for call in fsdp if call.operation == "all_gather")
        assert {counts[step] for step in range(1, 6)} == {4}
        assert {call.step for call in fsdp if call.operation != "all_gather"} >= {1, 2, 3, 4, 5}
        inside = [call for call in divided if call.step >= 1]
        assert {(call.operation, call.nbytes) for call in inside} == {("all_reduce", 4 * 64 * 4)}
        keys.append([(c.group, c.number, c.operation, c.nbytes) for c in fsdp])
    assert keys[0] == keys[1]
