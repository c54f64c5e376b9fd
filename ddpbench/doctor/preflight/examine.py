"""Preflight: compare the settings of all ranks; report differences and dangers only.

figures: {"launcher", "backend", "device": their names, "hosts": [the ranks of each, …],
"ranks": [facts of each rank, …]}. The facts are those of `rank_facts` and `setup_facts` in
runtime/environment.py, without secrets in the variables, and
  library              name and version of what carries the data
  address, why_there   the address where gloo listens, and the reason for it
  interface, addresses the interface in use; the addresses that accept connections from other hosts
  clock_ahead_seconds  how far the time of day is ahead of rank 0's; None: not known
  host                 in the first rank of each host: `host_facts`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ddpbench.analysis.rank_setup import Facts, Setup, folded
from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.preflight import checks
from ddpbench.measure import clock
from ddpbench.records import redact
from ddpbench.records.table import Table, TableColumn
from ddpbench.records.wording import counted, name_ranks
from ddpbench.runtime import control, environment, gpu_facts

# Facts in the record of a launch that serve another purpose.
LEFT_OUT = ("gpu_before", "boot_id", "time_namespace", "pid", "load_average")


def examine(context: Context) -> Outcome:
    """Compare the settings. All ranks call it."""
    hosts = list(context.world.hosts.values())
    ahead, objection = _gather_clocks_ahead(context)
    everyone = control.gather_values(context.world, _own_facts(context))
    ranks = [
        {
            **{name: fact for name, fact in recorded.items() if name not in LEFT_OUT},
            **added,
            "clock_ahead_seconds": seconds,
        }
        for recorded, added, seconds in zip(context.launch.ranks, everyone, ahead, strict=True)
    ]
    setup = Setup(ranks, hosts, context.backend.name, context.device.type, context.launch.launcher)
    figures = {
        "launcher": setup.launcher,
        "backend": setup.backend,
        "device": setup.device,
        "hosts": hosts,
        "ranks": ranks,
    }
    line = f"compared the settings of {len(ranks)} ranks on {counted(len(hosts), 'host')}"
    return Outcome(
        lines=(line if len(ranks) > 1 else "checked the settings of 1 rank",),
        unchecked=tuple(_unchecked(setup, context.launch.ranks, objection)),
        findings=checks.find_all(setup),
        figures=figures,
        tables=(build_table(setup),),
    )


def _own_facts(context: Context) -> dict[str, Any]:
    world = context.world
    listening = world.endpoints[world.rank]
    first_of_host = any(ranks[0] == world.rank for ranks in world.hosts.values())
    return {
        **environment.setup_facts(),
        "library": context.backend.library(),
        "address": next(iter(listening.listening), None),
        "why_there": redact.text(listening.reason),
        "host": environment.host_facts() if first_of_host else None,
    }


def _gather_clocks_ahead(context: Context) -> tuple[list[float | None], str | None]:
    """Return how far each rank's time of day is ahead of rank 0's, in seconds; why any is None."""
    from ddpbench.measure import offsets

    with offsets.open_clocks(context.world, context.launch.ranks) as clocks:
        # The time of day minus the clock of the time stamps is constant, and `clocks` knows how far
        # the clocks of the time stamps are apart.
        epoch_ns = time.time_ns() - clock.now_ns() + clocks.ahead_ns
        everyone = control.gather_values(context.world, epoch_ns)
        own = {rank for ranks in clocks.ranks[1:] for rank in ranks} if clocks.objection else set()
        ahead = [
            None if rank in own else (rank_epoch_ns - everyone[0]) * 1e-9
            for rank, rank_epoch_ns in enumerate(everyone)
        ]
        return ahead, clocks.objection


def _unchecked(
    setup: Setup, recorded: Sequence[Mapping[str, Any]], clocks: str | None
) -> Iterator[str]:
    if clocks is not None:
        yield f"the hosts' clocks: {clocks}"
    if len(setup.ranks) == 1:
        yield "differences between ranks: there is only one rank"
    if any(facts.get("gpu_uuid") and facts.get("gpu_before") is None for facts in recorded):
        yield f"clocks, NVLinks and memory errors of GPUs: {gpu_facts.explain_unknown_gpu()}"
    if not any(facts.get("allowed_cpus") for facts in setup.ranks):
        yield "cores that are free for binding: the control group does not list its cores"


MIB, GIB = 2**20, 2**30
HIDDEN = ("SLURM_",)  # Slurm sets many variables, and no collective reads them


def build_table(setup: Setup) -> Table:
    """Return the settings of all ranks as a list of facts that can be pasted into an issue.

    A fact that all ranks share stands there once, else with its ranks. The ranks have removed
    secrets, user names and home folders from their variables.
    """
    world = f"{len(setup.ranks)} on {counted(len(setup.hosts), 'host')}"
    rows = [("ranks", f"{world}, {setup.backend}, {setup.device}, started by {setup.launcher}")]
    everyone = setup.everyone()
    for name, describe in FIELDS.items():
        values = [describe(facts) for facts in everyone]
        if any(values):
            rows.append((name, _folded(values)))
    rows += [("variables", line) for line in _variables(setup)]
    columns = (TableColumn(align="left"), TableColumn(align="left"))
    return Table("environment, for pasting into an issue", columns, tuple(rows))


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


# One entry adds a fact to the list.
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
