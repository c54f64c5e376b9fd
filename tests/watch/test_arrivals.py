"""The arrivals of real ranks at real collectives."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpbench.watch.observe import arrivals, recorder_dump
from ddpbench.watch.observe.arrivals import Arrivals, Reducers
from ddpbench.watch.observe.marks import Marks
from ddpbench.watch.observe.observer import Observer
from ddpbench.watch.observe.recorder_dump import RecorderDump
from ddpbench.watch.observe.steps import Step, StepBuilder
from ddpbench.watch.window import CALLS, Call

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


@pytest.mark.usefixtures("alone")
def test_the_recorder_is_read_as_torch_reads_it() -> None:
    """All 2000 entries of a full recorder are what torch's own function returns; a second read
    returns only newer ones, and not those after the time asked for."""
    assert DUMP is not None
    tensor = torch.zeros(3)
    for _ in range(2100):
        dist.all_reduce(tensor)
    dump = RecorderDump()
    entries = dump.read_new(["gloo"], time.time_ns(), 5000)
    expected = json.loads(DUMP())["entries"]
    assert len(entries) == len(expected) == 2000
    for entry, fields in zip(entries, expected, strict=True):
        assert entry.record_id == fields["record_id"]
        assert entry.time_created_ns == fields["time_created_ns"]
        assert json.loads(bytes(entry.input_sizes)) == fields["input_sizes"]
    assert dump.read_new(["gloo"], time.time_ns(), 5000) == []
    now_ns = time.time_ns()
    dist.all_reduce(tensor)
    assert dump.read_new(["gloo"], now_ns, 5000) == []
    dist.all_reduce(tensor)
    assert len(dump.read_new(["gloo"], time.time_ns(), 5000)) == 2
    assert dump.unavailable == ""


@pytest.mark.usefixtures("alone")
def test_no_more_than_a_window_of_calls_is_returned() -> None:
    """Of many calls, the newest CALLS are returned, with consecutive numbers."""
    dist.all_reduce(torch.zeros(3))
    watched = Arrivals()
    for _ in range(700):
        dist.all_reduce(torch.zeros(3))
    calls = watched.read([], final=True)
    assert len(calls) == CALLS
    assert [call.number for call in calls] == list(range(701 - CALLS + 1, 702))


def test_batches_of_nccl_are_read_as_their_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of sends is none, although its last entry has the number of the previous one; a batch
    of collectives keeps name and size of its calls."""
    recorder = NcclRecorder()
    recorder.collective()
    recorder.batch()
    recorder.collective_batch("reduce", "reduce")
    recorder.batch()
    reads = {"nccl": recorder.dump_json}
    monkeypatch.setattr(recorder_dump, "_find_reads", lambda _: (reads, ""))
    entries = RecorderDump().read_new(["nccl"], time.time_ns(), 99)
    called = [(entry.collective_seq_id, entry.profiling_name) for entry in entries]
    assert called == [(1, "nccl:all_reduce"), (2, "nccl:reduce"), (2, "nccl:reduce")]


def test_short_strings_are_read_in_place() -> None:
    """A string that libstdc++ keeps inside the structure is read there, and nothing is freed."""
    assert recorder_dump._take(recorder_dump._String(None, 3, b"abc"), None) == b"abc"


def test_calls_whose_group_torch_hides_are_noted() -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, records lack the group of a call, and a note says so."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        arrivals = Arrivals()
        dist.all_reduce(torch.zeros(3))
        assert arrivals.read([], final=True) == []
        assert "DETAIL" in arrivals.unavailable
    finally:
        dist.set_debug_level(level)
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_elsewhere_only_a_short_recorder_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the C++ function is not called, torch's own reads a short recorder; a longer one would
    hold the interpreter for too long, and a sentence states what to set."""
    dist.all_reduce(torch.zeros(3))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    dump = RecorderDump()
    assert dump.read_new(["gloo"], time.time_ns(), 9) == []
    assert "TORCH_FR_BUFFER_SIZE=250" in dump.unavailable
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "250")
    dump = RecorderDump()
    assert dump.read_new(["gloo"], time.time_ns(), 9)
    assert dump.unavailable == ""


@pytest.mark.usefixtures("alone")
def test_reads_that_take_long_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a read that took more than its share of the time, the recorder is left alone until a
    later one, and the calls in between are not lost; the last read comes in any case."""
    monkeypatch.setattr(arrivals, "SHARE", 1e-9)
    watched = Arrivals()
    watched.read([])
    dist.all_reduce(torch.zeros(3))
    assert watched.read([]) == []
    assert [call.operation for call in watched.read([], final=True)] == ["all_reduce"]


@pytest.mark.usefixtures("alone")
def test_steps_are_forgotten_once_their_calls_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an hour of steps, the last is kept; while the recorder is left alone, all are, so that a
    later read places calls in their steps."""
    watched, now = Arrivals(), time.perf_counter_ns()
    second = 10**9
    steps = [
        Step(n, now - (3600 - n) * second, now - (3599 - n) * second, (0.0,) * 6)
        for n in range(3590)
    ]
    watched.read(steps[:-1])
    assert [step.number for step in watched._steps] == [3588]
    monkeypatch.setattr(watched, "_due_ns", time.time_ns() + 3600 * second)
    watched.read(steps[-1:])
    assert len(watched._steps) == 2
    began = time.perf_counter_ns()
    dist.all_reduce(torch.zeros(3))
    ended = time.perf_counter_ns()
    last = Step(3590, began, ended, (0.0,) * 6)
    (call,) = watched.read([last], final=True)
    assert call.step == 3590
    assert [step.number for step in watched._steps] == [3590]


# --- calls ----------------------------------------------------------------------------------------


def job_calls(rank: int) -> Any:
    """Call many operations, with the time before and after each call that blocks."""
    watched, around = Arrivals(), []
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
    return watched.read([], final=True), around


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
            assert before_ns <= call.entered_ns <= after_ns
            assert call.step == call.wire_ns == -1


# --- in steps -------------------------------------------------------------------------------------


def train(model: nn.Module, timed: bool = False, steps: int = 6) -> list[Call]:
    """Train a model on this rank's own data, and return the calls."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    marks = Marks()
    observer = Observer(marks)
    reducers = Reducers(lambda: observer.modules) if timed else None
    if reducers is not None:
        observer.after_step.append(reducers.after_step)
    watched = Arrivals(reducers)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    dist.barrier()  # so that the stamps of all reductions are there
    observer.close()
    return watched.read(StepBuilder().add(marks.take()), final=True)


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


# --- the hook -------------------------------------------------------------------------------------


def job_wire(rank: int) -> Any:
    """Train with and without the hook, and with a hook of the user's."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    results: list[tuple[list[Tensor], list[Call]]] = []
    for timed, own in ((False, False), (True, False), (True, True)):
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
        if own:
            model.register_comm_hook(None, allreduce_hook)
        calls = train(model, timed)
        results.append(([p.detach().clone() for p in model.parameters()], calls))
    plain, timed, _ = results
    equal = all(map(torch.equal, plain[0], timed[0]))
    return equal, *[
        [call.wire_ns for call in calls[-40:] if call.operation == "all_reduce" and call.step >= 3]
        for _, calls in results
    ]


def test_the_hook_changes_no_bit(tmp_path: Path) -> None:
    """With time_transfers=True, in three ranks, all parameters are bit for bit those without, each
    reduction has a time, and a module with a hook of the user's is left alone."""
    for equal, plain, timed, user in run_ranks(job_wire, tmp_path, 3):
        assert equal
        assert plain
        assert set(plain) == {-1}
        assert timed
        assert min(timed) > 0
        assert set(user) == {-1}


def test_ranks_with_clocks_apart_report_up_to_the_same_time() -> None:
    """Reads just before and just after a multiple of five seconds end with that moment."""
    moment = 1_800_000_000 * 10**9
    around = [moment + ms * 10**6 for ms in (-500, -1, 0, 1, 3000)]
    assert {arrivals.find_round_ns(now_ns) for now_ns in around} == {moment}
