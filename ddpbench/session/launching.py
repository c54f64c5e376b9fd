"""What measuring commands share: the options all have, the run's folder, a launch from its first
agreement to its end, the facts that are stored with it."""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psutil

from ddpbench.catalog.backends import Backend
from ddpbench.launch.placement import Refused
from ddpbench.records import store
from ddpbench.records.schema import Launch, Plan, Run
from ddpbench.runtime import agree, cpu, environment, network
from ddpbench.runtime.world import Rendezvous, World

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Self


@dataclass(frozen=True)
class Options:
    """What the user asked for, checked; None: the default depends on device or launcher."""

    command: ClassVar[str]
    usual_launches: ClassVar[int] = 1  # where ddpbench starts the ranks and nobody said how many

    backend: tuple[str, ...]
    device: str
    nproc: int | None
    modules: tuple[str, ...]
    share_gpu: bool
    init_method: str | None
    master_addr: str | None
    master_port: int | None
    timeout: float
    watchdog: str
    launches: int | None
    seed: int | None
    format: str
    columns: tuple[str, ...] | None
    quiet: bool
    output: str | None
    join: str | None
    launch: int
    progress: bool
    paced: bool  # each launch waits for a line of stdin, and its exit code goes to stdout

    @classmethod
    def of(cls, namespace: argparse.Namespace) -> Self:
        """These options as a command line gave them."""
        given = {field.name: getattr(namespace, field.name) for field in fields(cls)}
        return cls(**{**given, "modules": tuple(given["modules"])})

    @property
    def subjects(self) -> tuple[str, ...]:
        """What is measured, by name."""
        raise NotImplementedError

    def plan(self, seed: int) -> Plan:
        """The protocol as it is stored with the run."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises Refused, with one sentence, for options that do not go together."""

    @property
    def shows_progress(self) -> bool:
        """Whether a terminal is there for it: here, or where ddpbench started the ranks."""
        return not self.quiet and (self.progress or sys.stderr.isatty())

    def rendezvous(self) -> Rendezvous:
        """How the ranks meet; a file serves one launch only."""
        method = self.init_method
        if method and method.startswith("file://") and self.join is not None:
            method = f"{method}.{self.launch}"
        return Rendezvous(method, self.master_addr, self.master_port, self.timeout, self.watchdog)

    def named(self) -> dict[str, object]:
        """What must be the same in all ranks, by the names of the options."""
        names = {"async_op": "async", "modules": "import"}
        return {names.get(k, k.replace("_", "-")): v for k, v in asdict(self).items()}


def run_folder(ranks: World, asked: Options) -> tuple[Path, Plan]:
    """The run's folder, made by rank 0 unless it exists already, and its plan."""
    found: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            folder = (
                Path(asked.join) if asked.join else new_run(asked, len(ranks.who), sys.argv[1:])
            )
            found = {"folder": str(folder.resolve()), "plan": asdict(store.read(folder).plan)}
        except (OSError, store.InvalidRun) as error:
            found = {"error": cannot_write(error)}
    found = agree.from_rank_0(ranks, found)
    if "error" in found:
        raise Refused(str(found["error"]))
    return Path(found["folder"]), Plan(**found["plan"])


def new_run(asked: Options, world_size: int, words: Sequence[str]) -> Path:
    """Make the folder of a new run that `words` asked for. Raises OSError when it cannot."""
    seed = random.SystemRandom().randrange(2**31) if asked.seed is None else asked.seed
    record = Run(
        id="",
        command=asked.command,
        command_line=("ddpbench", asked.command, *words),
        plan=asked.plan(seed),
        started=store.now(),
        operations=asked.subjects,
        backends=asked.backend,
    )
    label = f"{asked.command}-{'+'.join(asked.backend)}-w{world_size}"
    return store.create(Path(asked.output) if asked.output else None, record, label)


def cannot_write(error: Exception) -> str:
    """The sentence for a results folder that cannot be made."""
    if isinstance(error, OSError) and error.strerror:
        return (
            f"results cannot be written to {error.filename} ({error.strerror}): "
            "name a folder that can with --output"
        )
    return str(error)


def torch_name(ranks: World, backend: Backend) -> str:
    """The name by which torch knows the backend. Refused in all ranks together where the
    backend's own launcher did not start them."""
    name = backend.register() if backend.register else backend.name
    size, objection = backend.size(), None
    if backend.interfaces:
        objection = network.misnamed(backend.interfaces, len(ranks.hosts) > 1)
    if size is not None and size != ranks.world_size:
        objection = (
            f"{backend.name} sees a world of {size}, not of {ranks.world_size} ranks: start them "
            f"with the mpirun of {backend.library()}, or with srun and the --mpi that it knows "
            "(pmix for Open MPI, pmi2 for MPICH)"
        )
    if (sentence := agree.first_objection(ranks, objection)) is not None:
        raise Refused(sentence)
    return name


def connect(ranks: World, backend: Backend, tested: dist.ProcessGroup | None) -> None:
    """One barrier, so that connections made at the first call are no part of the first case.

    All ranks call it; None: this one is not in the group.
    """
    import torch.distributed as dist

    objection = None
    try:
        if tested is not None:
            dist.barrier(group=tested)
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or ["no text"]
        objection = f"{backend.name} cannot connect its ranks: {lines[0]} {lines[-1]}"
    if (sentence := agree.first_objection(ranks, objection)) is not None:
        raise Refused(sentence)


def launch_record(
    ranks: World,
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
    addresses = ranks.addresses
    mine = {
        **environment.rank_facts(),
        "interface": environment.interface_of(next(iter(addresses), ranks.address)),
        "addresses": addresses,
        "gpu_before": environment.gpu_state(),
    }
    everyone = agree.everyones(ranks, mine)
    return Launch(
        index=index,
        backend=backend.name,
        provider=backend.provider(device),
        library=backend.library(),
        launcher=ranks.place.launcher,
        world_size=ranks.world_size,
        facts={**environment.run_facts(), **facts} if ranks.rank == 0 else {},
        ranks=tuple(everyone),
        clock=times,
        started=store.now(),
        cases=cases,
    )


def threads(ranks: World) -> int:
    """Compute threads of one rank, the same in all: what the user set, else its share of cores.

    torchrun sets OMP_NUM_THREADS to 1 where the user has not.
    """
    said = os.environ.get("OMP_NUM_THREADS", "")
    cores = sorted(os.sched_getaffinity(0))
    everyones = agree.everyones(ranks, cores)
    sharers = sum(everyones[rank] == cores for rank in ranks.neighbours)  # bound ranks share none
    by_torchrun = said == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    own = int(said) if said.isdecimal() and int(said) and not by_torchrun else 0
    return int(min(agree.everyones(ranks, own or max(1, len(cores) // sharers))))


def used(ranks: World, whole: cpu.CpuMeter) -> list[dict[str, object]]:
    """What each rank used since the meter's start, for the end of a launch's record."""
    mine = {"cpu": asdict(whole.stop()), "gpu_after": environment.gpu_state()}
    return agree.everyones(ranks, mine)


def others_share(ranks: World, meter: cpu.CpuMeter) -> float | None:
    """The largest share of a host's cores that other processes used, over the hosts."""
    return share_of_others(ranks, agree.everyones(ranks, spent(meter)))


def spent(meter: cpu.CpuMeter) -> list[float | None]:
    """What this rank tells the others of itself and its host since the meter's start, in seconds:
    its own CPU time, that of all processes, and the wall's."""
    used = meter.stop()
    return [used.own_seconds, used.host_busy_seconds, used.wall_seconds]


def share_of_others(ranks: World, everyone: Sequence[Sequence[Any]]) -> float | None:
    """The same as `others_share`, of what every rank has told."""
    shares = []
    for members in ranks.machines.values():
        _, busy, wall = everyone[members[0]]
        own = [everyone[rank][0] for rank in members]
        shares.append(cpu.others_share(busy, own, wall, psutil.cpu_count() or 1))
    return max((share for share in shares if share is not None), default=None)
