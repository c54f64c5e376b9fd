"""The old name of ddpbench.mpi."""

import warnings

from ddpbench.mpi import NAME, ProcessGroupMPI4PY, register

__all__ = ["NAME", "ProcessGroupMPI4PY", "register"]

warnings.warn(
    "ddpbench.runtime.mpi is now ddpbench.mpi: write `import ddpbench.mpi`",
    DeprecationWarning,
    stacklevel=2,
)
