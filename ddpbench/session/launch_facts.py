"""Facts that are stored with a launch: where each rank runs, and what ranks and hosts used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import psutil

from ddpbench.runtime import control, cpu, environment, gpu_facts
from ddpbench.runtime.world import World


def gather_rank_facts(world: World) -> list[dict[str, Any]]:
    """Gather where each rank runs, once its backend has connected."""
    addresses = world.addresses
    facts = {
        **environment.rank_facts(),
        "interface": environment.interface_of(next(iter(addresses), world.address)),
        "addresses": addresses,
        "gpu_before": gpu_facts.gpu_state(),
    }
    return control.gather_values(world, facts)


def agree_thread_count(world: World) -> int:
    """Agree on the compute threads of one rank: OMP_NUM_THREADS, else its share of the cores.

    A value of 1 under torchrun does not count: torchrun sets it if the user has not set any.
    """
    text = os.environ.get("OMP_NUM_THREADS", "")
    cores = sorted(os.sched_getaffinity(0))
    all_cores = control.gather_values(world, cores)
    sharers = sum(all_cores[rank] == cores for rank in world.neighbours)  # bound ranks share none
    by_torchrun = text == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    chosen = int(text) if text.isdecimal() and not by_torchrun else 0
    return int(min(control.gather_values(world, chosen or max(1, len(cores) // sharers))))


def gather_others_share(world: World, meter: cpu.CpuMeter) -> float | None:
    """Gather the largest share, over the hosts, of a host's cores that other processes used."""
    return compute_others_share(world, control.gather_values(world, read_spent_seconds(meter)))


def read_spent_seconds(meter: cpu.CpuMeter) -> list[float | None]:
    """Return seconds since the meter's start: this rank's CPU time, its host's, the wall time."""
    usage = meter.stop()
    return [usage.own_seconds, usage.host_busy_seconds, usage.wall_seconds]


def compute_others_share(world: World, spent: Sequence[Sequence[Any]]) -> float | None:
    """Compute the same share from `read_spent_seconds` of every rank."""
    shares = []
    for members in world.machines.values():
        _, busy, wall = spent[members[0]]
        own = [spent[rank][0] for rank in members]
        shares.append(cpu.others_share(busy, own, wall, psutil.cpu_count() or 1))
    return max((share for share in shares if share is not None), default=None)
