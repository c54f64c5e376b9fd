"""Measure where the time of a DDP step goes, and prove after each step that all replicas are equal.

ddpbench ddp --backend gloo,mpi -n 2              starts the ranks itself
torchrun --nproc-per-node 4 -m ddpbench.ddp --workload transformer --layers 4 --width 256
mpirun -n 4 python -m ddpbench.ddp --backend mpi
srun -n 4 python -m ddpbench.ddp --workload mypackage.model:build
"""

from __future__ import annotations

from functools import partial

from ddpbench import ddp
from ddpbench.session import launch_order

GROUP = "measure"
HELP = "measure where the time of a DDP step goes; prove the replicas equal after each step"
IMPORTS = True
add_arguments = ddp.add_arguments
run = partial(launch_order.run, ddp.Options, ddp.measure_launch)
