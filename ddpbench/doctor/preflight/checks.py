"""The checks of preflight, as tables: what is compared or looked at, a sentence, and a next step.

To add a check, add an entry: to SAME for a fact that all ranks should share, to SETTINGS of
variables.py for a variable that costs time, to CHECKS for anything else about a rank or host.
analysis/findings.py has the checks that every command needs, such as those of versions.
"""

from __future__ import annotations

import inspect
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddpbench.analysis.rank_setup import Setup, cpus, crowded, folded, odd
from ddpbench.doctor.preflight.variables import costly_settings, same_variables
from ddpbench.records.schema import Finding
from ddpbench.records.wording import counted

UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30}
MIB, GIB = UNITS["mib"], UNITS["gib"]
LEAST_MEMORY_NBYTES = 256 * MIB  # free, for each rank
MUCH_LESS = 0.25  # of the memory that hosts usually have free
LEAST_SHM_NBYTES = 128 * MIB  # free, for each rank
LEAST_LOCKED_NBYTES = GIB
# Open files of a rank: Python and its libraries; for each other rank, two groups and the store.
FILES, FILES_A_RANK = 100, 4
# Of a GPU's memory, before anything is measured. The rank itself has a context and buffers there.
IN_USE_SHARE, OWN_NBYTES = 0.2, 2 * GIB
APART_SECONDS = 1.0  # of two clocks

# --- facts that all ranks should share ------------------------------------------------------------


class Same(NamedTuple):
    """A fact that all ranks should share."""

    fact: str
    words: str
    severity: str
    code: str
    next_step: str


IMAGE = "use one image, or one module, on all hosts"
UNEVEN = "expect the ranks to differ in speed: the slowest sets the pace of a step"
NVLINK = "find the link that is down with nvidia-smi nvlink -s, or expect these ranks to be slower"
ECC = "set it alike on all GPUs, for example nvidia-smi -e 1, and reset them"
SAME = (
    Same("library", "the backend is", "warning", "mixed-versions", IMAGE),
    Same("driver", "the GPU driver is", "warning", "mixed-versions", IMAGE),
    Same("nccl_plugins", "the list of NCCL's plug-ins is", "warning", "mixed-versions", IMAGE),
    Same("gpu_name", "the GPU is", "note", "mixed-hardware", UNEVEN),
    Same("gpu_nvlinks_active", "the number of active NVLinks is", "warning", "mixed-links", NVLINK),
    Same("gpu_ecc", "ECC of the GPU is", "note", "mixed-hardware", ECC),
    Same("cpu_model", "the CPU is", "note", "mixed-hardware", UNEVEN),
    Same("cores_logical", "the number of cores is", "note", "mixed-hardware", UNEVEN),
    Same("smt", "SMT (two threads a core) is", "note", "mixed-hardware", UNEVEN),
    Same("governor", "the CPU governor is", "note", "mixed-systems", UNEVEN),
    Same("kernel", "the kernel is Linux", "note", "mixed-systems", IMAGE),
    Same("container", "the container is", "note", "mixed-systems", IMAGE),
    Same("transparent_huge_pages", "huge pages are", "note", "mixed-systems", UNEVEN),
)


def same_facts(setup: Setup) -> Iterator[Finding]:
    """Compare the facts of SAME."""
    # Reported already; the library follows torch.
    mixed_torch = len(folded(setup.values("torch"))) > 1
    for fact, words, severity, code, next_step in SAME:
        groups = folded(setup.values(fact))
        if len(groups) > 1 and not (mixed_torch and fact == "library"):
            place = setup.place(odd(groups))
            yield Finding(severity, code, f"{words} {setup.list_values(groups)}", next_step, place)


# --- network --------------------------------------------------------------------------------------

ONE_MTU = "give all interfaces and switches the same MTU (ip link set DEV mtu N)"
ONE_SPEED = (
    "choose equal interfaces (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or find out why the link "
    "came up slower (ethtool DEV)"
)
INTERFACES = (  # fact, words, factor and unit of the value shown, next step
    ("mtu_nbytes", "the MTU is", 1.0, "bytes", ONE_MTU),
    ("nominal_bytes_per_second", "the nominal speed is", 8e-9, "Gbit/s", ONE_SPEED),
)


def same_interfaces(setup: Setup) -> Iterator[Finding]:
    """Compare the interfaces to other hosts, once for each host."""
    firsts = [{**setup.ranks[ranks[0]], "rank": ranks[0]} for ranks in setup.hosts]
    used = [facts for facts in firsts if facts.get("addresses") and facts.get("interface")]
    for fact, words, factor, unit, next_step in INTERFACES:
        known = [facts for facts in used if facts["interface"].get(fact)]
        groups = folded([facts["interface"][fact] for facts in known])
        if len(groups) < 2:
            continue
        values = []
        for value, members in groups:
            names = [f"{known[i]['hostname']} ({known[i]['interface']['name']})" for i in members]
            values.append(f"{value * factor:g} {unit} on {', '.join(names[:4])}")
        yield Finding(
            "warning",
            "interface-differs",
            f"of the interfaces between hosts {words} {', '.join(values)}",
            next_step,
            setup.place([known[i]["rank"] for i in odd(groups)]),
        )


# --- any other fact of a rank or host -------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """A condition on facts of a rank; where one of them is unknown, it is not checked.

    is_wrong: the condition, whose parameters are the names of facts.
    by: ranks that share this fact have one finding; "rank": each its own, "world": all the same.
    sentence, next_step: templates of all facts of the first of these ranks, and `who` they are.
    """

    code: str
    is_wrong: Callable[..., object]
    by: str
    sentence: str
    next_step: str
    severity: str = "warning"
    severity_on_cpus: str | None = None  # where it is another one


CHECKS = [
    Check(
        "own-name",
        lambda resolved, hosts: resolved.startswith("127.") and hosts > 1,
        "world",
        "{hostname} resolves its own name to {resolved}: without GLOO_SOCKET_IFNAME gloo would "
        "listen there, and other hosts could not reach it",
        "set GLOO_SOCKET_IFNAME in every job, or correct /etc/hosts",
        "note",
    ),
    Check(
        "clocks-apart",
        lambda clock_ahead_seconds: abs(clock_ahead_seconds) > APART_SECONDS,
        "world",
        "the clocks of the hosts differ, compared with {first_host}: {clocks}; logs do not line "
        "up, and certificates may be refused",
        "let all hosts take the time from one source (chronyc tracking, timedatectl)",
    ),
    Check(
        "debug-build",
        lambda debug_builds: debug_builds,
        "debug_builds",
        "{debug_builds} on {who} is a debug build, which is slow",
        "install the release build",
    ),
    Check(  # if all ranks of a host are bound to the same cores, that may be intended
        "shared-cores",
        lambda free_cores, cores, sharing, sharing_threads, ranks_of_host: (
            free_cores and 1 < sharing < ranks_of_host and sharing_threads > cores
        ),
        "host_and_cores",
        "{who}, with {sharing_threads} compute threads in all, are bound to the same {core_names}, "
        "while {free_cores} of {hostname} {free_are} bound to no rank",
        "give each rank cores of its own (mpirun --bind-to core, srun --cpu-bind=cores, taskset), "
        "or bind none",
    ),
    Check(
        "narrow-affinity",
        # A crowded host is reported as oversubscribed.
        lambda threads, cores, is_crowded: threads > cores and not is_crowded,
        "hostname",
        "{who} may use {core_names} only, for {threads} compute threads",
        "bind it to as many cores as it has threads, or set OMP_NUM_THREADS={cores}",
    ),
    Check(
        "far-gpu",
        lambda gpu_numa_node, numa_nodes: gpu_numa_node not in cpus(numa_nodes),
        "rank",
        "{who} is bound to cores of NUMA node {numa_nodes}, its GPU {gpu_index} is at node "
        "{gpu_numa_node}: what it copies crosses the sockets",
        "bind it to cores of node {gpu_numa_node} (numactl --cpunodebind={gpu_numa_node}), or give "
        "it a GPU near its cores",
    ),
    Check(
        "narrow-pcie",
        lambda gpu_pcie: gpu_pcie["width"] < gpu_pcie["width_allowed"],
        "rank",
        "the PCIe link of the GPU of {who} runs at x{gpu_pcie[width]:g} of "
        "x{gpu_pcie[width_allowed]:g}: it carries less than the GPU and its slot allow",
        "compare LnkCap and LnkSta in lspci -vvs {gpu_bus}, then reseat the GPU and its riser",
    ),
    Check(
        "gpu-memory-errors",
        lambda gpu_memory_errors: gpu_memory_errors,
        "rank",
        "the memory of the GPU of {who} has had {memory_errors} that ECC could not correct since "
        "the driver was loaded",
        "look at nvidia-smi -q -d ECC,ROW_REMAPPER, then reset or replace the GPU",
    ),
    Check(
        "shared-gpu",
        lambda ranks_of_gpu: ranks_of_gpu > 1,
        "gpu_uuid",
        "{who} share one GPU, as --share-gpu allows: times contain waiting",
        "start one rank a GPU to measure",
        "note",
    ),
    Check(
        "gpu-in-use",
        lambda gpu_used_nbytes, gpu_nbytes, ranks_of_gpu: (
            ranks_of_gpu == 1 and gpu_used_nbytes > max(IN_USE_SHARE * gpu_nbytes, OWN_NBYTES)
        ),
        "rank",
        "{gpu_used_gib:.1f} of {gpu_gib:.1f} GiB of the GPU of {who} are taken before anything is "
        "measured",
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
        "{who} may lock {ulimit_memlock_kib:.0f} KiB of memory, and RDMA ({rdma_devices[0]}) locks "
        "its buffers",
        "ulimit -l unlimited (containers: --ulimit memlock=-1; Slurm: LimitMEMLOCK=infinity for "
        "slurmd)",
    ),
    Check(
        "open-files",
        lambda ulimit_open_files, files_needed: 0 <= ulimit_open_files < files_needed,
        "world",
        "{who} may open {ulimit_open_files} files, and connections between {world_size} ranks "
        "alone can need about {files_needed}",
        "raise it with ulimit -n, for data loaders as well: 65536 is usual",
    ),
    Check(
        "small-shm",
        lambda shm_free_nbytes, ranks_of_host: shm_free_nbytes < LEAST_SHM_NBYTES * ranks_of_host,
        "hostname",
        "/dev/shm of {hostname} has {shm_free_mib:.0f} MiB free for {ranks_of_host} ranks: NCCL "
        "and the workers of data loaders exchange data there, and fail when it is full",
        "give the container more (docker run --shm-size=8g, --ipc=host), or remove what lies there",
        severity_on_cpus="note",
    ),
    Check(
        "low-memory",
        lambda free_memory_nbytes, memory_needed: free_memory_nbytes < memory_needed,
        "hostname",
        "{hostname} has {free_memory_gib:.1f} GiB of memory free for {ranks_of_host} ranks: the "
        "kernel may kill one of them",
        "find out with top -o RES what uses it; the limit of a control group counts too",
    ),
    Check(
        "low-memory",
        lambda free_memory_nbytes, memory_needed, usual_memory_nbytes: (
            memory_needed <= free_memory_nbytes < MUCH_LESS * usual_memory_nbytes
        ),
        "hostname",
        "{hostname} has {free_memory_gib:.1f} GiB of memory free for {ranks_of_host} ranks, hosts "
        "usually {usual_memory_gib:.1f} GiB",
        "find out with top -o RES whether an earlier job left something there",
        "note",
    ),
]


def find_wrong(setup: Setup) -> Iterator[Finding]:
    """Find what CHECKS call wrong."""
    everyone = _read_facts(setup)
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


def _read_facts(setup: Setup) -> list[dict[str, Any]]:
    """Return the facts of each rank and its host, with those that follow from all of them."""
    shared, gpus = _of_world(setup), Counter(setup.values("gpu_uuid"))
    everyone = [{**own, **shared, "rank": n} for n, own in enumerate(setup.everyone())]
    for ranks in setup.hosts:
        _add_cores([everyone[rank] for rank in ranks])
    for own in everyone:
        whole, free = own.get("gpu_nbytes"), own.get("gpu_free_nbytes")
        if own.get("gpu_uuid") and whole is not None and free is not None:
            own |= {"ranks_of_gpu": gpus[own["gpu_uuid"]], "gpu_used_nbytes": whole - free}
        own["debug_builds"] = " and ".join(own.get("debug_builds") or [])
        own["may_lock_memory"] = bool(own.get("may_lock_memory"))
        own["memory_errors"] = counted(own.get("gpu_memory_errors") or 0, "error")
        sizes = [(name, nbytes) for name, nbytes in own.items() if name.endswith("_nbytes")]
        for (name, nbytes), (unit, size) in itertools.product(sizes, UNITS.items()):
            own[name.replace("nbytes", unit)] = None if nbytes is None else nbytes / size
    return everyone


def _of_world(setup: Setup) -> dict[str, Any]:
    """Return the facts that all ranks share."""
    hosts = [setup.ranks[ranks[0]] for ranks in setup.hosts]
    memory = [nbytes for own in hosts if (nbytes := own.get("free_memory_nbytes")) is not None]
    ahead = [(own["hostname"], own.get("clock_ahead_seconds") or 0.0) for own in hosts]
    clocks = [f"{host} {s:+.1f} s" for host, s in ahead if abs(s) > APART_SECONDS]
    return {
        "backend": setup.backend,
        "world_size": len(setup.ranks),
        "hosts": len(hosts),
        "first_host": setup.host(0),
        "clocks": ", ".join(clocks[:4]) + (", …" if len(clocks) > 4 else ""),
        "files_needed": FILES + FILES_A_RANK * len(setup.ranks),
        "usual_memory_nbytes": statistics.median(memory) if memory else None,
    }


def _add_cores(mine: Sequence[dict[str, Any]]) -> None:
    """Add to the facts of the ranks of a host what cores they and others are bound to."""
    free = cpus(mine[0].get("allowed_cpus")).difference(*(cpus(own.get("cpuset")) for own in mine))
    is_crowded = any(crowded(mine))
    for own in mine:
        cores = cpus(own.get("cpuset"))
        mates = [other for other in mine if cpus(other.get("cpuset")) == cores]
        own |= {
            "ranks_of_host": len(mine),
            "memory_needed": LEAST_MEMORY_NBYTES * len(mine),
            "is_crowded": is_crowded,
            "threads": own.get("threads") or 1,
            "cores": len(cores) or None,
            "core_names": _name_cores(cores),
            "sharing": len(mates),
            "sharing_threads": sum(mate.get("threads") or 1 for mate in mates),
            "host_and_cores": (own.get("hostname"), cores),
            "free_cores": _name_cores(free) if free else None,
            "free_are": "are" if len(free) > 1 else "is",
        }


def _name_cores(cores: frozenset[int]) -> str:
    numbers = sorted(cores)
    if len(numbers) < 2:
        return f"core {', '.join(map(str, numbers))}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"cores {numbers[0]}-{numbers[-1]}"
    return f"cores {', '.join(map(str, numbers[:8]))}{', …' if len(numbers) > 8 else ''}"


# The findings come in this order.
FINDERS: tuple[Callable[[Setup], Iterator[Finding]], ...] = (
    same_facts,
    same_variables,
    same_interfaces,
    costly_settings,
    find_wrong,
)


def find_all(setup: Setup) -> tuple[Finding, ...]:
    """Return a finding for everything that differs or is wrong."""
    return tuple(finding for find in FINDERS for finding in find(setup))
