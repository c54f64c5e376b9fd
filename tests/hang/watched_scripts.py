"""Users' scripts under ddpbench's watchdog: `python watched_scripts.py FOLDER PLAY`.

It forks two ranks for the play; under mpirun it is itself one of the ranks. Rank 1, or the rank
that the play names, does not do its part. A play leaves PLAY.err and PLAY.codes in the folder.

Whatever must be in time only waits for what has happened, so that a busy machine does no harm.
"""

import atexit
import contextlib
import faulthandler
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from patience import PATIENCE_SECONDS, be_patient, wait_until

import ddpbench
from ddpbench.hang import guard
from ddpbench.launch import placement

RANKS = 2
LATE, NEVER_LATE = 10.0, 60.0  # time-outs: one that a play is to miss, and another


def step(count: int = 1024) -> None:
    """One collective."""
    dist.all_reduce(torch.zeros(count))


def sleep_on() -> None:
    """Do not come back."""
    while True:
        time.sleep(30)


def await_heartbeat() -> None:
    """Wait until others know where this rank is: of two new heartbeats, one is published."""
    heartbeats = [guard._on._heartbeat]
    while len(heartbeats) < 3:
        time.sleep(1.2)
        heartbeats += [guard._on._heartbeat] * (guard._on._heartbeat is not heartbeats[-1])


def count_verdicts() -> int:
    """How many have been printed in the play `talk`."""
    return Path(sys.argv[1], "talk.err").read_text().count("ddpbench: rank")


def play_talk(rank: int) -> None:
    """The verdict is told and the job goes on; first rank 1 is late, then it is stopped."""
    for _ in range(3):
        step()
    ddpbench.watchdog(timeout=LATE, end=False)
    if rank == 1:
        load_batch("sleep")
    step()
    if rank == 1:
        printed = f"grep -q SIGSTOP {shlex.quote(sys.argv[1])}/talk.err"
        wake = f"until {printed}; do sleep 0.2; done; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake])
        load_batch("stop")
    step()
    wait_until(lambda: count_verdicts() == 4, "the last verdict")
    assert "torch._inductor" not in sys.modules  # to read lines of code torch would import it


def load_batch(how: str) -> None:
    """What keeps a rank from the next collective."""
    while how == "sleep":
        time.sleep(4.0)
        if count_verdicts() == 2:
            return
    await_heartbeat()
    if how == "raise":
        raise ValueError("bad batch")
    os.kill(os.getpid(), signal.SIGSTOP)


def play_shape(rank: int) -> None:
    """Rank 1 calls another size, at which gloo gives up."""
    ddpbench.watchdog(timeout=NEVER_LATE)
    step()
    time.sleep(0.3 * rank)
    step(1024 + rank)


def play_inside(rank: int) -> None:
    """Rank 1 stops in a collective, in which rank 0 is only then."""
    store = dist.distributed_c10d._get_default_store()
    for _ in range(3):
        step()
    ddpbench.watchdog(timeout=LATE)
    if rank == 1:

        def stop() -> None:
            wait_until(lambda: "step" in guard._on._heartbeat.place)
            await_heartbeat()
            os.kill(os.getpid(), signal.SIGSTOP)

        store.set("pid", str(os.getpid()))
        threading.Thread(target=stop, daemon=True).start()
    else:
        other = psutil.Process(int(store.get("pid")))
        wait_until(lambda: other.status() == psutil.STATUS_STOPPED)
    step()


def play_store(rank: int) -> None:
    """Rank 0, in which the store lives, stops."""
    step()
    ddpbench.watchdog(timeout=LATE)
    if rank == 0:
        load_batch("stop")
    step()


def play_raise(rank: int) -> None:
    """Rank 1 fails in its own code, while rank 0 waits for it."""
    folder = Path(sys.argv[1])
    log = (folder / f"log of rank {rank}").open("w")
    log.write("buffered")
    atexit.register((folder / f"handler of rank {rank}").touch)
    with ddpbench.watchdog(timeout=NEVER_LATE):
        step()
        if rank == 1:
            load_batch("raise")
        step()


def play_quiet(rank: int) -> None:
    """Nothing is wrong; the ranks leave one after the other, the first with a child of its own."""
    with contextlib.suppress(ValueError):
        ddpbench.watchdog(timeout=0)
    first = ddpbench.watchdog(timeout=NEVER_LATE)
    assert ddpbench.watchdog() is first  # as in a script under `ddpbench watch --timeout`
    for _ in range(3):
        step()
        time.sleep(1.2 * rank)
    first.close()
    with ddpbench.watchdog(timeout=NEVER_LATE):
        step()
        if os.fork() == 0:
            atexit._run_exitfuncs()  # the watchdog's; torch would then wait for threads it lacks
            os._exit(0)
        time.sleep(1.2 * rank)  # rank 0, which has the store, is through earlier
    time.sleep(0.2 * rank)


def play_pipeline(rank: int) -> None:
    """The second stage of a pipeline is busy in its third step."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    class Stage(torch.nn.Linear):
        busy = False

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            while self.busy:
                time.sleep(30)
            return super().forward(batch)

    model = Stage(8, 8)
    stage = PipelineStage(model, rank, RANKS, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.MSELoss())
    for number in range(3):
        if number == 1:
            ddpbench.watchdog(timeout=LATE)
        model.busy = rank == 1 and number == 2
        batch = torch.zeros(4, 8)
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)


def play_uneven(rank: int) -> None:
    """Rank 1 has fewer batches, and all end their groups whatever has happened."""
    ddpbench.watchdog(timeout=NEVER_LATE)
    try:
        for _ in range(3 if rank == 1 else 5):
            step()
    finally:
        dist.destroy_process_group()


def play_connect(rank: int) -> None:
    """Rank 1 does not come to the first call, which connects the ranks."""
    ddpbench.watchdog(timeout=LATE)
    if rank == 1:
        sleep_on()
    step()


class Stuck(torch.utils.data.Dataset[int]):
    """Its second sample never comes."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        time.sleep(600 * index)
        return index


def play_worker(rank: int) -> None:
    """Rank 1 waits for a worker that is stuck."""
    step()
    ddpbench.watchdog(timeout=LATE)
    for _ in torch.utils.data.DataLoader(Stuck(), num_workers=1) if rank else range(2):
        step()


def main(play: str) -> None:
    """One rank."""
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(int(PATIENCE_SECONDS))  # it has failed, and ends with all stacks
    be_patient()
    mpi = "OMPI_COMM_WORLD_RANK" in os.environ
    if mpi:
        import_module("ddpbench.mpi")
    torch.set_num_threads(1)
    if play == "connect":
        import_module("unrecorded_backends")
    backend = "mpi4py" if mpi else "late" if play == "connect" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=600))
    globals()[f"play_{play}"](dist.get_rank())
    if dist.is_initialized():
        time.sleep(0.02)  # gloo of torch 2.7 may hang where its group ends right after a call
        dist.destroy_process_group()


def forked(folder: Path, play: str) -> bool:
    """Fork the ranks; True in a rank, False once all ranks are over."""
    port, children = placement.free_port(), []
    for rank in range(RANKS):
        if (child := os.fork()) == 0:
            here = {"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
            os.environ.update({k: str(v) for k, v in here.items()}, MASTER_ADDR="127.0.0.1")
            file = os.open(folder / f"{play}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 2)
            return True
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / f"{play}.codes").write_text(" ".join(map(str, codes)))
    return False


if __name__ == "__main__":
    if "OMPI_COMM_WORLD_RANK" in os.environ or forked(Path(sys.argv[1]), sys.argv[2]):
        main(sys.argv[2])
