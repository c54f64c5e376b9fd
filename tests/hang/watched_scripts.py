"""Users' scripts under ddpbench's watchdog: `python watched_scripts.py FOLDER PLAY…`.

It forks two ranks for each play and runs all plays at once; under mpirun it is itself one of the
ranks. Rank 1, or the rank that the play names, does not do its part. A play leaves PLAY.err and
PLAY.codes in the folder.
"""

import atexit
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

import ddpbench
from ddpbench.launch import placement

RANKS = 2
BACKENDS = {"connect": "late", "model": "late", "loop": "late", "mixed": "cpu:silent,cuda:gloo"}


def group(*ranks: int) -> dist.ProcessGroup:
    """A group of these ranks; the others call it too."""
    return dist.new_group(list(ranks))


def step(count: int = 1024) -> None:
    """One collective."""
    dist.all_reduce(torch.zeros(count))


def load_batch(how: str) -> None:
    """What keeps a rank from the next collective; heartbeats have seen it here before."""
    if how == "sleep":
        time.sleep(4.0)
        return
    if how == "pause":
        subprocess.Popen(["sh", "-c", f"sleep 4.2; kill -CONT {os.getpid()}"])
    time.sleep(1.2)
    if how == "raise":
        raise ValueError("bad batch")
    os.kill(os.getpid(), signal.SIGSTOP)


def play_talk(rank: int) -> None:
    """The verdict is told and the job goes on."""
    for _ in range(3):  # where all plays start at once, the first may take seconds
        step()
    ddpbench.watchdog(timeout=2.0, end=False)
    if rank == 1:
        load_batch("sleep")
    step()
    if rank == 1:
        load_batch("pause")
    step()
    time.sleep(1.0)  # for a rank that has only just gone on to hear the verdict
    assert "torch._inductor" not in sys.modules  # to read lines of code torch would import it


def play_order(rank: int) -> None:
    """Rank 1 has skipped a collective."""
    ddpbench.watchdog(timeout=1.0)
    for number in range(7):
        if rank == 0 or number != 4:
            step()
        dist.broadcast(torch.zeros(5), 0)
        dist.barrier()


def play_shape(rank: int) -> None:
    """Rank 1 calls another size, at which gloo gives up."""
    ddpbench.watchdog(timeout=20.0)
    step()
    time.sleep(0.3 * rank)
    step(1024 + rank)


def play_inside(rank: int) -> None:
    """Rank 1 stops in a collective."""
    ddpbench.watchdog(timeout=2.0)
    for _ in range(3):
        step()
    if rank == 1:
        threading.Timer(1.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    else:
        time.sleep(1.8)
    step()


def play_store(rank: int) -> None:
    """Rank 0, in which the store lives, stops."""
    step()  # first: on a busy host, the ranks may take longer than the time-out to connect
    ddpbench.watchdog(timeout=2.0)
    if rank == 0:
        load_batch("stop")
    step()


def play_raise(rank: int) -> None:
    """Rank 1 fails in its own code, while rank 0 waits for it."""
    folder = Path(sys.argv[1])
    log = (folder / f"log of rank {rank}").open("w")
    log.write("buffered")
    atexit.register((folder / f"handler of rank {rank}").touch)
    with ddpbench.watchdog(timeout=30.0):
        step()
        if rank == 1:
            load_batch("raise")
        step()


def play_receive(rank: int) -> None:
    """Rank 1 is in a receive, again and again, for longer than the time-out; then for ever."""
    ddpbench.watchdog(timeout=1.0)
    one = torch.zeros(1)
    for _ in range(20):
        if rank == 0:
            time.sleep(0.1)
            dist.send(one, 1)
        else:
            dist.recv(one, 0)
    if rank == 0:
        time.sleep(30)
    dist.recv(one, 0)


def play_quiet(rank: int) -> None:
    """Nothing is wrong; the ranks leave one after the other, the first with a child of its own."""
    with contextlib.suppress(ValueError):
        ddpbench.watchdog(timeout=0)
    guard = ddpbench.watchdog(timeout=3.0)
    assert ddpbench.watchdog() is guard  # as in a script under `ddpbench watch --timeout`
    guard.close()
    for _ in range(3):
        step()
        time.sleep(1.2 * rank)
    guard.close()
    with ddpbench.watchdog(timeout=3.0):
        step()
        if os.fork() == 0:
            sys.exit(0)
    time.sleep(0.2 * rank)


def play_pairs(rank: int) -> None:
    """Each rank has a group of its own; then they call different things on the world."""
    ddpbench.watchdog(timeout=2.0)
    mine = [group(0), group(1)][rank]
    dist.all_reduce(torch.zeros(4), group=mine)
    if rank == 1:
        dist.barrier()
    step()


def play_pipeline(rank: int) -> None:
    """The second stage of a pipeline is busy in its third step."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    class Stage(torch.nn.Linear):
        busy = False

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if self.busy:
                time.sleep(30)
            return super().forward(batch)

    dist.barrier()
    ddpbench.watchdog(timeout=2.0)
    model = Stage(8, 8)
    stage = PipelineStage(model, rank, RANKS, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.MSELoss())
    for number in range(3):
        model.busy = rank == 1 and number == 2
        batch = torch.zeros(4, 8)
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)


def play_cycle(rank: int) -> None:
    """Two groups of all ranks, used in different order."""
    ddpbench.watchdog(timeout=2.0)
    groups = [group(0, 1), group(0, 1)]
    for each in groups if rank == 0 else groups[::-1]:
        dist.all_reduce(torch.zeros(1024), group=each)


def play_ring(rank: int) -> None:
    """Both receive first."""
    ddpbench.watchdog(timeout=2.0)
    dist.recv(torch.zeros(4), 1 - rank)


def play_posted(rank: int) -> None:
    """Rank 0 waits for what it has posted before; nothing else has been called on that group."""
    ddpbench.watchdog(timeout=2.0)
    if rank == 1:
        time.sleep(30)
    (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(1), 1)])
    work.wait()


def play_cleanup(rank: int) -> None:
    """Rank 1 fails in a `try` whose `finally` is in the same function."""
    ddpbench.watchdog(timeout=20.0)
    try:
        step()
        if rank == 1:
            time.sleep(1.2)
            raise ValueError("bad batch")
        step()
    finally:
        time.sleep(0.01)


def play_finally(rank: int) -> None:
    """Rank 1 fails, and its `finally` has a collective that the others do not call yet."""
    ddpbench.watchdog(timeout=2.0)
    try:
        step()
        if rank == 1:
            raise KeyError("label")
        step()
    finally:
        dist.barrier()


def play_detail(rank: int) -> None:
    """Rank 1 is late; torch waits for it before it counts the call, and records no group's name."""
    for _ in range(3):
        step()
    ddpbench.watchdog(timeout=2.0)
    if rank == 1:
        time.sleep(30)
    step()


def play_sent(rank: int) -> None:
    """Rank 1 is late at the first collective, after messages, which gloo has counted."""
    for _ in range(3):
        (dist.send if rank == 0 else dist.recv)(torch.zeros(4), 1 - rank)
    ddpbench.watchdog(timeout=2.0)
    if rank == 1:
        time.sleep(30)
    step()


def play_uneven(rank: int, live: bool = False) -> None:
    """Rank 1 has fewer batches, and all end their groups whatever has happened."""
    ddpbench.watchdog(timeout=20.0)
    try:
        for _ in range(3 if rank == 1 else 5):
            step()
    finally:
        dist.destroy_process_group()
    if live:
        time.sleep(30)


def play_alive(rank: int) -> None:
    """As `uneven`, but rank 1 goes on without a group."""
    play_uneven(rank, live=True)


def play_compute(rank: int) -> None:
    """All compute for longer than the time-out, which is no fault."""
    ddpbench.watchdog(timeout=1.0)
    step()
    time.sleep(4.0)
    step()


def play_replicas(rank: int) -> None:
    """Rank 0 compares replicas, where the innermost lines are ddpbench's; rank 1 does not."""
    ddpbench.watchdog(timeout=2.0)
    if rank == 1:
        dist.barrier()
    ddpbench.verify_replicas(torch.nn.Linear(4, 4))


class Stuck(torch.utils.data.Dataset[int]):
    """Its second sample never comes."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        time.sleep(600 * index)
        return index


def play_worker(rank: int) -> None:
    """Rank 1 waits for a worker that is stuck; a process whose parent has gone hangs around too."""
    os.setsid()  # as launchers do it
    ddpbench.watchdog(timeout=3.0)
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    for _ in torch.utils.data.DataLoader(Stuck(), num_workers=1) if rank else range(2):
        step()


def play_short(rank: int) -> None:
    """Rank 1 is late, and gloo's own time-out in rank 0 is shorter than the watchdog's."""
    ddpbench.watchdog(timeout=20.0)
    step()
    if rank == 1:
        time.sleep(30)
    step()


def play_connect(rank: int) -> None:
    """Rank 1 does not come to the first call, which connects the ranks."""
    ddpbench.watchdog(timeout=2.0)
    if rank == 1:
        time.sleep(30)
    step()


def play_model(rank: int) -> None:
    """Rank 1 does not come to DDP's constructor, which makes the first call."""
    import_module("torch._dynamo")  # takes seconds in the constructor: a notice, but no hang
    ddpbench.watchdog(timeout=2.0)
    if rank == 1:
        time.sleep(30)
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))


def play_mixed(rank: int) -> None:
    """Rank 1 does not come to a call on one of a group's two backends."""
    ddpbench.watchdog(timeout=2.0)
    for _ in range(3):
        step()
    if rank == 1:
        time.sleep(30)
    step()


def play_loop(rank: int) -> None:
    """Rank 0 waits in one line for longer than the time-out, each time for another call."""
    ddpbench.watchdog(timeout=2.5)  # on a busy host, a single call may take more than a second
    for _ in range(30):
        time.sleep(0.25 * rank)
        step()


def play_healthy(rank: int) -> None:
    """Nothing is wrong; the rank with the store is the first to leave."""
    ddpbench.watchdog(timeout=30.0)
    for _ in range(3):
        step()
    time.sleep(1.2 * rank)


def main(play: str) -> None:
    """One rank."""
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(75)  # no play takes as long: it has failed, and ends with all stacks
    mpi = "OMPI_COMM_WORLD_RANK" in os.environ
    if mpi:
        import_module("ddpbench.mpi")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=2 if play == "short" else 600)
    if play in BACKENDS:
        import_module("unrecorded_backends")
    if play == "detail":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    if play == "mixed":
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    backend = "mpi4py" if mpi else BACKENDS.get(play, "gloo")
    dist.init_process_group(backend, timeout=timeout)
    globals()[f"play_{play}"](dist.get_rank())
    if dist.is_initialized():
        time.sleep(0.02)  # gloo of torch 2.7 may hang where its group ends right after a call
        dist.destroy_process_group()


def forked(folder: Path, plays: list[str]) -> str:
    """In a rank its play; "" once all ranks are over."""
    ranks: dict[str, list[int]] = {}
    for play in plays:
        port = placement.free_port()
        for rank in range(RANKS):
            if (child := os.fork()) == 0:
                here = {"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
                os.environ.update({k: str(v) for k, v in here.items()}, MASTER_ADDR="127.0.0.1")
                file = os.open(folder / f"{play}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(file, 2)
                return play
            ranks.setdefault(play, []).append(child)
    for play, children in ranks.items():
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        (folder / f"{play}.codes").write_text(" ".join(map(str, codes)))
    return ""


if __name__ == "__main__":
    mine = sys.argv[2]
    if "OMPI_COMM_WORLD_RANK" in os.environ or (mine := forked(Path(sys.argv[1]), sys.argv[2:])):
        main(mine)
