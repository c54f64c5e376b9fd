"""The connected ranks of a launch. Only this module creates and ends process groups.

The default group is gloo and carries control only. Measured calls run in a group of their own, so
that a faulty or hanging backend cannot disturb the control.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import psutil

from ddpbench.hang.places import describe_error, is_of_program
from ddpbench.hang.status_board import RankIdentity, identify
from ddpbench.hang.watchdog import HURRIED_SECONDS, SIGNAL_SECONDS, CommandWatchdog
from ddpbench.launch import sockets, supervise
from ddpbench.launch.placement import PATIENT, Placement, Refused, free_port, slurm_address
from ddpbench.launch.sockets import Connection
from ddpbench.records import redact
from ddpbench.records.wording import install_extra, name_ranks
from ddpbench.runtime import control, cpu, devices, network
from ddpbench.runtime.network import Endpoint
from ddpbench.runtime.subgroups import Subgroup, divide_ranks

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """All ranks of a launch: their hosts, the watchdog, and the process groups.

    Methods whose name begins with `agree_` are collective: all ranks call them in the same order.
    """

    placement: Placement
    members: tuple[RankIdentity, ...]  # by rank
    endpoints: tuple[Endpoint, ...]  # by rank
    watchdog: CommandWatchdog
    timeout: timedelta
    share_gpu: bool = False
    gpu_mates: list[int] = field(default_factory=list)  # the ranks on this rank's GPU
    control_connections: frozenset[Connection] = frozenset()  # not the backend's

    @property
    def rank(self) -> int:
        return self.placement.rank

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @property
    def interrupted(self) -> str | None:
        """Return the name of the signal that asked this rank to stop; None if none did."""
        number = self.watchdog.signal
        return None if number is None else signal.Signals(number).name

    @property
    def machines(self) -> dict[str, list[int]]:
        """Return boot id → ranks that share cores, memory and clock."""
        return self._group_ranks(lambda member: member.boot_id)

    @property
    def hosts(self) -> dict[str, list[int]]:
        """Return network → ranks that share it: containers of one machine can be several hosts."""
        return self._group_ranks(lambda member: f"{member.boot_id}/{member.network}")

    def _group_ranks(self, key: Callable[[RankIdentity], str]) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for member in self.members:
            groups.setdefault(key(member), []).append(member.rank)
        return groups

    @property
    def neighbours(self) -> list[int]:
        """Return the ranks on this rank's machine, including itself."""
        return self.machines[self.members[self.rank].boot_id]

    def memory_mates(self, device: torch.device) -> list[int]:
        """Return the ranks that share the memory of this rank's device, including itself."""
        return self.neighbours if devices.of(device).memory == "host" else self.gpu_mates

    @property
    def address(self) -> str:
        """Return this rank's address for gloo on the other hosts."""
        if len(self.hosts) == 1:
            return "127.0.0.1"
        return next(iter(self.endpoints[self.rank].listening), "127.0.0.1")

    @property
    def addresses(self) -> list[str]:
        """Return local addresses from which the backend reaches other hosts, the most used first.

        Read from this process's sockets once the backend has connected; empty for a backend
        without sockets.
        """
        own = self.endpoints[self.rank]
        remote = (other.addresses for other in self.endpoints if other.network != own.network)
        connections = sockets.list_connections() - self.control_connections
        return sockets.local_addresses(connections, frozenset().union(*remote))

    def agree_device(self, name: str) -> torch.device:
        """Return this rank's device: of those that it sees, the one with its number on its host.

        With --share-gpu, two ranks may share one. Raises Refused with the ranks if more would.
        """
        kind = devices.get(name)
        host = next(ranks for ranks in self.hosts.values() if self.rank in ranks)
        index = host.index(self.rank) % max(1, kind.count())
        identity = kind.identity(index)
        used = control.gather_values(self, identity)
        if None in used:  # all ranks may share it
            return kind.select(0)
        users, most = Counter(used), 2 if self.share_gpu else 1
        if shared := [rank for rank, device in enumerate(used) if users[device] > most]:
            advice = "two ranks per GPU" if most == 2 else "one rank per GPU, or add --share-gpu"
            raise Refused(f"{name_ranks(shared, 3)} would share GPUs: start at most {advice}")
        if len(users) < len(used) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            # NCCL refuses two ranks of one host on one GPU, so make each rank its own host.
            os.environ.setdefault("NCCL_HOSTID", f"ddpbench-rank-{self.rank}")
            os.environ.setdefault("NCCL_NET", "Socket")
        self.gpu_mates[:] = [rank for rank, device in enumerate(used) if device == identity]
        return kind.select(index)

    @contextlib.contextmanager
    def agree_group(
        self,
        torch_name: str,
        members: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> Iterator[dist.ProcessGroup]:
        """Create a process group of these ranks (None: all) on a backend, by its name in torch.

        Every rank of the world calls it, even ranks that are not members. device: of this rank, for
        a backend that binds its groups to one. Such a group connects at once: raises Refused in all
        ranks together if it cannot.
        """
        import torch.distributed as dist

        self.watchdog.begin_phase(f"the set-up of the {torch_name} group")
        bound = devices.of(device).group_options(device, torch_name) if device else {}
        objection = None
        try:
            group = dist.new_group(members, backend=torch_name, timeout=self.timeout, **bound)
        except (AssertionError, ImportError, TypeError, ValueError) as error:
            raise RuntimeError(f"no group on {torch_name}: {control.first_line(error)}") from error
        except RuntimeError as error:
            if not bound:
                raise
            objection = describe_failed_connection(torch_name, error)
        if bound and (sentence := control.agree_objection(self, objection)) is not None:
            raise Refused(sentence)
        try:
            yield group
        finally:
            if sys.exc_info()[0] is None:
                _destroy_group(group)

    @contextlib.contextmanager
    def agree_subgroups(
        self,
        torch_name: str,
        world_group: dist.ProcessGroup,
        names: Sequence[str],
        device: torch.device,
    ) -> Iterator[dict[str, Subgroup]]:
        """Return this rank's subgroup in each of these partitions, by name.

        world_group: all ranks, on the same backend. device: this rank's.
        """
        own: dict[str, Subgroup] = {}
        with contextlib.ExitStack() as groups:
            for name in names:
                partition = divide_ranks(name, list(self.hosts.values()))
                if partition.size == self.world_size:
                    whole = None if partition.objection else world_group
                    own[name] = Subgroup(partition, world_group, whole, rank=self.rank)
                    continue
                own[name] = Subgroup(partition, world_group, None)
                for number, members in enumerate(partition.subgroups):
                    group = groups.enter_context(self.agree_group(torch_name, members, device))
                    if self.rank in members:
                        rank = members.index(self.rank)
                        own[name] = Subgroup(partition, world_group, group, number, rank)
            yield own

    def agree_thread_count(self) -> int:
        """Agree on the compute threads of one rank: OMP_NUM_THREADS, else its share of the cores.

        A value of 1 under torchrun does not count: torchrun sets it if the user has not set any.
        """
        text = os.environ.get("OMP_NUM_THREADS", "")
        cores = sorted(os.sched_getaffinity(0))
        all_cores = control.gather_values(self, cores)
        # Ranks that are bound to other cores share none.
        sharers = sum(all_cores[rank] == cores for rank in self.neighbours)
        by_torchrun = text == "1" and "TORCHELASTIC_RUN_ID" in os.environ
        chosen = int(text) if text.isdecimal() and not by_torchrun else 0
        return int(min(control.gather_values(self, chosen or max(1, len(cores) // sharers))))

    def agree_others_share(self, meter: cpu.CpuMeter) -> float | None:
        """Agree on the largest share, over the hosts, of a host's cores that other processes used.

        None if the time since the meter's start is too short.
        """
        usage = meter.stop()
        own_usage = [usage.own_seconds, usage.host_busy_seconds, usage.wall_seconds]
        spent = control.gather_values(self, own_usage)
        shares = []
        for members in self.machines.values():
            _, busy, wall = spent[members[0]]
            own = [spent[rank][0] for rank in members]
            shares.append(cpu.others_share(busy, own, wall, psutil.cpu_count() or 1))
        return max((share for share in shares if share is not None), default=None)


@contextlib.contextmanager
def join_world(
    placement: Placement, seconds: float = 60.0, ends: bool = True, share_gpu: bool = False
) -> Iterator[World]:
    """Meet the other ranks, make the control group, and end it.

    seconds: the deadline of the rendezvous and of each call. ends: whether the watchdog ends the
    run when a call misses it. Raises Refused with the ranks that do not come in time.
    """
    import torch.distributed as dist

    store = _connect_store(placement, seconds)
    members, endpoints = _gather_introductions(store, placement, seconds)
    # Later than the watchdog, which can name ranks. More days overflow 32 bits of milliseconds.
    timeout = timedelta(seconds=seconds + 30) if ends else timedelta(days=20)
    patient = {PATIENT, "OMPI_COMM_WORLD_RANK"} <= os.environ.keys()
    hurried = placement.launcher == "mpirun" and not patient
    watchdog = CommandWatchdog(
        store,
        placement.rank,
        members,
        seconds,
        terminate_seconds=HURRIED_SECONDS if hurried else SIGNAL_SECONDS,
        is_on=ends,
    )
    try:
        rank, size = placement.rank, placement.world_size
        control_store = dist.PrefixStore("ddpbench/control", store)
        control_store.set_timeout(timeout)  # nccl's ranks wait for the first of them there
        with network.keep_gloo_on_loopback(endpoints):
            dist.init_process_group(
                "gloo", store=control_store, rank=rank, world_size=size, timeout=timeout
            )
        own = sockets.list_connections()
        world = World(
            placement, members, endpoints, watchdog, timeout, share_gpu, control_connections=own
        )
        yield world
        # The ranks leave together, because one of them has the store.
        watchdog.begin_phase("the end of the run")
        control.broadcast_decision(world, 0)
    except Refused:
        raise
    except Exception as error:
        if not isinstance(error, (RuntimeError, OSError, MemoryError)) or is_of_program(
            error, False
        ):
            # Backends and machines do not raise these: show a defect's whole traceback.
            sys.stderr.write(redact.text("".join(traceback.format_exception(error))))
        cause, place = describe_error(error)
        watchdog.end(cause, place=place)
    finally:
        watchdog.close()
        if dist.is_initialized():
            _destroy_group(None)


def _connect_store(placement: Placement, seconds: float) -> dist.Store:
    """Return the store that all ranks share. Raises Refused if it cannot be reached."""
    import torch.distributed as dist

    timeout = timedelta(seconds=supervise.add_patience(seconds))
    url = _choose_url(placement, seconds)
    try:
        if url == "env://":  # the launcher's own store
            meeting = dist.rendezvous(url, placement.rank, placement.world_size, timeout=timeout)
            store: dist.Store = next(meeting)[0]
            return store
        host, port = url.removeprefix("tcp://").rsplit(":", 1)
        host = host.strip("[]")
        if placement.rank == 0:
            one_host = placement.local_world_size == placement.world_size
            return sockets.serve(host, int(port), timeout, one_host)
        return dist.TCPStore(host, int(port), timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        reason = control.first_line(error)
        raise Refused(
            f"rank {placement.rank} could not connect to the other ranks at {url} within "
            f"{seconds:g} s: {reason}",
            speaker=placement.rank,
        ) from None


def _choose_url(placement: Placement, seconds: float) -> str:
    """Return the URL of the store: the launcher's, else from MASTER_ADDR and MASTER_PORT."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "env://"
    if address and port:
        return f"tcp://{address}:{port}"
    if placement.launcher == "srun":
        host, number = slurm_address()
        return f"tcp://{address or host}:{port or number}"
    if placement.launcher != "mpirun":
        return f"tcp://{address or '127.0.0.1'}:{port or free_port()}"
    if find_spec("mpi4py") is None:
        raise Refused(
            "mpi4py is not installed, but ranks under mpirun need it to connect: "
            f"{install_extra('mpi')}, or set MASTER_ADDR and MASTER_PORT"
        )
    from ddpbench.mpi_backend import library as mpi_library

    mpi_library.start(seconds)
    rank, size = mpi_library.world()
    if size != placement.world_size or rank != placement.rank:
        raise Refused(
            f"this is rank {placement.rank} of {placement.world_size} for mpirun, but rank {rank} "
            f"of {size} for mpi4py, because mpi4py uses another MPI: use the mpirun of "
            f"{mpi_library.library()}"
        )
    one_host = placement.local_world_size == placement.world_size
    return f"tcp://{mpi_library.broadcast_meeting_point(one_host, address, port)}"


def _gather_introductions(
    store: dist.Store, placement: Placement, seconds: float
) -> tuple[tuple[RankIdentity, ...], tuple[Endpoint, ...]]:
    """Return the RankIdentity and Endpoint of all ranks, before gloo connects them.

    Raises Refused on all ranks if gloo would listen where other hosts cannot reach it, or if ranks
    do not come in time, with their numbers.
    """
    me, rank = identify(placement.rank), placement.rank
    own = network.find_endpoint(rank, f"{me.boot_id}/{me.network}", os.environ.get(network.GLOO))
    introductions = _gather_over_store(store, placement, seconds, [asdict(me), asdict(own)])
    members = tuple(RankIdentity(**fields) for fields, _ in introductions)
    endpoints = tuple(Endpoint(**fields) for _, fields in introductions)
    if (objection := network.find_objection(endpoints)) is not None:
        _leave_together(store, rank, range(placement.world_size))
        raise Refused(objection)
    return members, endpoints


def _gather_over_store(
    store: dist.Store, placement: Placement, seconds: float, value: Any
) -> list[Any]:
    """Return all ranks' JSON-able values. Raises Refused with the ranks that did not come."""
    keys = {rank: f"ddpbench/here/{rank}" for rank in range(placement.world_size)}
    store.set(keys[placement.rank], json.dumps(value))
    deadline, absent = time.monotonic() + supervise.add_patience(seconds), list(keys)
    try:
        while absent := [rank for rank in absent if not store.check([keys[rank]])]:
            if time.monotonic() > deadline or store.check(["ddpbench/gave up"]):
                break
            time.sleep(0.01)
    except RuntimeError:
        others = [rank for rank in keys if rank > 0 and rank not in absent]
        speaker = next(iter(others), placement.rank)
        raise Refused("rank 0 exited during rendezvous: see its error above", speaker) from None
    if absent:
        present = [rank for rank in keys if rank not in absent]
        store.set("ddpbench/gave up", "1")
        _leave_together(store, placement.rank, present)
        raise Refused(
            f"{len(absent)} of {placement.world_size} ranks did not join within {seconds:g} s "
            f"(--timeout): {', '.join(map(str, absent))}; check why they did not start",
            speaker=present[0],
        )
    return [json.loads(store.get(key)) for key in keys.values()]


def _leave_together(store: dist.Store, rank: int, ranks: Iterable[int]) -> None:
    """Keep rank 0, which has the store, for at most 5 s until all these ranks leave too."""
    store.set(f"ddpbench/refused/{rank}", "1")
    deadline = time.monotonic() + 5.0
    keys = [f"ddpbench/refused/{other}" for other in ranks]
    with contextlib.suppress(RuntimeError):
        while rank == 0 and time.monotonic() < deadline and not store.check(keys):
            time.sleep(0.01)


def describe_failed_connection(name: str, error: Exception) -> str:
    """Describe why a backend cannot connect its ranks: first and last line of its error."""
    lines = [line for line in str(error).splitlines() if line.strip()] or ["no text"]
    return f"{name} cannot connect its ranks: {' '.join(dict.fromkeys((lines[0], lines[-1])))}"


def _destroy_group(group: dist.ProcessGroup | None) -> None:
    """End a group (None: all). A plug-in's group may lack a method that torch calls here."""
    import torch
    import torch.distributed as dist

    if torch.__version__ < "2.9":
        # There gloo's group waits for its threads while it holds Python's lock. A thread that
        # frees a tensor of the last call waits for that lock, and neither ends.
        time.sleep(0.02)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group(group)
