"""Preflight: compare the settings of all ranks; report differences and dangers only.

figures: {"launcher", "backend", "device": their names, "hosts": [the ranks of each, …],
"ranks": [facts of each rank, …]}. The facts are those of `rank_facts` and `setup_facts` in
runtime/environment.py, without secrets in the variables, and
  library              name and version of what carries the data
  address, why_there   the address where gloo listens, and the reason for it
  interface, addresses the interface in use; the addresses that accept connections from other hosts
  clock_ahead_seconds  how far the time of day is ahead of rank 0's; None: unknown
  host                 in the first rank of each host: `host_facts`
"""

from __future__ import annotations

import string
import time
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
    everyone = control.gather_values(context.world, _read_own_facts(context))
    ranks = [
        {
            **{name: fact for name, fact in recorded.items() if name not in LEFT_OUT},
            **added,
            "clock_ahead_seconds": seconds,
        }
        for recorded, added, seconds in zip(context.launch.ranks, everyone, ahead, strict=True)
    ]
    setup = Setup(ranks, hosts, context.backend.name, context.device.type, context.launch.launcher)
    line = f"compared the settings of {len(ranks)} ranks on {counted(len(hosts), 'host')}"
    return Outcome(
        lines=(line if len(ranks) > 1 else "checked the settings of 1 rank",),
        unchecked=tuple(_unchecked(setup, context.launch.ranks, objection)),
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


# --- the facts of all ranks, for pasting into an issue --------------------------------------------

HIDDEN = ("SLURM_",)  # Slurm sets many variables, and no collective reads them
# Line → template. "|" separates its parts; a part with an unknown fact is left out.
LINES = {
    "host": "{hostname}",
    "versions": "ddpbench {ddpbench}, torch {torch}, python {python}",
    "library": "{library}",
    "system": "Linux {kernel}|, {os}|, in {inside}",
    "cpu": "{cpu_model}, {cores_logical} cores|, SMT {smt_state}|, governor {governor}",
    "cores": "threads {threads}, on cores {cores}| of NUMA node {numa_nodes}"
    "|, quota {cgroup_cpu_quota_cores:g} cores",
    "memory": "{free_memory} free| of {memory}|, limit {cgroup_memory_limit}"
    "|; /dev/shm {shm_free} free of {shm}",
    "limits": "open files {files}|, locked memory {ulimit_memlock}",
    "gpu": "{gpu_index}: {gpu_name}, {gpu}|, NUMA node {gpu_numa_node}|, driver {driver}",
    "links": "PCIe {pcie}|, {gpu_nvlinks_active} NVLinks",
    "network": "{interface_name} {interface_address}|, mtu {interface_mtu}|, {speed} nominal"
    "|; own name is {resolved}",
    "rdma": "{rdma}",
    "plug-ins": "{nccl_plugins}",
    "nccl.conf": "{nccl_files}",
    "clock": "{clock} ahead of rank 0's",
}


def build_table(setup: Setup) -> Table:
    """Return the settings of all ranks as a list of facts that can be pasted into an issue.

    If the ranks differ, each value is followed by its ranks. The ranks have removed secrets, user
    names and home folders from their variables.
    """
    world = f"{len(setup.ranks)} on {counted(len(setup.hosts), 'host')}"
    rows = [("ranks", f"{world}, {setup.backend}, {setup.device}, started by {setup.launcher}")]
    everyone = [{**facts, **_describe_for_lines(facts)} for facts in checks.describe_facts(setup)]
    for name, template in LINES.items():
        values = [_fill_in(template, facts) for facts in everyone]
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


def _describe_for_lines(facts: Facts) -> dict[str, Any]:
    """Return the texts that LINES use beside the facts; None is unknown."""
    interface, pcie = facts.get("interface") or {}, facts.get("gpu_pcie")
    smt, ahead = facts.get("smt"), facts.get("clock_ahead_seconds") or 0.0
    files = facts.get("ulimit_open_files")
    configured = (facts.get("nccl_conf") or {}).items()
    return {
        "inside": facts.get("container" if facts["container"] != "none" else "virtual_machine"),
        "smt_state": None if smt is None else "on" if smt else "off",
        "files": "unlimited" if files == -1 else files,
        "pcie": pcie and f"x{pcie['width']:g} at {pcie['transfers_per_second'] / 1e9:g} GT/s",
        "interface_name": interface.get("name"),
        "interface_address": next(iter(facts.get("addresses") or []), facts.get("address") or "-"),
        "interface_mtu": interface.get("mtu_nbytes"),
        "rdma": ", ".join(facts.get("rdma_devices") or []) or None,
        "nccl_files": "; ".join(
            f"{file}: {' '.join(f'{name}={value}' for name, value in settings.items())}"
            for file, settings in configured
        ),
        "clock": f"{ahead:+.3f} s" if abs(ahead) > 1e-3 else None,
    }


def _fill_in(template: str, facts: Facts) -> str:
    parts = []
    for part in template.split("|"):
        names = [name for _, name, _, _ in string.Formatter().parse(part) if name]
        if all(facts.get(name) is not None for name in names):
            parts.append(part.format_map(facts))
    return "".join(parts)


def _fold(values: list[Any]) -> str:
    """Show a value that all ranks share once, else each value with its ranks."""
    groups = folded(values)
    if len(groups) == 1:
        return str(groups[0][0])
    return "; ".join(f"{value or '-'} ({name_ranks(ranks)})" for value, ranks in groups)
