"""The facts that are stored with a launch: who runs where, and what each rank and host used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import psutil

from ddpbench.catalog.backends import Backend
from ddpbench.records import store
from ddpbench.records.schema import Launch
from ddpbench.runtime import control, cpu, environment
from ddpbench.runtime.world import World


def gather_launch_record(
    world: World,
    backend: Backend,
    device: str,
    index: int,
    times: dict[str, float],
    facts: dict[str, object],
    cases: int,
) -> Launch:
    """Who runs where, for the record; every rank tells its own part.

    facts: what the command adds to those of the environment.
    """
    addresses = world.addresses
    mine = {
        **environment.rank_facts(),
        "interface": environment.interface_of(next(iter(addresses), world.address)),
        "addresses": addresses,
        "gpu_before": environment.gpu_state(),
    }
    everyone = control.gather_values(world, mine)
    return Launch(
        index=index,
        backend=backend.name,
        provider=backend.provider(device),
        library=backend.library(),
        launcher=world.placement.launcher,
        world_size=world.world_size,
        facts={**environment.run_facts(), **facts} if world.rank == 0 else {},
        ranks=tuple(everyone),
        clock=times,
        started=store.format_now(),
        cases=cases,
    )


def agree_thread_count(world: World) -> int:
    """Compute threads of one rank, the same in all: what the user set, else its share of cores.

    torchrun sets OMP_NUM_THREADS to 1 where the user has not.
    """
    said = os.environ.get("OMP_NUM_THREADS", "")
    cores = sorted(os.sched_getaffinity(0))
    everyones = control.gather_values(world, cores)
    sharers = sum(everyones[rank] == cores for rank in world.neighbours)  # bound ranks share none
    by_torchrun = said == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    own = int(said) if said.isdecimal() and int(said) and not by_torchrun else 0
    return int(min(control.gather_values(world, own or max(1, len(cores) // sharers))))


def gather_usage(world: World, whole: cpu.CpuMeter) -> list[dict[str, object]]:
    """What each rank used since the meter's start, for the end of a launch's record."""
    mine = {"cpu": asdict(whole.stop()), "gpu_after": environment.gpu_state()}
    return control.gather_values(world, mine)


def gather_others_share(world: World, meter: cpu.CpuMeter) -> float | None:
    """The largest share of a host's cores that other processes used, over the hosts."""
    return compute_others_share(world, control.gather_values(world, read_spent_seconds(meter)))


def read_spent_seconds(meter: cpu.CpuMeter) -> list[float | None]:
    """What this rank tells the others of itself and its host since the meter's start, in seconds:
    its own CPU time, that of all processes, and the wall's."""
    used = meter.stop()
    return [used.own_seconds, used.host_busy_seconds, used.wall_seconds]


def compute_others_share(world: World, everyone: Sequence[Sequence[Any]]) -> float | None:
    """The same as `others_share`, of what every rank has told."""
    shares = []
    for members in world.machines.values():
        _, busy, wall = everyone[members[0]]
        own = [everyone[rank][0] for rank in members]
        shares.append(cpu.others_share(busy, own, wall, psutil.cpu_count() or 1))
    return max((share for share in shares if share is not None), default=None)
