"""MPI as a backend of torch.distributed, on a stock torch wheel, for any script:

    import torch.distributed as dist
    import ddpbench.mpi

    dist.init_process_group("mpi4py")

    mpirun -n 4 python script.py      or, if MPI supports Slurm, srun -n 4 python …

The import registers the backend. In a rank that MPI's launcher started, it also starts MPI and sets
RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in the environment, as torchrun does. It
keeps an address or port that is already set. `dist.new_group(backend="mpi4py")` also works with
another default group. Raises RuntimeError if the launcher and MPI have different numbers of ranks.
"""

from __future__ import annotations

import os

from ddpbench.launch.placement import read_placement
from ddpbench.mpi_backend import library as mpi_library
from ddpbench.mpi_backend.group import NAME, ProcessGroupMPI4PY, register

__all__ = ["NAME", "ProcessGroupMPI4PY", "register"]


def _broadcast_environment() -> None:
    placement = read_placement()
    if placement is None or placement.launcher == "torchrun":
        return
    rank, size = mpi_library.world()
    if size != placement.world_size:
        raise RuntimeError(
            f"{placement.launcher} started {placement.world_size} ranks, but MPI has a world of "
            f"{size}: use the mpirun of {mpi_library.library()}, or srun --mpi=pmix (Open MPI) or "
            "srun --mpi=pmi2 (MPICH)"
        )
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(placement.local_rank),
    }
    os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = mpi_library.broadcast_meeting_point(
        placement.local_world_size == size,
        os.environ.get("MASTER_ADDR"),
        os.environ.get("MASTER_PORT"),
    ).rpartition(":")


register()
_broadcast_environment()
