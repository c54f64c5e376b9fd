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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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


# --- the facts of all ranks, for pasting into an issue --------------------------------------------

MIB, GIB = 2**20, 2**30
HIDDEN = ("SLURM_",)  # Slurm sets many variables, and no collective reads them
# Line → its parts: a fact without which the part is left out ("": it is always shown), a template
# of facts. To add a fact to the list, add a line or a part.
LINES: dict[str, tuple[tuple[str, str], ...]] = {
    "host": (("", "{hostname}"),),
    "versions": (("", "ddpbench {ddpbench}, torch {torch}, python {python}"),),
    "library": (("library", "{library}"),),
    "system": (("", "Linux {kernel}, {os}"), ("inside", ", in {inside}")),
    "cpu": (
        ("", "{cpu_model}, {cores_logical} cores"),
        ("smt_state", ", SMT {smt_state}"),
        ("governor", ", governor {governor}"),
    ),
    "cores": (
        ("", "threads {threads}, on cores {cpuset}"),
        ("numa_nodes", " of NUMA node {numa_nodes}"),
        ("cgroup_cpu_quota_cores", ", quota {cgroup_cpu_quota_cores:g} cores"),
    ),
    "memory": (
        ("", "{memory}, {free_memory} free"),
        ("cgroup_memory_limit_nbytes", ", limit {cgroup_memory_limit}"),
        ("", "; /dev/shm {shm}, {shm_free} free"),
    ),
    "limits": (("", "{files} open files, {locked} locked memory"),),
    "gpu": (
        ("gpu_uuid", "{gpu_index}: {gpu_name}, {gpu}"),
        ("gpu_node", ", NUMA node {gpu_node}"),
        ("gpu_uuid", ", driver {driver}"),
    ),
    "links": (("gpu_links", "{gpu_links}"),),
    "network": (
        ("", "{interface[name]} {address}, mtu {interface[mtu_nbytes]}"),
        ("gigabits", ", {gigabits:g} Gbit/s nominal"),
        ("", "; own name is {own_name}"),
    ),
    "rdma": (("rdma", "{rdma}"),),
    "plug-ins": (("nccl_plugins", "{nccl_plugins}"),),
    "nccl.conf": (("files_of_nccl", "{files_of_nccl}"),),
    "clock": (("clock", "{clock}"),),
}


def build_table(setup: Setup) -> Table:
    """Return the settings of all ranks as a list of facts that can be pasted into an issue.

    A fact that all ranks share stands there once, else with its ranks. The ranks have removed
    secrets, user names and home folders from their variables.
    """
    world = f"{len(setup.ranks)} on {counted(len(setup.hosts), 'host')}"
    rows = [("ranks", f"{world}, {setup.backend}, {setup.device}, started by {setup.launcher}")]
    everyone = [_describe(facts) for facts in setup.everyone()]
    for name, parts in LINES.items():
        values = [
            "".join(part.format_map(facts) for fact, part in parts if not fact or facts[fact])
            for facts in everyone
        ]
        if any(values):
            rows.append((name, _fold(values)))
    variables = [facts.get("variables") or {} for facts in setup.ranks]
    rows += [
        ("variables", f"{name}={_fold([own.get(name) for own in variables])}")
        for name in sorted(set().union(*variables))
        if not name.startswith(HIDDEN)
    ]
    columns = (TableColumn(align="left"), TableColumn(align="left"))
    return Table("environment, for pasting into an issue", columns, tuple(rows))


def _fold(values: list[Any]) -> str:
    """Show a value that all ranks share once, else each value with its ranks."""
    groups = folded(values)
    if len(groups) == 1:
        return str(groups[0][0])
    return "; ".join(f"{value or '-'} ({name_ranks(ranks)})" for value, ranks in groups)


def _describe(facts: Facts) -> Mapping[str, Any]:
    """Return the facts of a rank with the words that LINES use; an unknown fact is None."""
    described: defaultdict[str, Any] = defaultdict(lambda: None, facts)
    interface, link = facts.get("interface") or {}, facts.get("gpu_pcie")
    files, locked = facts.get("ulimit_open_files"), facts.get("ulimit_memlock_nbytes")
    node, count = facts.get("gpu_numa_node"), facts.get("gpu_nvlinks_active")
    smt, ahead = facts.get("smt"), facts.get("clock_ahead_seconds") or 0.0
    lanes = link and f"PCIe x{link['width']:g} at {link['transfers_per_second'] / 1e9:g} GT/s"
    for name in ("memory", "free_memory", "cgroup_memory_limit", "shm", "shm_free", "gpu"):
        described[name] = _gib(facts.get(f"{name}_nbytes"))
    return described | {
        "inside": facts.get("container") or facts.get("virtual_machine"),
        "smt_state": None if smt is None else "on" if smt else "off",
        "files": "any number of" if files == -1 else files,
        "locked": "any" if locked == -1 else _gib(locked),
        "gpu_node": None if node is None else str(node),
        "gpu_links": ", ".join(filter(None, [lanes, count and counted(count, "NVLink")])),
        "interface": defaultdict(lambda: None, interface),
        "address": next(iter(facts.get("addresses") or []), facts.get("address")),
        "gigabits": (interface.get("nominal_bytes_per_second") or 0.0) * 8e-9,
        "own_name": facts.get("resolved") or "not resolved",
        "rdma": ", ".join(facts.get("rdma_devices") or []),
        "files_of_nccl": "; ".join(
            f"{file}: {' '.join(f'{name}={value}' for name, value in settings.items())}"
            for file, settings in (facts.get("nccl_conf") or {}).items()
        ),
        "clock": f"{ahead:+.3f} s ahead of rank 0's" if abs(ahead) > 1e-3 else None,
    }


def _gib(nbytes: int | None) -> str:
    """Format a size. From 10 GiB on it is whole, so that almost equal sizes read the same."""
    if nbytes is None:
        return "unknown"
    if nbytes < GIB / 10:
        return f"{nbytes / MIB:.2g} MiB"
    return f"{nbytes / GIB:.{0 if nbytes >= 10 * GIB else 1}f} GiB"
