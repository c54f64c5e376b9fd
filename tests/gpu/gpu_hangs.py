"""Users' scripts that hang under ddpbench's watchdog: `gpu_hangs.py PLAY DEVICE BACKEND`.

Each of two ranks runs it with RANK, LOCAL_RANK and torch's other variables. Rank 1 does not do its
part.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import ddpbench
from ddpbench.runtime import devices


def load_batch() -> None:
    """Keep this rank from its next collective."""
    time.sleep(30)


def step(device: torch.device, count: int = 1024) -> None:
    """Run one collective to its end."""
    dist.all_reduce(torch.zeros(count, device=device))
    devices.of(device).synchronize(device)


def play_late(rank: int, device: torch.device) -> None:
    """Rank 1 does not reach DDP(), in which nccl makes its communicator."""
    model = torch.nn.Linear(8, 8).to(device)
    if rank == 1:
        load_batch()
    ids = devices.of(device).ddp_device_ids(device)
    torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
    devices.of(device).synchronize(device)


def play_skipped(rank: int, device: torch.device) -> None:
    """Rank 1 skips one all_reduce."""
    for number in range(6):
        if rank == 0 or number != 4:
            step(device)
        dist.broadcast(torch.zeros(5, device=device), 0)
        devices.of(device).synchronize(device)
    load_batch()


def play_stopped(rank: int, device: torch.device) -> None:
    """Rank 1 is stopped between two collectives."""
    for _ in range(3):
        step(device)
    if rank == 1:
        time.sleep(1.5)  # its heartbeat shows the others its line
        os.kill(os.getpid(), signal.SIGSTOP)
    step(device)


def main(play: str, kind: str, backend: str) -> None:
    """One rank."""
    index = int(os.environ["LOCAL_RANK"]) % devices.get(kind).count()
    device = devices.get(kind).select(index)
    dist.init_process_group(backend, timeout=timedelta(seconds=600))
    ddpbench.watchdog(timeout=10.0)
    globals()[f"play_{play}"](dist.get_rank(), device)


if __name__ == "__main__":
    main(*sys.argv[1:])
