"""Measure what every collective costs: a sweep of operations × sizes × dtypes × backends.

ddpbench collectives --backend gloo,mpi -n 2      starts the ranks itself
torchrun --nproc-per-node 4 -m ddpbench.collectives --op all_reduce --sizes 4:64M:x4
mpirun -n 4 python -m ddpbench.collectives --backend mpi
srun -n 4 python -m ddpbench.collectives
srun -N 2 -n 8 python -m ddpbench.collectives --groups host,cross,world
"""

from __future__ import annotations

from functools import partial

from ddpbench import collectives
from ddpbench.session import launch_order

GROUP = "measure"
HELP = "measure what every collective costs, over backends, sizes and dtypes"
IMPORTS = True
add_arguments = collectives.add_arguments
run = partial(launch_order.run, collectives.Options, collectives.measure_launch)
