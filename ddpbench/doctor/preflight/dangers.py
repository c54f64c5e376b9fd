"""Settings of a rank that cost time or may fail: variables, cores, GPUs, limits, memory.

One entry of SETTINGS adds a setting that costs.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddpbench.analysis.rank_setup import Setup, cpus, crowded, folded, merge_settings
from ddpbench.records.schema import Finding
from ddpbench.records.wording import counted

MIB, GIB = 2**20, 2**30
LEAST_MEMORY_NBYTES = 256 * MIB  # free, for each rank
MUCH_LESS = 0.25  # of the memory that hosts usually have free
LEAST_SHM_NBYTES = 128 * MIB  # free, for each rank
LEAST_LOCKED_NBYTES = GIB
# Open files of a rank: Python and its libraries; for each other rank, two groups and the store.
FILES, FILES_A_RANK = 100, 4
# Of a GPU's memory, before anything is measured. The rank itself has a context and buffers there.
IN_USE_SHARE, OWN_NBYTES = 0.2, 2 * GIB


@dataclass(frozen=True)
class Setting:
    """A setting that costs time, mostly left over from debugging."""

    variable: str
    values: str  # a regular expression of the values that cost time
    cost: str
    severity: str = "warning"
    device: str | None = "cuda"  # on which it costs time; None: on every device


YES = "1|true|yes|on"
SETTINGS = (
    Setting("CUDA_LAUNCH_BLOCKING", YES, "each kernel is waited for"),
    Setting(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "[^0].*",
        "each tensor is allocated by the driver, which waits for the GPU",
    ),
    Setting(
        "TORCH_NCCL_BLOCKING_WAIT",
        YES,
        "each collective is waited for by the CPU, so that nothing hides it",
    ),
    Setting("NCCL_DEBUG", "trace", "NCCL writes a line for each call"),
    Setting("NCCL_CHECK_POINTERS", "1", "NCCL checks the buffers of each call"),
    Setting(
        "NCCL_P2P_DISABLE",
        "1",
        "GPUs of a host send to each other through the host's memory",
        "note",
    ),
    Setting(
        "NCCL_SHM_DISABLE",
        "1",
        "ranks of a host may send to each other through the network",
        "note",
    ),
    Setting("NCCL_IB_DISABLE", "1", "hosts send to each other over TCP", "note"),
    Setting(
        "OMP_WAIT_POLICY",
        "active",
        "threads that wait keep their cores busy, which the backend's threads may need",
        "note",
        None,
    ),
    Setting("PYTHONDEVMODE", ".+", "Python checks its own work", "note", None),
    Setting("PYTHONMALLOC", ".*debug", "Python checks its memory", "note", None),
    Setting(
        "PYTHONTRACEMALLOC", "[^0].*", "Python remembers where memory was asked for", "note", None
    ),
)


def costly_settings(setup: Setup) -> Iterator[Finding]:
    """Find settings that cost time."""
    everyone = [merge_settings(facts) for facts in setup.ranks]
    for setting in SETTINGS:
        values = [own.get(setting.variable) or "" for own in everyone]
        costs = re.compile(setting.values, re.IGNORECASE).fullmatch
        ranks = [rank for rank, value in enumerate(values) if costs(value)]
        if ranks and setting.device in (None, setup.device):
            yield Finding(
                setting.severity,
                "debug-setting",
                f"{setting.variable}={values[ranks[0]]} is set on {setup.who(ranks)}: "
                f"{setting.cost}",
                f"unset {setting.variable} unless you need it",
                {**setup.place(ranks), "variable": setting.variable},
            )


def debug_builds(setup: Setup) -> Iterator[Finding]:
    """Find debug builds of Python or torch."""
    for kinds, ranks in folded(setup.values("debug_builds")):
        if not kinds:
            continue
        yield Finding(
            "warning",
            "debug-build",
            f"{' and '.join(kinds)} on {setup.who(ranks)} is a debug build, which is slow",
            "install the release build",
            setup.place(ranks),
        )


# --- cores ----------------------------------------------------------------------------------------


def bound_cores(setup: Setup) -> Iterator[Finding]:
    """Find ranks bound to the same cores while other cores are bound to no rank.

    If all ranks of a host are bound to the same cores, that may be intended.
    """
    for host, ranks, _ in setup.of_hosts():
        sets = {rank: cpus(setup.ranks[rank].get("cpuset")) for rank in ranks}
        allowed = cpus(setup.ranks[ranks[0]].get("allowed_cpus"))
        free = sorted(allowed.difference(*sets.values()))
        groups: dict[frozenset[int], list[int]] = {}
        for rank in ranks:
            groups.setdefault(sets[rank], []).append(rank)
        for cores, mates in groups.items():
            threads = sum(setup.ranks[rank].get("threads") or 1 for rank in mates)
            if free and cores and 1 < len(mates) < len(ranks) and threads > len(cores):
                yield Finding(
                    "warning",
                    "shared-cores",
                    f"{setup.who(mates)}, with {threads} compute threads in all, are bound to the "
                    f"same {_cores(cores)}, while {_cores(free)} of {host} "
                    f"{'are' if len(free) > 1 else 'is'} bound to no rank",
                    "give each rank cores of its own (mpirun --bind-to core, srun "
                    "--cpu-bind=cores, taskset), or bind none",
                    setup.place(mates),
                )


def _cores(cores: Sequence[int] | frozenset[int]) -> str:
    found = sorted(cores)
    runs = f"{found[0]}-{found[-1]}" if found[-1] - found[0] == len(found) - 1 else None
    shown = ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "")
    return f"core {found[0]}" if len(found) == 1 else f"cores {runs or shown}"


def narrow_affinity(setup: Setup) -> Iterator[Finding]:
    """Find ranks with more threads than cores on a host that has enough cores."""
    full = {crowd.host for crowd in crowded(setup.ranks)}  # reported as oversubscribed
    for host, ranks, _ in setup.of_hosts():
        sets = {rank: cpus(setup.ranks[rank].get("cpuset")) for rank in ranks}
        threads = {rank: setup.ranks[rank].get("threads") or 1 for rank in ranks}
        narrow = [rank for rank in ranks if sets[rank] and threads[rank] > len(sets[rank])]
        if narrow and host not in full:
            first = narrow[0]
            yield Finding(
                "warning",
                "narrow-affinity",
                f"{setup.who(narrow)} may use {_cores(sets[first])} only, for {threads[first]} "
                "compute threads",
                f"bind it to as many cores as it has threads, or set "
                f"OMP_NUM_THREADS={len(sets[first])}",
                setup.place(narrow),
            )


# --- GPUs -----------------------------------------------------------------------------------------


def far_gpu(setup: Setup) -> Iterator[Finding]:
    """Find ranks bound to another NUMA node than their GPU."""
    for rank, its in enumerate(setup.ranks):
        node, own = its.get("gpu_numa_node"), cpus(its.get("numa_nodes"))
        if node is not None and own and node not in own:
            yield Finding(
                "warning",
                "far-gpu",
                f"{setup.who([rank])} is bound to cores of NUMA node {its.get('numa_nodes')}, its "
                f"GPU {its.get('gpu_index')} is at node {node}: what it copies crosses the sockets",
                f"bind it to cores of node {node} (numactl --cpunodebind={node}), or give it a GPU "
                "near its cores",
                setup.place([rank]),
            )


def narrow_slot(setup: Setup) -> Iterator[Finding]:
    """Find GPUs whose PCIe link has fewer lanes than the GPU and its slot allow."""
    for rank, facts in enumerate(setup.ranks):
        link = facts.get("gpu_pcie") or {"width": 0, "width_allowed": 0}
        if link["width"] < link["width_allowed"]:
            yield Finding(
                "warning",
                "narrow-pcie",
                f"the PCIe link of the GPU of {setup.who([rank])} runs at x{link['width']:g} of "
                f"x{link['width_allowed']:g}: it carries less than the GPU and its slot allow",
                f"compare LnkCap and LnkSta in lspci -vvs {facts.get('gpu_bus')}, then reseat the "
                "GPU and its riser",
                setup.place([rank]),
            )


def memory_errors(setup: Setup) -> Iterator[Finding]:
    """Find GPUs that have lost data: errors of their memory that could not be corrected."""
    for rank, facts in enumerate(setup.ranks):
        count = facts.get("gpu_memory_errors") or 0
        if count:
            yield Finding(
                "warning",
                "gpu-memory-errors",
                f"the memory of the GPU of {setup.who([rank])} has had "
                f"{counted(count, 'error')} that ECC could not correct since the driver was loaded",
                "look at nvidia-smi -q -d ECC,ROW_REMAPPER, then reset or replace the GPU",
                setup.place([rank]),
            )


def gpu_in_use(setup: Setup) -> Iterator[Finding]:
    """Find GPUs whose memory is in use, and GPUs that ranks share."""
    for uuid, ranks in folded(setup.values("gpu_uuid")):
        whole, free = (setup.ranks[ranks[0]].get(f"gpu_{n}") for n in ("nbytes", "free_nbytes"))
        if uuid is None or whole is None or free is None:
            continue
        if len(ranks) > 1:
            yield Finding(
                "note",
                "shared-gpu",
                f"{setup.who(ranks)} share one GPU, as --share-gpu allows: times contain waiting",
                "start one rank a GPU to measure",
                setup.place(ranks),
            )
        elif whole - free > max(IN_USE_SHARE * whole, OWN_NBYTES):
            yield Finding(
                "warning",
                "gpu-in-use",
                f"{(whole - free) / GIB:.1f} of {whole / GIB:.1f} GiB of the GPU of "
                f"{setup.who(ranks)} are taken before anything is measured",
                "find the process with nvidia-smi, and end it",
                setup.place(ranks),
            )


# --- limits ---------------------------------------------------------------------------------------


def locked_memory(setup: Setup) -> Iterator[Finding]:
    """Find limits too low for RDMA, which locks its buffers; gloo's TCP locks none."""

    def low(its: Any) -> bool:
        limit = its.get("ulimit_memlock_nbytes")
        known = limit is not None and bool(its.get("rdma_devices"))
        return known and 0 <= limit < LEAST_LOCKED_NBYTES and not its.get("may_lock_memory")

    ranks = setup.where(low) if setup.backend != "gloo" else []
    if ranks:
        limit = setup.ranks[ranks[0]]["ulimit_memlock_nbytes"]
        yield Finding(
            "warning",
            "memlock",
            f"{setup.who(ranks)} may lock {limit // 1024} KiB of memory, and RDMA "
            f"({', '.join(setup.ranks[ranks[0]]['rdma_devices'][:2])}) locks its buffers",
            "ulimit -l unlimited (containers: --ulimit memlock=-1; Slurm: LimitMEMLOCK=infinity "
            "for slurmd)",
            setup.place(ranks),
        )


def open_files(setup: Setup) -> Iterator[Finding]:
    """Find ranks that may open fewer files than a world of this size needs."""
    needed = FILES + FILES_A_RANK * len(setup.ranks)
    ranks = setup.where(lambda its: 0 <= its.get("ulimit_open_files", -1) < needed)
    if ranks:
        yield Finding(
            "warning",
            "open-files",
            f"{setup.who(ranks)} may open {setup.ranks[ranks[0]]['ulimit_open_files']} files, and "
            f"connections between {len(setup.ranks)} ranks alone can need about {needed}",
            "raise it with ulimit -n, for data loaders as well: 65536 is usual",
            setup.place(ranks),
        )


def shared_memory(setup: Setup) -> Iterator[Finding]:
    """Find hosts with little free space in /dev/shm."""
    for host, ranks, _ in setup.of_hosts():
        free = setup.ranks[ranks[0]].get("shm_free_nbytes")
        if free is not None and free < LEAST_SHM_NBYTES * len(ranks):
            yield Finding(
                "warning" if setup.device == "cuda" else "note",
                "small-shm",
                f"/dev/shm of {host} has {free / MIB:.0f} MiB free for {len(ranks)} ranks: NCCL "
                "and the workers of data loaders exchange data there, and fail when it is full",
                "give the container more (docker run --shm-size=8g, --ipc=host), or remove what "
                "lies there",
                setup.place(ranks),
            )


def free_memory(setup: Setup) -> Iterator[Finding]:
    """Find hosts with little free memory, or with much less than the others."""
    free = {
        ranks[0]: setup.ranks[ranks[0]].get("free_memory_nbytes")
        for _, ranks, _ in setup.of_hosts()
    }
    known = [nbytes for nbytes in free.values() if nbytes is not None]
    usual = statistics.median(known) if known else 0
    for host, ranks, _ in setup.of_hosts():
        nbytes = free[ranks[0]]
        if nbytes is None:
            continue
        memory = f"{host} has {nbytes / GIB:.1f} GiB of memory free for {len(ranks)} ranks"
        if nbytes < LEAST_MEMORY_NBYTES * len(ranks):
            yield Finding(
                "warning",
                "low-memory",
                f"{memory}: the kernel may kill one of them",
                "find out with top -o RES what uses it; the limit of a control group counts too",
                setup.place(ranks),
            )
        elif nbytes < MUCH_LESS * usual:
            yield Finding(
                "note",
                "low-memory",
                f"{memory}, hosts usually {usual / GIB:.1f} GiB",
                "find out with top -o RES whether an earlier job left something there",
                setup.place(ranks),
            )
