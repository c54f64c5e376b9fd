"""The checks of preflight. Each is an entry of a table: add one, and the doctor makes the check.

| to check                                    | add an entry to |
| ------------------------------------------- | --------------- |
| any condition on the facts of a rank        | CHECKS          |
| that all ranks have the same value          | SAME            |
| that a variable does not slow training down | COSTLY          |

Facts have the names that runtime/environment.py, measure.py and `describe_facts` below give them.
Test a new check with an entry of WRONG in tests/doctor/test_preflight.py. The checks that every
command makes, such as those of versions, are in analysis/findings.py.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddpbench.analysis.rank_setup import Setup, cpus, crowded, folded, merge_settings, odd
from ddpbench.records.schema import Finding
from ddpbench.records.wording import spans

MIB, GIB = 2**20, 2**30
LEAST_MEMORY_NBYTES = 256 * MIB  # free, per rank
LEAST_SHM_NBYTES = 128 * MIB  # free, per rank
LEAST_LOCKED_NBYTES = GIB
# Of a GPU's memory, before the measurement. The rank itself has a context and buffers there.
IN_USE_SHARE, OWN_NBYTES = 0.2, 2 * GIB


@dataclass(frozen=True)
class Check:
    """A condition on the facts of a rank, and what to report if it is true.

    is_wrong: its parameters are names of facts. Ranks that do not know one of them are not checked.
    by: ranks with the same value of this fact share a finding ("rank": one finding per rank,
    "world": one for all).
    sentence, next_step: templates of the facts of the first of these ranks, and of `who` they are.
    """

    code: str
    is_wrong: Callable[..., object]
    by: str
    sentence: str
    next_step: str
    severity: str = "warning"
    severity_on_cpus: str | None = None  # if it differs


CHECKS = [
    Check(
        "narrow-affinity",
        # A crowded host is reported as oversubscribed.
        lambda threads, core_count, is_crowded: threads > core_count and not is_crowded,
        "hostname",
        "{who} has {threads} compute threads but only these cores: {cores}",
        "bind it to as many cores as it has threads, or set OMP_NUM_THREADS={core_count}",
    ),
    Check(
        "far-gpu",
        lambda gpu_numa_node, numa_nodes: gpu_numa_node not in cpus(numa_nodes),
        "rank",
        "{who} is bound to cores of NUMA node {numa_nodes}, but its GPU {gpu_index} is at node "
        "{gpu_numa_node}: its copies cross NUMA nodes",
        "bind it to cores of node {gpu_numa_node} (numactl --cpunodebind={gpu_numa_node}), or give "
        "it a GPU near its cores",
    ),
    Check(
        "narrow-pcie",
        lambda gpu_pcie: gpu_pcie["width"] < gpu_pcie["width_allowed"],
        "rank",
        "the PCIe link of the GPU of {who} runs at x{gpu_pcie[width]:g} instead of "
        "x{gpu_pcie[width_allowed]:g}",
        "compare LnkCap and LnkSta in lspci -vvs {gpu_bus}, then reseat the GPU and its riser",
    ),
    Check(
        "gpu-memory-errors",
        lambda gpu_memory_errors: gpu_memory_errors,
        "rank",
        "the memory of the GPU of {who} has had {gpu_memory_errors} uncorrectable ECC errors since "
        "the driver was loaded",
        "look at nvidia-smi -q -d ECC,ROW_REMAPPER, then reset or replace the GPU",
    ),
    Check(
        "gpu-in-use",
        lambda gpu_used_nbytes, gpu_nbytes, ranks_of_gpu: (
            ranks_of_gpu == 1 and gpu_used_nbytes > max(IN_USE_SHARE * gpu_nbytes, OWN_NBYTES)
        ),
        "rank",
        "{gpu_used} of {gpu} of the GPU of {who} are in use before the measurement",
        "find the process with nvidia-smi, and end it",
    ),
    Check(
        "memlock",
        # RDMA locks its buffers; gloo's TCP locks none.
        lambda ulimit_memlock_nbytes, rdma_devices, backend, may_lock_memory: (
            0 <= ulimit_memlock_nbytes < LEAST_LOCKED_NBYTES
            and (rdma_devices and backend != "gloo" and not may_lock_memory)
        ),
        "world",
        "{who} may lock {ulimit_memlock} of memory, but RDMA ({rdma_devices[0]}) locks its buffers",
        "ulimit -l unlimited (containers: --ulimit memlock=-1; Slurm: LimitMEMLOCK=infinity for "
        "slurmd)",
    ),
    Check(
        "small-shm",
        lambda shm_free_nbytes, ranks_of_host: shm_free_nbytes < LEAST_SHM_NBYTES * ranks_of_host,
        "hostname",
        "/dev/shm of {hostname} has {shm_free} free (ranks there: {ranks_of_host}): NCCL and the "
        "workers of data loaders exchange data there, and fail when it is full",
        "give the container more (docker run --shm-size=8g, --ipc=host), or delete files in it",
        severity_on_cpus="note",
    ),
    Check(
        "low-memory",
        lambda free_memory_nbytes, ranks_of_host: (
            free_memory_nbytes < LEAST_MEMORY_NBYTES * ranks_of_host
        ),
        "hostname",
        "{hostname} has {free_memory} of memory free (ranks there: {ranks_of_host}): the kernel "
        "may kill one of them",
        "find out with top -o RES what uses it; the limit of a control group counts too",
    ),
]


def _find_wrong(setup: Setup, everyone: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    for check in CHECKS:
        groups: dict[object, list[int]] = {}
        names = inspect.signature(check.is_wrong).parameters
        for rank, facts in enumerate(everyone):
            values = [facts.get(name) for name in names]
            if None not in values and check.is_wrong(*values):
                groups.setdefault(facts.get(check.by), []).append(rank)
        on_cpus = check.severity_on_cpus if setup.device == "cpu" else None
        for ranks in groups.values():
            named = defaultdict(lambda: None, everyone[ranks[0]], who=setup.who(ranks))
            yield Finding(
                on_cpus or check.severity,
                check.code,
                check.sentence.format_map(named),
                check.next_step.format_map(named),
                setup.place(ranks),
            )


# --- facts that all ranks should share ------------------------------------------------------------


class Same(NamedTuple):
    """A fact that all ranks should share. Ranks that do not know it are not compared."""

    fact: str
    words: str
    severity: str
    code: str
    next_step: str


IMAGE = "use one image, or one module, on all hosts"
UNEVEN = "expect the ranks to differ in speed: the slowest sets the pace of a step"
NVLINK = "find the link that is down with nvidia-smi nvlink -s, or expect these ranks to be slower"
MTU = "give all interfaces and switches the same MTU (ip link set DEV mtu N)"
SPEED = (
    "choose equal interfaces (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or find out why the link "
    "came up slower (ethtool DEV)"
)
SAME = (
    Same("library", "the backend is", "warning", "mixed-versions", IMAGE),
    Same("driver", "the GPU driver is", "warning", "mixed-versions", IMAGE),
    Same("nccl_plugins", "the list of NCCL's plug-ins is", "warning", "mixed-versions", IMAGE),
    Same("gpu_name", "the GPU is", "note", "mixed-hardware", UNEVEN),
    Same("gpu_nvlinks_active", "the number of active NVLinks is", "warning", "mixed-links", NVLINK),
    Same("cpu_model", "the CPU is", "note", "mixed-hardware", UNEVEN),
    Same("cores_logical", "the number of cores is", "note", "mixed-hardware", UNEVEN),
    Same("smt", "SMT (two threads per core) is", "note", "mixed-hardware", UNEVEN),
    Same("governor", "the CPU governor is", "note", "mixed-systems", UNEVEN),
    Same("kernel", "the kernel is Linux", "note", "mixed-systems", IMAGE),
    Same("transparent_huge_pages", "huge pages are", "note", "mixed-systems", UNEVEN),
    Same("mtu", "the MTU between hosts is", "warning", "interface-differs", MTU),
    Same("speed", "the nominal speed between hosts is", "warning", "interface-differs", SPEED),
)


def _find_differing_facts(setup: Setup, everyone: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    # Reported already; the library follows torch.
    mixed_torch = len(folded(setup.values("torch"))) > 1
    for fact, words, severity, code, next_step in SAME:
        groups = folded([facts.get(fact) for facts in everyone])
        groups = [group for group in groups if group[0] is not None]
        if len(groups) > 1 and not (mixed_torch and fact == "library"):
            place = setup.place(odd(groups))
            yield Finding(severity, code, f"{words} {setup.list_values(groups)}", next_step, place)


# --- variables ------------------------------------------------------------------------------------

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


def _find_differing_variables(setup: Setup) -> Iterator[Finding]:
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
        can_hang = setup.backend == "nccl" and TOGETHER.match(name)
        yield Finding(
            "error" if can_hang else "warning",
            "variable-differs",
            f"{name} is {setup.list_values(groups)}"
            + (": NCCL can hang or crash if ranks decide differently" if can_hang else ""),
            f"set {name} to the same value on all ranks, or on none (mpirun -x {name}; srun passes "
            "its own environment on; with torchrun set it on every host)",
            {**setup.place(odd(groups)), "variable": name},
        )


class Costly(NamedTuple):
    """A variable that slows training down, mostly left over from debugging."""

    variable: str
    values: str  # a regular expression of the values that slow it down
    effect: str
    severity: str = "warning"
    device: str | None = "cuda"  # on which it has that effect; None: on every device


YES = "1|true|yes|on"
DRIVER = "each tensor is allocated by the driver, which waits for the GPU"
BLOCKING = "the CPU waits for each collective, so computation cannot hide it"
HOST_MEMORY = "GPUs of a host send to each other through the host's memory"
NETWORK = "ranks of a host may send to each other through the network"
SPINNING = "waiting threads keep cores busy that the backend's threads may need"
COSTLY = (
    Costly("CUDA_LAUNCH_BLOCKING", YES, "the CPU waits for each kernel"),
    Costly("PYTORCH_NO_CUDA_MEMORY_CACHING", "[^0].*", DRIVER),
    Costly("TORCH_NCCL_BLOCKING_WAIT", YES, BLOCKING),
    Costly("NCCL_DEBUG", "trace", "NCCL writes a line for each call"),
    Costly("NCCL_CHECK_POINTERS", "1", "NCCL checks the buffers of each call"),
    Costly("NCCL_P2P_DISABLE", "1", HOST_MEMORY, "note"),
    Costly("NCCL_SHM_DISABLE", "1", NETWORK, "note"),
    Costly("NCCL_IB_DISABLE", "1", "hosts send to each other over TCP", "note"),
    Costly("OMP_WAIT_POLICY", "active", SPINNING, "note", None),
    Costly("PYTHONDEVMODE", ".+", "Python runs extra checks", "note", None),
    Costly("PYTHONMALLOC", ".*debug", "Python checks its memory", "note", None),
    Costly("PYTHONTRACEMALLOC", "[^0].*", "Python records each allocation", "note", None),
)


def _find_costly_variables(setup: Setup) -> Iterator[Finding]:
    everyone = [merge_settings(facts) for facts in setup.ranks]
    for variable, costly, effect, severity, device in COSTLY:
        values = [own.get(variable) or "" for own in everyone]
        is_costly = re.compile(costly, re.IGNORECASE).fullmatch
        ranks = [rank for rank, value in enumerate(values) if is_costly(value)]
        if ranks and device in (None, setup.device):
            yield Finding(
                severity,
                "debug-setting",
                f"{variable}={values[ranks[0]]} is set on {setup.who(ranks)}: {effect}",
                f"unset {variable} unless you need it",
                {**setup.place(ranks), "variable": variable},
            )


# --- all of them ----------------------------------------------------------------------------------


def find_all(setup: Setup) -> tuple[Finding, ...]:
    """Return a finding for everything that differs or is wrong."""
    everyone = describe_facts(setup)
    return (
        *_find_differing_facts(setup, everyone),
        *_find_differing_variables(setup),
        *_find_costly_variables(setup),
        *_find_wrong(setup, everyone),
    )


def describe_facts(setup: Setup) -> list[dict[str, Any]]:
    """Return the facts of each rank and its host, and those that follow from all of them.

    Each size NAME_nbytes is also in NAME as text.
    """
    gpus = Counter(setup.values("gpu_uuid"))
    everyone = [{**own, "backend": setup.backend} for own in setup.everyone()]
    for ranks in setup.hosts:
        mates = [everyone[rank] for rank in ranks]
        shared = {"ranks_of_host": len(mates), "is_crowded": any(crowded(mates))}
        for own in mates:
            cores = cpus(own.get("cpuset"))
            own |= {**shared, "cores": spans(list(cores)), "core_count": len(cores) or None}
    for own in everyone:
        whole, free = own.get("gpu_nbytes"), own.get("gpu_free_nbytes")
        if own.get("gpu_uuid") and whole is not None and free is not None:
            own |= {"ranks_of_gpu": gpus[own["gpu_uuid"]], "gpu_used_nbytes": whole - free}
        interface = own.get("interface") or {}
        own["interface_name"] = interface.get("name")
        if own.get("addresses"):
            speed = interface.get("nominal_bytes_per_second")
            own["mtu"] = interface.get("mtu_nbytes")
            own["speed"] = f"{speed * 8e-9:g} Gbit/s" if speed else None
        sizes = [name for name in own if name.endswith("_nbytes")]
        own |= {name.removesuffix("_nbytes"): _format_nbytes(own[name]) for name in sizes}
    return everyone


def _format_nbytes(nbytes: int | None) -> str | None:
    """Format a size. From 10 GiB on, almost equal sizes have the same text."""
    if nbytes is None:
        return None
    if nbytes < 0:
        return "unlimited"
    if nbytes < MIB:
        return f"{nbytes / 2**10:.0f} KiB"
    if nbytes < GIB:
        return f"{nbytes / MIB:.0f} MiB"
    return f"{nbytes / GIB:.{0 if nbytes >= 10 * GIB else 1}f} GiB"
