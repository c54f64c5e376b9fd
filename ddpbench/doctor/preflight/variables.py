"""Checks of environment variables: those that ranks should share, and those that cost time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ddpbench.analysis.rank_setup import Setup, folded, merge_settings, odd
from ddpbench.records.schema import Finding

COMPARED = re.compile(
    r"(NCCL|RCCL|MSCCL|MSCCLPP|HSA|GLOO|TORCH|PYTORCH|OMP|KMP|MKL|OMPI_MCA|UCX|UCC|FI|MPICH)_|"
    r"(CUDA_DEVICE_MAX_CONNECTIONS|CUDA_MODULE_LOADING|NVIDIA_TF32_OVERRIDE|GPU_MAX_HW_QUEUES)$"
)
# May differ between ranks or hosts: devices, cores, where a rank writes.
OWN = re.compile(
    r".*_(IFNAME|NET_DEVICES|IB_HCA|HOSTID|FILE|DIR|HOME|PATH|AFFINITY|PLACES|LOGS|PREFIX|IFACE)$|"
    r"NCCL_DEBUG|.*_DUMP_|OMPI_MCA_(shmem|rmaps|hwloc)"
)
# These decide how the ranks of NCCL work together.
TOGETHER = re.compile(
    r"NCCL_(ALGO|PROTO|NTHREADS|BUFFSIZE|(MIN|MAX)_N?(CHANNELS|RINGS|CTAS)|NET|.*_(DIS|EN)ABLE|"
    r"CROSS_NIC|LL_THRESHOLD|TREE_THRESHOLD)$"
)


def same_variables(setup: Setup) -> Iterator[Finding]:
    """Compare the variables, and settings in NCCL's files, that change how collectives work."""
    everyone = [merge_settings(facts) for facts in setup.ranks]
    if setup.launcher == "torchrun":  # it sets this itself if there are several ranks on a host
        for own in everyone:
            if own.get("OMP_NUM_THREADS") == "1":
                del own["OMP_NUM_THREADS"]
    for name in sorted(set().union(*everyone)):
        groups = folded([own.get(name) or "not set" for own in everyone])
        if len(groups) == 1 or not COMPARED.match(name) or OWN.match(name):
            continue
        grave = setup.backend == "nccl" and TOGETHER.match(name)
        yield Finding(
            "error" if grave else "warning",
            "variable-differs",
            f"{name} is {setup.list_values(groups)}",
            f"set {name} to the same value on all ranks, or on none (mpirun -x {name}; srun passes "
            "its own environment on; with torchrun set it on every host)"
            + (": NCCL can hang or crash if ranks decide differently" if grave else ""),
            {**setup.place(odd(groups)), "variable": name},
        )


class Setting(NamedTuple):
    """A variable that costs time, mostly left over from debugging."""

    variable: str
    values: str  # a regular expression of the values that cost time
    cost: str
    severity: str = "warning"
    device: str | None = "cuda"  # on which it costs time; None: on every device


YES = "1|true|yes|on"
DRIVER = "each tensor is allocated by the driver, which waits for the GPU"
WAITED = "each collective is waited for by the CPU, so that nothing hides it"
HOST_MEMORY = "GPUs of a host send to each other through the host's memory"
NETWORK = "ranks of a host may send to each other through the network"
SPINNING = "threads that wait keep their cores busy, which the backend's threads may need"
MALLOC = "Python remembers where memory was asked for"
SETTINGS = (
    Setting("CUDA_LAUNCH_BLOCKING", YES, "each kernel is waited for"),
    Setting("PYTORCH_NO_CUDA_MEMORY_CACHING", "[^0].*", DRIVER),
    Setting("TORCH_NCCL_BLOCKING_WAIT", YES, WAITED),
    Setting("NCCL_DEBUG", "trace", "NCCL writes a line for each call"),
    Setting("NCCL_CHECK_POINTERS", "1", "NCCL checks the buffers of each call"),
    Setting("NCCL_P2P_DISABLE", "1", HOST_MEMORY, "note"),
    Setting("NCCL_SHM_DISABLE", "1", NETWORK, "note"),
    Setting("NCCL_IB_DISABLE", "1", "hosts send to each other over TCP", "note"),
    Setting("OMP_WAIT_POLICY", "active", SPINNING, "note", None),
    Setting("PYTHONDEVMODE", ".+", "Python checks its own work", "note", None),
    Setting("PYTHONMALLOC", ".*debug", "Python checks its memory", "note", None),
    Setting("PYTHONTRACEMALLOC", "[^0].*", MALLOC, "note", None),
)


def costly_settings(setup: Setup) -> Iterator[Finding]:
    """Find settings that cost time."""
    everyone = [merge_settings(facts) for facts in setup.ranks]
    for variable, costly, cost, severity, device in SETTINGS:
        values = [own.get(variable) or "" for own in everyone]
        costs = re.compile(costly, re.IGNORECASE).fullmatch
        ranks = [rank for rank, value in enumerate(values) if costs(value)]
        if ranks and device in (None, setup.device):
            yield Finding(
                severity,
                "debug-setting",
                f"{variable}={values[ranks[0]]} is set on {setup.who(ranks)}: {cost}",
                f"unset {variable} unless you need it",
                {**setup.place(ranks), "variable": variable},
            )
