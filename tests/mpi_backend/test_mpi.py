"""The mpi4py backend, in real MPI jobs.

One job runs every check below in all its ranks and leaves a file with the outcomes; pytest then
reports them one by one. A rank runs this very file: `mpirun -n 2 python test_mpi.py MODE FOLDER`.
The results of the collectives themselves are in test_mpi_matrix.py.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from command_lines import TESTS, clean_environment
from frozen import Frozen
from left_processes import wait_for_left_processes
from mpi_jobs import (
    OP,
    Group,
    all_gather_single,
    run_job,
    start_group,
)
from patience import PATIENCE_SECONDS
from torch import Tensor
from warm_python import warm_python

from ddpbench import mpi
from ddpbench.mpi_backend import library as mpi_library

PATIENT = timedelta(seconds=PATIENCE_SECONDS)
SOON = timedelta(milliseconds=50)
same = partial(torch.testing.assert_close, rtol=0, atol=0)


def given(rank: int, count: int) -> Tensor:
    """Return what a rank puts in: small whole numbers but 0, some of them negative."""
    return (2 * (torch.arange(count) % 5 + rank + 1) - 7).float()


def total(size: int, count: int) -> Tensor:
    """Return the sum of what all ranks put in."""
    return torch.stack([given(rank, count) for rank in range(size)]).sum(0)


def refused(call: Callable[[], Any], text: str, kind: Any = ValueError) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


# --- the checks: each runs in every rank of a group


def check_queue(group: Group, rank: int, size: int) -> None:
    """A synchronous call behind queued ones waits for its turn, and all results are right."""
    tensors = [given(rank, 1000 + i) for i in range(20)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors[:-1]]
    dist.all_reduce(tensors[-1], group=group)
    assert all(work.is_completed() for work in works)
    for later in (rank == 0, rank != 0):  # what waits here and does not there is one call
        work = dist.all_reduce(torch.empty(0), group=group, async_op=later)
        if later:
            work.wait()
    for i, tensor in enumerate(tensors):
        same(tensor, total(size, 1000 + i))


def check_futures(group: Group, rank: int, size: int) -> None:
    """A work's future gives the tensors, once done too; its callback may call a collective."""
    tensor, second = given(rank, 5), given(rank, 3)
    work = dist.all_reduce(tensor, group=group, async_op=True)

    def then(future: torch.futures.Future[Any]) -> Tensor:
        dist.all_reduce(second, group=group)
        dist.all_reduce(second, group=group, async_op=True).wait()
        return future.value()[0] * 2

    time.sleep(0.05 * rank)  # so that in some rank it is queued behind, in another has ended
    doubled = work.get_future().then(then).wait()
    same(doubled, total(size, 5) * 2)
    same(second, total(size, 3) * size)
    assert work.get_future().value()[0] is not None
    one, two, three = (dist.barrier(group, async_op=True) for _ in range(3))
    chain = one.get_future().then(lambda _: two.get_future().wait())  # queued behind its own
    assert three.wait(PATIENT)
    chain.wait()
    dist.barrier(group)


def check_point_to_point(group: Group, rank: int, size: int) -> None:
    """Sends and receives match by tag in any order, to oneself too; several threads may wait for
    one receive; nobody needs to wait for a send."""
    right, left = (rank + 1) % size, (rank - 1) % size
    large = torch.full((300_000,), float(rank))  # over the eager limit
    mine = torch.empty_like(large)
    sends = [dist.isend(large, group=group, group_dst=rank, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        dist.irecv(mine, group=group, group_src=rank, tag=tag).wait()
    assert all(send.wait() for send in sends)
    same(mine, large)
    for _ in range(50):
        work = dist.irecv(torch.empty(5), group=group, group_src=left)
        dist.isend(torch.ones(5), group=group, group_dst=right)
        threads = [threading.Thread(target=work.wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert work.is_success()
    for tag in range(20):  # nobody waits for these sends, nor holds their tensors
        dist.isend(torch.full((5,), float(tag)), group=group, group_dst=right, tag=tag)
    for tag in range(20):
        got = torch.empty(5)
        dist.recv(got, group=group, group_src=left, tag=tag)
        same(got, torch.full((5,), float(tag)))
    dist.barrier(group)


def check_deadlines(group: Group, rank: int, size: int) -> None:
    """wait(timeout) raises an error with the operation's name, and the operation still ends; a
    receive without a time-out has the group's."""
    flag, store = torch.zeros(1), dist.distributed_c10d._get_default_store()
    if rank == 0:
        before, group._queue.timeout = group._queue.timeout, SOON
        receive = dist.irecv(flag, group=group, group_src=1)
        group._queue.timeout = before
        refused(receive.wait, "recv on rank 0", dist.DistBackendError)
        work = dist.barrier(group, async_op=True)
        refused(lambda: work.wait(SOON), "barrier on rank 0", dist.DistBackendError)
        assert not work.is_completed()
        store.wait(["rank 1 has not received"])
        for r in range(1, size):
            dist.send(flag, group=group, group_dst=r)
        assert receive.wait(PATIENT)
        work.wait()
    else:
        work = dist.irecv(flag, group=group, group_src=0)
        if rank == 1:
            refused(lambda: work.wait(SOON), "recv", dist.DistBackendError)
            store.set("rank 1 has not received", "")
        assert work.wait(PATIENT)
        if rank == 1:
            dist.send(flag, group=group, group_dst=0)
        dist.barrier(group)


def check_refusals(group: Group, rank: int, size: int) -> None:
    """What cannot be done is one ValueError in the caller, and nothing has been sent."""
    f8, ones, many = torch.zeros(2, dtype=torch.float8_e5m2), torch.ones(2), [torch.ones(2)] * size
    splits, scaled = [1] * size, dist._make_nccl_premul_sum(2.0)
    refused(lambda: dist.all_reduce(ones, OP.BAND, group), "torch.float32")
    refused(lambda: dist.all_reduce(ones, scaled, group), "PREMUL_SUM")
    refused(lambda: dist.reduce(f8, 0, group=group, async_op=True), "SUM")
    refused(lambda: dist.all_reduce(ones.to_sparse(), group=group), "must be dense")
    refused(lambda: dist.broadcast(torch.ones(2, device="meta"), 0, group), "meta")
    refused(lambda: dist.all_gather(many[1:], ones, group), f"must contain {size}")
    refused(lambda: all_gather_single(torch.ones(3), ones, group), f"must be {size} x 2")
    refused(lambda: dist.reduce_scatter(torch.ones(3), many, group=group), "sizes differ")
    refused(lambda: dist.all_to_all(many, many[1:], group), f"must contain {size}")
    exchange = partial(dist.all_to_all_single, group=group)
    refused(lambda: exchange(torch.ones(9), torch.ones(9), splits, splits), "splits")
    refused(lambda: exchange(torch.ones(size), torch.ones(2 * size)), "sizes")
    check_queue(group, rank, size)


def check_errors(group: Group, rank: int, size: int) -> None:
    """What MPI reports becomes a DistBackendError with operation, rank and MPI's own words."""
    opts, error = dist.BroadcastOptions(), dist.DistBackendError
    opts.rootRank = 99
    words = "MPI_ERR_ROOT" if "Open MPI" in mpi_library.library() else "Invalid root"

    def call() -> Any:
        return group.broadcast([torch.zeros(1)], opts)

    for opts.asyncOp in (False, True):
        refused(lambda: call().wait(), f"rank {rank}: {words}", error)
    work = call()
    refused(work.get_future().wait, words, RuntimeError)
    assert isinstance(work.exception(), error)
    refused(lambda: group.send([torch.zeros(1)], 99, 0), "send failed", error)
    short = dist.irecv(torch.zeros(2), group=group, group_src=rank)  # from itself
    dist.isend(torch.zeros(1), group=group, group_dst=rank)
    refused(short.wait, "received 4 bytes, but the tensor has 8", error)
    check_queue(group, rank, size)


def ddp(group: Group, model: torch.nn.Module, **options: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, process_group=group, **options)


def check_ddp_options(group: Group, rank: int, size: int) -> None:
    """With each of DDP's options replicas that begin with other weights stay equal to the bit, and
    three steps end where one process on all batches ends."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def model(seed: int = 0) -> Any:
        torch.manual_seed(seed)
        return torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])

    def train(replica: Any, rows: slice) -> Tensor:
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        for step in range(3):
            batch = torch.randn(4 * size, 16, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            replica(batch[rows]).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().view(-1) for p in replica.parameters()])

    alone = train(model(), slice(None))
    for hook, options in (
        (None, {"bucket_cap_mb": 0.001}),
        (None, {"gradient_as_bucket_view": True}),
        (None, {"static_graph": True}),
        (None, {"find_unused_parameters": True}),
        (default_hooks.allreduce_hook, {}),
        (default_hooks.fp16_compress_hook, {}),
    ):
        replica = ddp(group, model(rank), **options)
        if hook:
            replica.register_comm_hook(group, hook)
        flat = train(replica, slice(4 * rank, 4 * rank + 4))
        rows = torch.empty(size, flat.numel())
        all_gather_single(rows, flat, group)
        assert all(torch.equal(row, flat) for row in rows)
        close = 2e-2 if hook else 1e-5
        torch.testing.assert_close(flat, alone, rtol=close, atol=close)
    with (replica := ddp(group, model())).join():  # uneven inputs
        for _ in range(1 + rank):
            replica(torch.ones(2, 16)).sum().backward()


def check_sharded_training(group: Group, rank: int, size: int) -> None:
    """FSDP2's fully_shard trains as one process does. Saved from a thread while the group goes on,
    the whole state comes back to the bit."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def train(seed: int, sharded: bool) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model: Any = torch.nn.Sequential(*[torch.nn.Linear(8 * size, 8 * size) for _ in range(3)])
        for layer in (*model, model) if sharded else ():
            fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        rows = slice(2 * rank, 2 * rank + 2) if sharded else slice(None)
        for step in range(2):
            batch = torch.randn(2 * size, 8 * size, generator=torch.Generator().manual_seed(step))
            model(batch[rows]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def whole(model: Any, optimizer: Any) -> Tensor:
        momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
        tensors = [*model.parameters(), *momentum]
        full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
        return torch.cat([tensor.detach().view(-1) for tensor in full])

    first, second = train(0, True), train(1, True)
    torch.testing.assert_close(whole(*first), whole(*train(0, False)))
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0, group)
    own = dist.new_group(backend=mpi.NAME)
    states = dict(zip("mo", get_state_dict(*first), strict=True))
    future = dcp.async_save(states, checkpoint_id=folder[0], process_group=own)
    for _ in range(100):
        dist.all_reduce(torch.ones(1000), group=group)
    future.result(60)
    states = dict(zip("mo", get_state_dict(*second), strict=True))
    dcp.load(states, checkpoint_id=folder[0], process_group=group)
    set_state_dict(*second, model_state_dict=states["m"], optim_state_dict=states["o"])
    same(whole(*second), whole(*first))
    dist.destroy_process_group(own)
    if rank == 0:
        shutil.rmtree(folder[0])


CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}


# --- the jobs that run them


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mpi4py worker"]


def job_default(folder: Path) -> None:
    dist.init_process_group("mpi4py")  # all that a user's script says
    rank, size = mpi_library.world()
    assert (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) == (rank, size)
    outcomes = {}
    for name, check in CHECKS.items():
        try:
            check(dist.group.WORLD, rank, size)
            outcomes[name] = "passed"
        except (Exception, pytest.fail.Exception):
            outcomes[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    assert len(workers()) == 1
    dist.destroy_process_group()
    assert not workers()
    if rank == 0:  # the others do not come to the next one
        store = dist.FileStore(str(folder / "store"), 2)
        store.set_timeout(SOON)
        another = {"store": store, "rank": 0, "world_size": 2}
        kind = dist.DistBackendError
        refused(lambda: dist.init_process_group(mpi.NAME, **another), "not join: 1", kind)
    (folder / f"ended{rank}").touch()


def job_leave(folder: Path) -> None:
    start_group(mpi.NAME, folder)
    dist.all_reduce(torch.ones(1 << 20))
    dist.all_reduce(torch.ones(1 << 20), async_op=True)  # neither waited for nor destroyed
    builtins.kept = dist.group.WORLD  # type: ignore[attr-defined]  # and deleted last of all


def job_die(folder: Path) -> None:
    start_group(mpi.NAME, folder)
    if dist.get_rank() == 1:
        raise RuntimeError("this rank dies of an exception")
    dist.barrier()


def meet_and_leave(folder: Path) -> Any:
    """Return DDP and another group after the ranks have met; rank 1 only lives until rank 0 aborts.

    What rank 0 calls has a time-out of 1 s from then on.
    """
    start_group(mpi.NAME, folder)
    one, other = dist.new_group(backend=mpi.NAME), dist.new_group(backend=mpi.NAME)
    replica = ddp(one, torch.nn.Linear(2, 2))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(4 * PATIENCE_SECONDS)
    one._queue.timeout = other._queue.timeout = timedelta(seconds=1)
    return replica, other


def job_hang(folder: Path) -> None:
    _, group = meet_and_leave(folder)
    dist.barrier(group, async_op=True)


def job_late_to_synchronous(folder: Path) -> None:
    _, group = meet_and_leave(folder)
    dist.all_reduce_coalesced([torch.ones(1), torch.ones(1)], group=group)  # each is a call


def job_late(folder: Path) -> None:
    replica, group = meet_and_leave(folder)
    words = "all_reduce on rank 0"
    refused(replica(torch.ones(1, 2)).sum().backward, words, Exception)
    first = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    second = dist.broadcast(torch.ones(1), 0, group=group, async_op=True)
    for work in (first, second):  # the second waits behind the first
        refused(work.get_future().wait, words, RuntimeError)
        assert work.is_completed()
        assert not work.is_success()
    third, error = dist.barrier(group, async_op=True), dist.DistBackendError
    refused(third.wait, words, error)
    refused(lambda: dist.all_reduce(torch.ones(1), group=group), words, error)
    refused(lambda: dist.destroy_process_group(group), "cannot shut down", error)
    (folder / "reported").touch()


def job_exit(folder: Path) -> None:
    start_group(mpi.NAME, folder)
    dist.all_reduce(torch.ones(1), async_op=True)
    sys.exit(3)


def job_killed(folder: Path) -> None:
    start_group(mpi.NAME, folder)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def job_script(folder: Path) -> None:
    dist.init_process_group("mpi4py")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [dist.get_world_size()] * 2
    dist.destroy_process_group()


def job_trainer(folder: Path) -> None:
    dist.init_process_group("mpi4py")
    queue: Any = dist.group.WORLD._queue  # type: ignore[union-attr]
    runpy.run_path(os.environ["SCRIPT"])
    assert queue.recorded()[0] >= 30  # a call per step of the optimizer
    (folder / f"ended{os.environ['RANK']}").touch()


def job_memory(folder: Path) -> None:
    start_group(mpi.NAME, folder)
    tensor, whole = torch.zeros(1000), torch.zeros(1000 * dist.get_world_size())
    strided, peer, me = torch.zeros(10, 100).t(), 1 - dist.get_rank(), psutil.Process()

    def measure(count: int) -> tuple[int, int]:
        for _ in range(count):
            for later in (False, True):
                works = [
                    dist.all_reduce(strided, OP.AVG, async_op=later),
                    all_gather_single(whole, tensor, async_op=later),
                ]
                for work in works if later else ():
                    work.get_future().wait()
            request = dist.irecv(strided, peer)
            dist.send(tensor, peer)
            request.wait()
        return me.memory_info().rss, me.num_threads()

    before, after = measure(100), measure(600)
    assert after[0] - before[0] < 1 << 20, f"RSS {before[0]} became {after[0]}"
    assert after[1] == before[1]
    for _ in range(50):
        dist.destroy_process_group(dist.new_group(backend=mpi.NAME))
    assert len(workers()) == 1
    dist.destroy_process_group()


def job_alone(folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    mpi.register()
    rank = int(os.environ["RANK"])
    refused(
        lambda: dist.init_process_group(mpi.NAME, store=store, rank=rank, world_size=2),
        "mpirun -n 2 python test_mpi.py",
    )


COMPLAINTS = re.compile("Traceback|Exception ignored|Abort|abort|signal")


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("checks")
    return run_job(job_default, 2, folder), folder


@pytest.mark.parametrize("name", CHECKS)
def test_check(checked: Any, name: str) -> None:
    """The check of this name holds in every rank of the default group."""
    process, folder = checked
    for rank in range(2):
        path = folder / f"{rank}.json"
        outcomes = json.loads(path.read_text()) if path.exists() else {}
        assert outcomes.get(name, "did not run: " + process.stderr) == "passed"


def test_clean_end(checked: Any) -> None:
    """After destroy_process_group no thread is left, and every process ends with code 0. Ranks that
    do not come to the next group are named."""
    process, folder = checked
    assert process.returncode == 0, process.stderr
    assert len(list(folder.glob("ended*"))) == 2
    assert not COMPLAINTS.search(process.stderr), process.stderr


THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("job", "ranks", "variables", "code"),
    [
        pytest.param(job_leave, 2, {}, 0, marks=THOROUGH),
        pytest.param(job_memory, 2, {}, 0, marks=THOROUGH),
        pytest.param(job_script, 1, {}, 0, marks=THOROUGH),
        pytest.param(job_script, 2, {"MASTER_ADDR": "localhost"}, 0, marks=THOROUGH),
        pytest.param(job_exit, 2, {}, 3, marks=THOROUGH),
        (job_die, 2, {}, 1),
    ],
)
def test_job(
    tmp_path: Path, job: Callable[..., None], ranks: int, variables: dict[str, str], code: int
) -> None:
    """Jobs end with their code: with a collective in flight and a group that is not destroyed;
    after 4,200 calls, which leave memory and threads as they were; a single rank; a given
    address; by sys.exit with a call in flight. A rank that dies of an exception takes along those
    that wait for it, and says why."""
    process = run_job(job, ranks, tmp_path, **variables)
    assert process.returncode == code, process.stderr
    assert ("this rank dies of an exception" in process.stderr) == (job is job_die)
    assert code != 0 or not COMPLAINTS.search(process.stderr), process.stderr
    assert job is job_die or "Traceback" not in process.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("job", [job_late, job_hang, job_late_to_synchronous])
def test_a_late_rank_is_an_error(tmp_path: Path, job: Callable[..., None], frozen: Frozen) -> None:
    """What waits for a rank that does not come ends with the group's time-out, with the operation
    in the error, and so does all that is queued behind it; MPI cannot go on, and the job ends. A
    thread that is inside MPI has its job aborted, with one sentence."""
    process = run_job(job, 2, tmp_path)
    assert process.returncode == 5, process.stderr
    frozen.verdict(re.findall(r"mpi4py: (.*)", process.stderr)[0])
    assert (tmp_path / "reported").exists() == (job is job_late)


@pytest.mark.thorough
def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    """When a rank is killed in mid-job, no other rank stays behind."""
    (tmp_path / "job").mkdir()
    process = run_job(job_killed, 2, tmp_path / "job")
    assert process.returncode != 0
    assert wait_for_left_processes(tmp_path) == []


@pytest.mark.frameworks
@pytest.mark.parametrize("package", ["accelerate", "lightning"])
def test_trainers(tmp_path: Path, package: str) -> None:
    """A trainer uses the group that exists, and leaves without a complaint."""
    python = os.environ.get("DDPBENCH_FRAMEWORKS_PYTHON", "")
    search = (
        f"from importlib.util import find_spec as f; exit(not f('mpi4py') or not f('{package}'))"
    )
    if not python or subprocess.run([python, "-c", search], check=False).returncode:
        pytest.skip(f"no {package} in DDPBENCH_FRAMEWORKS_PYTHON")
    script = TESTS / "watch" / "frameworks" / f"with_{package}.py"
    process = run_job(job_trainer, 2, tmp_path, python=(python,), SCRIPT=str(script))
    assert process.returncode == 0, process.stderr
    assert len(list(tmp_path.glob("ended*"))) == 2
    assert not COMPLAINTS.search(process.stderr), process.stderr


@pytest.mark.thorough
def test_without_mpirun(tmp_path: Path) -> None:
    """Ranks that mpirun did not start are all told so, instead of computing alone."""
    pytest.importorskip("mpi4py", exc_type=ImportError)
    command = [*warm_python(), __file__, "job_alone", str(tmp_path)]
    ranks = [
        subprocess.Popen(command, stderr=subprocess.PIPE, env=clean_environment(RANK=str(rank)))
        for rank in range(2)
    ]
    for process in ranks:
        assert process.communicate(timeout=PATIENCE_SECONDS)[1] == b""
        assert process.returncode == 0


def test_import_starts_nothing() -> None:
    """Importing the module and registering the backend does not import mpi4py's MPI."""
    code = "import sys; from ddpbench import mpi; mpi.register(); mpi.register()"
    code += "; sys.exit('mpi4py.MPI' in sys.modules)"
    command = [*warm_python(), "-c", code]
    assert subprocess.run(command, check=False, env=clean_environment()).returncode == 0


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
