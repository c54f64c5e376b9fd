"""Find what is wrong with this set-up: which rank, host or link, and what to do.

ddpbench doctor -n 4                               starts the ranks itself
torchrun --nproc-per-node 8 -m ddpbench.doctor
mpirun -n 4 python -m ddpbench.doctor --backend mpi
srun -n 4 python -m ddpbench.doctor --only preflight,links

Exit codes: 0 no finding as bad as --fail-on (default error; slow ranks and links are warnings),
1 such a finding, 2 the ranks cannot meet, 4 a wrong result, 5 a rank died, hung or missed a
deadline.
"""

from __future__ import annotations

from functools import partial

from ddpbench.doctor import command as doctor
from ddpbench.session import launches

GROUP = "diagnose"
HELP = "find what is wrong with this set-up: which rank, host or link, and what to do"
IMPORTS = True
add_arguments = doctor.add_arguments
run = partial(launches.run, doctor.Options, doctor.measure_launch)
