"""The settings of all ranks as a list of facts that can be pasted into an issue.

A fact that all ranks share stands there once, else with its ranks. One entry of FIELDS adds a fact.
The ranks have removed secrets, user names and home folders from their variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddpbench.analysis.rank_setup import Facts, Setup, folded
from ddpbench.records.table import Table, TableColumn
from ddpbench.records.wording import counted, name_ranks

MIB, GIB = 2**20, 2**30
HIDDEN = ("SLURM_",)  # Slurm sets many variables, and no collective reads them
OF_HOST = ("free_memory_nbytes", "shm_free_nbytes", "shm_nbytes")  # read once for each host


def build_tables(figures: Mapping[str, Any], backend: str) -> tuple[Table, ...]:
    """Return the list of facts; none if no facts were stored."""
    if not figures.get("ranks"):
        return ()
    setup = Setup(
        ranks=figures["ranks"],
        hosts=figures["hosts"],
        backend=figures["backend"],
        device=figures["device"],
        launcher=figures["launcher"],
    )
    world = f"{len(setup.ranks)} on {counted(len(setup.hosts), 'host')}"
    rows = [("ranks", f"{world}, {setup.backend}, {setup.device}, started by {setup.launcher}")]
    everyone = _facts_with_host(setup)
    for name, describe in FIELDS.items():
        values = [describe(facts) for facts in everyone]
        if any(values):
            rows.append((name, _folded(values)))
    rows += [("variables", line) for line in _variables(setup)]
    columns = (TableColumn(align="left"), TableColumn(align="left"))
    return (Table("environment, for pasting into an issue", columns, tuple(rows)),)


def _facts_with_host(setup: Setup) -> list[Facts]:
    """Return the facts of each rank together with those of its host."""
    everyone: list[Facts] = list(setup.ranks)
    for _, ranks, host in setup.of_hosts():
        first = setup.ranks[ranks[0]]
        once = {name: first.get(name) for name in OF_HOST}
        for rank in ranks:
            everyone[rank] = {**host, **setup.ranks[rank], **once}
    return everyone


def _folded(values: list[Any]) -> str:
    """Show a value that all ranks share once, else each value with its ranks."""
    groups = folded(values)
    if len(groups) == 1:
        return str(groups[0][0])
    return "; ".join(f"{value or '-'} ({name_ranks(ranks)})" for value, ranks in groups)


def _variables(setup: Setup) -> list[str]:
    everyone = [facts.get("variables") or {} for facts in setup.ranks]
    names = sorted(name for name in set().union(*everyone) if not name.startswith(HIDDEN))
    return [f"{name}={_folded([own.get(name) for own in everyone])}" for name in names]


def _versions(facts: Facts) -> str:
    return ", ".join(f"{name} {facts.get(name)}" for name in ("ddpbench", "torch", "python"))


def _system(facts: Facts) -> str:
    inside = facts.get("container") or facts.get("virtual_machine")
    return f"Linux {facts.get('kernel')}, {facts.get('os')}" + (f", in {inside}" if inside else "")


def _processor(facts: Facts) -> str:
    smt = {True: ", SMT on", False: ", SMT off", None: ""}[facts.get("smt")]
    governor = f", governor {facts.get('governor')}" if facts.get("governor") else ""
    return f"{facts.get('cpu_model')}, {facts.get('cores_logical')} cores{smt}{governor}"


def _cores(facts: Facts) -> str:
    quota = facts.get("cgroup_cpu_quota_cores")
    nodes = facts.get("numa_nodes")
    return (
        f"threads {facts.get('threads')}, on cores {facts.get('cpuset')}"
        + (f" of NUMA node {nodes}" if nodes else "")
        + (f", quota {quota:g} cores" if quota else "")
    )


def _memory(facts: Facts) -> str:
    limit = facts.get("cgroup_memory_limit_nbytes")
    return (
        f"{_gib(facts.get('memory_nbytes'))}, {_gib(facts.get('free_memory_nbytes'))} free"
        + (f", limit {_gib(limit)}" if limit else "")
        + f"; /dev/shm {_gib(facts.get('shm_nbytes'))}, {_gib(facts.get('shm_free_nbytes'))} free"
    )


def _limits(facts: Facts) -> str:
    files, locked = facts.get("ulimit_open_files"), facts.get("ulimit_memlock_nbytes")
    return (
        f"{'any number of' if files == -1 else files} open files, "
        f"{'any' if locked == -1 else _gib(locked)} locked memory"
    )


def _gpu(facts: Facts) -> str | None:
    if not facts.get("gpu_uuid"):
        return None
    node = facts.get("gpu_numa_node")
    return (
        f"{facts.get('gpu_index')}: {facts.get('gpu_name')}, {_gib(facts.get('gpu_nbytes'))}"
        + (f", NUMA node {node}" if node is not None else "")
        + f", driver {facts.get('driver')}"
    )


def _links(facts: Facts) -> str | None:
    slot, count = facts.get("gpu_pcie"), facts.get("gpu_nvlinks_active")
    shown = [
        slot and f"PCIe x{slot['width']:g} at {slot['transfers_per_second'] / 1e9:g} GT/s",
        count and counted(count, "NVLink"),
    ]
    return ", ".join(filter(None, shown)) or None


def _conf(facts: Facts) -> str | None:
    files = (facts.get("nccl_conf") or {}).items()
    shown = [
        f"{file}: {' '.join(f'{name}={value}' for name, value in settings.items())}"
        for file, settings in files
    ]
    return "; ".join(shown) or None


def _network(facts: Facts) -> str:
    used = facts.get("interface") or {}
    speed = used.get("nominal_bytes_per_second")
    address = next(iter(facts.get("addresses") or []), facts.get("address"))
    return (
        f"{used.get('name')} {address}, mtu {used.get('mtu_nbytes')}"
        + (f", {speed * 8e-9:g} Gbit/s nominal" if speed else "")
        + f"; own name is {facts.get('resolved') or 'not resolved'}"
    )


def _clock(facts: Facts) -> str | None:
    ahead = facts.get("clock_ahead_seconds")
    return f"{ahead:+.3f} s ahead of rank 0's" if ahead is not None and abs(ahead) > 1e-3 else None


def _gib(nbytes: int | None) -> str:
    """Format a size. From 10 GiB on it is whole, so that almost equal sizes read the same."""
    if nbytes is None:
        return "unknown"
    if nbytes < GIB / 10:
        return f"{nbytes / MIB:.2g} MiB"
    return f"{nbytes / GIB:.{0 if nbytes >= 10 * GIB else 1}f} GiB"


FIELDS: dict[str, Callable[[Facts], str | None]] = {
    "host": lambda facts: facts.get("hostname"),
    "versions": _versions,
    "library": lambda facts: facts.get("library"),
    "system": _system,
    "cpu": _processor,
    "cores": _cores,
    "memory": _memory,
    "limits": _limits,
    "gpu": _gpu,
    "links": _links,
    "network": _network,
    "rdma": lambda facts: ", ".join(facts.get("rdma_devices") or []) or None,
    "plug-ins": lambda facts: facts.get("nccl_plugins"),
    "nccl.conf": _conf,
    "clock": _clock,
}
