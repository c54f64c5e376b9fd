"""Run a loop as a user would write it; overhead.py compares ddpbench with it.

    RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python bare.py gloo OUT SEED SECONDS BYTES …
    mpirun -n 2 python bare.py mpi OUT SEED SECONDS BYTES …

Only the process group over mpi4py is ddpbench's. Stores the stamps of each start and size as
int64[repetition, 2] in OUT.RANK.npz.
"""

import random
import sys
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

WARM_UP = 20


def repeat(tensor: torch.Tensor, start: str, count: int) -> list[tuple[int, int]]:
    """Return entry and exit of each call, in ns."""
    stamps = []
    for _ in range(count):
        if start == "barrier":
            dist.barrier()
        began = perf_counter_ns()
        dist.all_reduce(tensor)
        stamps.append((began, perf_counter_ns()))
    return stamps


def main(backend: str, out: str, seed: str, seconds: str, *sizes: str) -> None:
    """Run one rank."""
    if backend == "mpi":
        import ddpbench.mpi  # noqa: F401  makes the name known
    dist.init_process_group("mpi4py" if backend == "mpi" else backend)
    cases = [(start, int(nbytes)) for start in ("barrier", "none") for nbytes in sizes]
    random.Random(int(seed)).shuffle(cases)
    stamps: dict[str, Any] = {}
    for start, nbytes in cases:
        tensor = torch.zeros(nbytes // 4)
        warm = repeat(tensor, start, WARM_UP)
        each = (warm[-1][1] - warm[4][1]) / (WARM_UP - 5) * 1e-9
        count = torch.tensor([min(5000, max(6, int(float(seconds) / each)))])
        dist.broadcast(count, 0)
        stamps[f"{start}/{nbytes}"] = np.array(repeat(tensor, start, int(count)))
    np.savez(f"{out}.{dist.get_rank()}.npz", **stamps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
