"""The environment of all ranks in one block that can be pasted into an issue: what is the same is
told once, what differs with its ranks. One entry of FIELDS adds a line.

Variables stand in it as the ranks allowed them to: without secrets, user names, home folders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpbench.analysis.setup import Facts, Setup, folded, named
from ddpbench.records.schema import Examination
from ddpbench.render.style import Style

MIB, GIB = 2**20, 2**30
HIDDEN = ("SLURM_",)  # Slurm tells its steps much, none of which a collective reads
OF_HOST = ("free_memory_nbytes", "shm_free_nbytes", "shm_nbytes")  # asked at one time


def blocks(examination: Examination, style: Style) -> list[str]:
    """One block; none where no facts were stored."""
    figures = examination.figures
    if not figures.get("ranks"):
        return []
    setup = Setup(
        figures["ranks"], figures["hosts"], figures["backend"], figures["device"],
        figures["launcher"],
    )  # fmt: skip
    world = f"{len(setup.ranks)} on {len(setup.hosts)} host{'s' if len(setup.hosts) > 1 else ''}"
    lines = [f"{'ranks':<12}{world}, {setup.backend}, {setup.device}, started by {setup.launcher}"]
    facts = _facts(setup)
    lines += [
        f"{label:<12}{_told(values)}"
        for label, value in FIELDS.items()
        if any(values := [value(its) for its in facts])
    ]
    lines += [f"{'variables':<12}{line}" for line in _variables(setup)]
    fenced = "\n".join(["```", *lines, "```"])
    return [style.block("environment, for pasting into an issue", fenced)]


def _facts(setup: Setup) -> list[Facts]:
    """Each rank's, with those of its host."""
    found: list[Facts] = list(setup.ranks)
    for _, ranks, host in setup.of_hosts():
        first = setup.ranks[ranks[0]]
        once = {name: first.get(name) for name in OF_HOST}
        for rank in ranks:
            found[rank] = {**host, **setup.ranks[rank], **once}
    return found


def _told(values: list[Any]) -> str:
    """What is the same, once; else each value with its ranks."""
    groups = folded(values)
    if len(groups) == 1:
        return str(groups[0][0])
    return "; ".join(f"{value or '-'} ({named(ranks)})" for value, ranks in groups)


def _variables(setup: Setup) -> list[str]:
    every = [its.get("variables") or {} for its in setup.ranks]
    names = sorted(name for name in set().union(*every) if not name.startswith(HIDDEN))
    return [f"{name}={_told([its.get(name) for its in every])}" for name in names]


def _versions(its: Facts) -> str:
    return ", ".join(f"{name} {its.get(name)}" for name in ("ddpbench", "torch", "python"))


def _system(its: Facts) -> str:
    inside = its.get("container") or its.get("virtual_machine")
    return f"Linux {its.get('kernel')}, {its.get('os')}" + (f", in {inside}" if inside else "")


def _processor(its: Facts) -> str:
    smt = {True: ", SMT on", False: ", SMT off", None: ""}[its.get("smt")]
    governor = f", governor {its.get('governor')}" if its.get("governor") else ""
    return f"{its.get('cpu_model')}, {its.get('cores_logical')} cores{smt}{governor}"


def _cores(its: Facts) -> str:
    quota = its.get("cgroup_cpu_quota_cores")
    nodes = its.get("numa_nodes")
    return (
        f"threads {its.get('threads')}, on cores {its.get('cpuset')}"
        + (f" of NUMA node {nodes}" if nodes else "")
        + (f", quota {quota:g} cores" if quota else "")
    )


def _memory(its: Facts) -> str:
    limit = its.get("cgroup_memory_limit_nbytes")
    return (
        f"{_gib(its.get('memory_nbytes'))}, {_gib(its.get('free_memory_nbytes'))} free"
        + (f", limit {_gib(limit)}" if limit else "")
        + f"; /dev/shm {_gib(its.get('shm_nbytes'))}, {_gib(its.get('shm_free_nbytes'))} free"
    )


def _limits(its: Facts) -> str:
    files, locked = its.get("ulimit_open_files"), its.get("ulimit_memlock_nbytes")
    return (
        f"{'any number of' if files == -1 else files} open files, "
        f"{'any' if locked == -1 else _gib(locked)} locked memory"
    )


def _gpu(its: Facts) -> str | None:
    if not its.get("gpu_uuid"):
        return None
    node = its.get("gpu_numa_node")
    return (
        f"{its.get('gpu_index')}: {its.get('gpu_name')}, {_gib(its.get('gpu_nbytes'))}"
        + (f", NUMA node {node}" if node is not None else "")
        + f", driver {its.get('driver')}"
    )


def _network(its: Facts) -> str:
    used = its.get("interface") or {}
    speed = used.get("nominal_bytes_per_second")
    address = next(iter(its.get("addresses") or []), its.get("address"))
    return (
        f"{used.get('name')} {address}, mtu {used.get('mtu_nbytes')}"
        + (f", {speed * 8e-9:g} Gbit/s nominal" if speed else "")
        + f"; own name is {its.get('resolved') or 'not resolved'}"
    )


def _clock(its: Facts) -> str | None:
    ahead = its.get("clock_ahead_seconds")
    return f"{ahead:+.3f} s ahead of rank 0's" if ahead is not None and abs(ahead) > 1e-3 else None


def _gib(nbytes: int | None) -> str:
    """Whole GiB from 10 on, so that what is alike reads alike."""
    if nbytes is None:
        return "unknown"
    if nbytes < GIB / 10:
        return f"{nbytes / MIB:.2g} MiB"
    return f"{nbytes / GIB:.{0 if nbytes >= 10 * GIB else 1}f} GiB"


FIELDS: dict[str, Callable[[Facts], str | None]] = {
    "host": lambda its: its.get("hostname"),
    "versions": _versions,
    "library": lambda its: its.get("library"),
    "system": _system,
    "cpu": _processor,
    "cores": _cores,
    "memory": _memory,
    "limits": _limits,
    "gpu": _gpu,
    "network": _network,
    "rdma": lambda its: ", ".join(its.get("rdma_devices") or []) or None,
    "clock": _clock,
}
