"""Preflight: compare the settings of all ranks; report differences and dangers only.

figures: {"launcher", "backend", "device": their names, "hosts": [the ranks of each, …],
"ranks": [facts of each rank, …]}. The facts are those of `rank_facts` and `setup_facts` in
runtime/environment.py, without secrets in the variables, and
  library              name and version of what carries the data
  address, why_there   the address where gloo listens, and the reason for it
  interface, addresses the interface in use; the addresses that accept connections from other hosts
  host                 in the first rank of each host: `host_facts`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ddpbench.analysis.rank_setup import Facts, Setup, folded
from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.preflight import checks
from ddpbench.records import redact
from ddpbench.records.table import Table, TableColumn
from ddpbench.records.wording import counted, name_ranks
from ddpbench.runtime import control, environment, gpu_facts

# Facts in the record of a launch that serve another purpose.
LEFT_OUT = ("gpu_before", "boot_id", "time_namespace", "pid")


def examine(context: Context) -> Outcome:
    """Compare the settings. All ranks call it."""
    hosts = list(context.world.hosts.values())
    added = control.gather_values(context.world, _read_own_facts(context))
    ranks = [
        {**{name: fact for name, fact in recorded.items() if name not in LEFT_OUT}, **own}
        for recorded, own in zip(context.launch.ranks, added, strict=True)
    ]
    setup = Setup(ranks, hosts, context.backend.name, context.device.type, context.launch.launcher)
    line = f"compared the settings of {len(ranks)} ranks on {counted(len(hosts), 'host')}"
    return Outcome(
        lines=(line if len(ranks) > 1 else "checked the settings of 1 rank",),
        unchecked=tuple(_unchecked(setup, context.launch.ranks)),
        findings=checks.find_all(setup),
        figures={
            "launcher": setup.launcher,
            "backend": setup.backend,
            "device": setup.device,
            "hosts": hosts,
            "ranks": ranks,
        },
        tables=(build_table(setup),),
    )


def _read_own_facts(context: Context) -> dict[str, Any]:
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


def _unchecked(setup: Setup, recorded: Sequence[Facts]) -> Iterator[str]:
    if len(setup.ranks) == 1:
        yield "differences between ranks: there is only one rank"
    if any(facts.get("gpu_uuid") and facts.get("gpu_before") is None for facts in recorded):
        yield f"clocks, NVLinks and memory errors of GPUs: {gpu_facts.explain_unknown_gpu()}"


# --- the facts of all ranks, for pasting into an issue --------------------------------------------

HIDDEN = ("SLURM_",)  # Slurm sets many variables, and no collective reads them
LINES = {
    "host": ("hostname",),
    "versions": ("ddpbench", "torch", "python", "library"),
    "system": ("kernel", "os", "container", "virtual_machine"),
    "cpu": ("cpu_model", "cores_logical", "smt", "governor"),
    "cores": ("threads", "cpuset", "numa_nodes", "cgroup_cpu_quota_cores"),
    "memory": ("memory", "free_memory", "cgroup_memory_limit", "shm", "shm_free"),
    "limits": ("ulimit_open_files", "ulimit_memlock"),
    "gpu": ("gpu_index", "gpu_name", "gpu", "gpu_numa_node", "driver", "gpu_nvlinks_active"),
    "network": ("interface_name", "address", "mtu", "speed", "rdma_devices"),
    "nccl": ("nccl_plugins", "nccl_conf"),
}


def build_table(setup: Setup) -> Table:
    """Return the settings of all ranks as a list of facts that can be pasted into an issue.

    If the ranks differ, each value is followed by its ranks. The ranks have removed secrets, user
    names and home folders from their variables.
    """
    world = f"{len(setup.ranks)} on {counted(len(setup.hosts), 'host')}"
    rows = [("ranks", f"{world}, {setup.backend}, {setup.device}, started by {setup.launcher}")]
    everyone = checks.describe_facts(setup)
    for line, names in LINES.items():
        values = [_describe_facts(facts, names) for facts in everyone]
        if any(values):
            rows.append((line, _fold(values)))
    variables = [facts.get("variables") or {} for facts in setup.ranks]
    rows += [
        ("variables", f"{name}={_fold([own.get(name) for own in variables])}")
        for name in sorted(set().union(*variables))
        if not name.startswith(HIDDEN)
    ]
    columns = (TableColumn(align="left"), TableColumn(align="left"))
    return Table("environment, for pasting into an issue", columns, tuple(rows))


def _describe_facts(facts: Facts, names: Sequence[str]) -> str:
    known = [(name.replace("_", " "), facts[name]) for name in names if name in facts]
    return ", ".join(f"{name} {value}" for name, value in known if value not in (None, "", [], {}))


def _fold(values: list[Any]) -> str:
    """Show a value that all ranks share once, else each value with its ranks."""
    groups = folded(values)
    if len(groups) == 1:
        return str(groups[0][0])
    return "; ".join(f"{value or '-'} ({name_ranks(ranks)})" for value, ranks in groups)
