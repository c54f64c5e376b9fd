"""What every rank tells of itself, compared: only differences and dangers are worth a word.

figures: {"launcher", "backend", "device": their names, "hosts": [the ranks of each, …],
"ranks": [facts of each rank, …]}. The facts are those of `rank_facts` and `setup_facts` in
runtime/environment.py, variables as strangers may see them, and
  library              what carries the data
  address, why_there   where gloo listens, and why there
  interface, addresses the interface in use; from where there are connections to other hosts
  clock_ahead_seconds  what the time of day is ahead of rank 0's; None: not known
  host                 in the first rank of each host: `host_facts`
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from ddpbench.analysis.setup import Setup
from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.preflight import checks
from ddpbench.measure import clock
from ddpbench.records import redact
from ddpbench.runtime import control, environment

# What the record of a launch has for a purpose of its own.
LEFT_OUT = ("gpu_before", "boot_id", "time_namespace", "pid", "load_average")


def examine(context: Context) -> Outcome:
    """All ranks call it."""
    group = context.ranks
    hosts = list(group.hosts.values())
    first = any(ranks[0] == group.rank for ranks in hosts)
    place = group.endpoints[group.rank]
    mine: dict[str, Any] = {
        **environment.setup_facts(),
        "library": context.backend.library(),
        "address": next(iter(place.listening), None),
        "why_there": redact.text(place.reason),
        "host": environment.host_facts() if first else None,
    }
    ahead, objection = _clocks_ahead(context)
    everyone = control.gather_values(group, mine)
    ranks = [
        {**{k: v for k, v in known.items() if k not in LEFT_OUT}, **told,
         "clock_ahead_seconds": seconds}
        for known, told, seconds in zip(context.launch.ranks, everyone, ahead, strict=True)
    ]  # fmt: skip
    setup = Setup(ranks, hosts, context.backend.name, context.device.type, context.launch.launcher)
    return Outcome(
        told=(_told(len(ranks), len(hosts)),),
        unchecked=tuple(_unchecked(setup, objection)),
        findings=checks.findings(setup),
        figures={
            "launcher": setup.launcher,
            "backend": setup.backend,
            "device": setup.device,
            "hosts": hosts,
            "ranks": ranks,
        },
    )


def _clocks_ahead(context: Context) -> tuple[list[float | None], str | None]:
    """What each rank's time of day is ahead of rank 0's, in seconds; why that is not known."""
    from ddpbench.measure import offsets

    with offsets.opened(context.ranks, context.launch.ranks) as clocks:
        # The time of day less the clock of stamps does not change; that clock is compared.
        since = time.time_ns() - clock.now_ns() + clocks.ahead_ns
        everyones = control.gather_values(context.ranks, since)
        own = {rank for ranks in clocks.ranks[1:] for rank in ranks} if clocks.objection else set()
        ahead = [
            None if rank in own else (its - everyones[0]) * 1e-9
            for rank, its in enumerate(everyones)
        ]
        return ahead, clocks.objection


def _told(ranks: int, hosts: int) -> str:
    if ranks == 1:
        return "the facts of 1 rank looked at"
    return f"the facts of {ranks} ranks on {hosts} host{'s' if hosts > 1 else ''} compared"


def _unchecked(setup: Setup, clocks: str | None) -> Iterator[str]:
    if clocks is not None:
        yield f"the hosts' clocks: {clocks}"
    if len(setup.ranks) == 1:
        yield "differences between ranks: there is one"
    if not any(setup.values("gpu_uuid")):
        yield "GPUs: no rank uses one"
    elif find_spec("pynvml") is None:
        yield "clocks and links of GPUs: pip install nvidia-ml-py"
    if not any(its.get("allowed_cpus") for its in setup.ranks):
        yield "cores that are free for binding: the control group does not tell which it allows"
