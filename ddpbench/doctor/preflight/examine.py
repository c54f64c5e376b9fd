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
from importlib.util import find_spec
from typing import Any

from ddpbench.analysis.rank_setup import Setup
from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.preflight import dangers, differences
from ddpbench.doctor.preflight.table import build_tables
from ddpbench.measure import clock
from ddpbench.records import redact
from ddpbench.records.schema import Finding
from ddpbench.records.wording import counted
from ddpbench.runtime import control, environment

# Facts in the record of a launch that serve another purpose.
LEFT_OUT = ("gpu_before", "boot_id", "time_namespace", "pid", "load_average")
# One entry adds a check. analysis/findings.py checks what every command needs, such as versions.
CHECKS: tuple[Callable[[Setup], Iterator[Finding]], ...] = (
    differences.same_facts,
    differences.same_variables,
    differences.interfaces,
    differences.own_name,
    differences.clocks,
    dangers.costly_settings,
    dangers.debug_builds,
    dangers.bound_cores,
    dangers.narrow_affinity,
    dangers.far_gpu,
    dangers.narrow_slot,
    dangers.memory_errors,
    dangers.gpu_in_use,
    dangers.locked_memory,
    dangers.open_files,
    dangers.shared_memory,
    dangers.free_memory,
)


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
    return Outcome(
        lines=(_summary(len(ranks), len(hosts)),),
        unchecked=tuple(_unchecked(setup, context.launch.ranks, objection)),
        findings=find_all(setup),
        figures=figures,
        tables=build_tables(figures, setup.backend),
    )


def find_all(setup: Setup) -> tuple[Finding, ...]:
    """Return a finding for everything that is odd or dangerous."""
    return tuple(finding for check in CHECKS for finding in check(setup))


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


def _summary(ranks: int, hosts: int) -> str:
    if ranks == 1:
        return "checked the settings of 1 rank"
    return f"compared the settings of {ranks} ranks on {counted(hosts, 'host')}"


def _unchecked(
    setup: Setup, recorded: Sequence[Mapping[str, Any]], clocks: str | None
) -> Iterator[str]:
    if clocks is not None:
        yield f"the hosts' clocks: {clocks}"
    if len(setup.ranks) == 1:
        yield "differences between ranks: there is only one rank"
    if any(facts.get("gpu_uuid") and facts.get("gpu_before") is None for facts in recorded):
        missing = find_spec("pynvml") is None
        reason = "pip install nvidia-ml-py" if missing else "NVML does not know these GPUs"
        yield f"clocks, NVLinks and memory errors of GPUs: {reason}"
    if not any(facts.get("allowed_cpus") for facts in setup.ranks):
        yield "cores that are free for binding: the control group does not list its cores"
