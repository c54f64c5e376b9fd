"""The only place where process groups are made and destroyed.

The default group is gloo and carries control only; what is measured runs in a group of its own,
so that a faulty or hanging backend cannot spoil the agreement about it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ddpbench.hang import board
from ddpbench.hang.places import described
from ddpbench.hang.self_report import Who, whoami
from ddpbench.hang.watchdog import HURRIED_SECONDS, SIGNAL_SECONDS, Watchdog
from ddpbench.launch import family, placement, slurm, sockets
from ddpbench.launch.placement import Placement, Refused
from ddpbench.launch.rendezvous import serve
from ddpbench.launch.sockets import Connection
from ddpbench.records import redact
from ddpbench.runtime import control, network
from ddpbench.runtime.network import NetPlace
from ddpbench.runtime.subgroups import Subgroup, divide_ranks

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

REACH_SECONDS = 10.0  # for the other hosts to answer: TCP asks again after 1, 3 and 7 s


@dataclass(frozen=True)
class Rendezvous:
    """What the user said about how ranks meet; None where nothing was said."""

    init_method: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    timeout_seconds: float = 60.0
    watchdog: str = "end"  # what a missed deadline brings: "end", "tell" or "off"

    @property
    def patience(self) -> timedelta:
        """How long torch's own groups wait: longer than the watchdog, which can name ranks."""
        if self.watchdog != "end":
            return timedelta(days=20)  # more would overflow 32 bits of milliseconds
        return timedelta(seconds=self.timeout_seconds + 30)


@dataclass(frozen=True)
class World:
    """All ranks of a launch, met: control group, watchdog, and who is where."""

    place: Placement
    who: tuple[Who, ...]
    net: tuple[NetPlace, ...]
    watchdog: Watchdog
    timeout: timedelta
    share_gpu: bool = False
    gpu_mates: list[int] = field(default_factory=list)  # the ranks on this rank's GPU
    control_connections: frozenset[Connection] = frozenset()  # not the backend's

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def interrupted(self) -> str | None:
        """The name of the signal that asked this rank to stop, if one did."""
        number = self.watchdog.signal
        return None if number is None else signal.Signals(number).name

    @property
    def machines(self) -> dict[str, list[int]]:
        """The ranks that share cores, memory and clock; keyed by boot id."""
        return self._by(lambda who: who.boot_id)

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The ranks that share a network: containers of one machine can be several hosts."""
        return self._by(lambda who: f"{who.boot_id}/{who.network}")

    def _by(self, key: Callable[[Who], str]) -> dict[str, list[int]]:
        """Ranks by key, in order of first rank."""
        groups: dict[str, list[int]] = {}
        for who in self.who:
            groups.setdefault(key(who), []).append(who.rank)
        return groups

    @property
    def neighbours(self) -> list[int]:
        """The ranks on this rank's machine, itself among them."""
        return self.machines[self.who[self.rank].boot_id]

    @property
    def address(self) -> str:
        """This rank's address as gloo on the other hosts sees it."""
        if len(self.hosts) == 1:
            return "127.0.0.1"
        return next(iter(self.net[self.rank].listening), "127.0.0.1")

    @property
    def addresses(self) -> list[str]:
        """From which the tested backend, once connected, has connections to other hosts; the most
        used first. Found in this process's sockets; a backend that uses none has no address."""
        mine = self.net[self.rank]
        theirs = (place.addresses for place in self.net if place.network != mine.network)
        new = sockets.connections() - self.control_connections
        return sockets.local_addresses(new, frozenset().union(*theirs))

    def agree_device(self, kind: str) -> torch.device:
        """This rank's device: a GPU of its own, in order of the ranks on the machine.

        All ranks call it together. Raises Refused, naming the ranks, when two would share one.
        """
        import torch

        if kind == "cpu":
            return torch.device("cpu")
        index = self.neighbours.index(self.rank) % max(1, torch.cuda.device_count())
        gpu = str(torch.cuda.get_device_properties(index).uuid)  # a task may see its own GPU only
        everyones = control.gather_values(self, [self.who[self.rank].boot_id, gpu])
        same = [rank for rank, each in enumerate(everyones) if each == everyones[self.rank]]
        shared = [rank for rank, each in enumerate(everyones) if everyones.count(each) > 1]
        allowed = self.share_gpu or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        if shared and not allowed:
            raise Refused(
                f"ranks {', '.join(map(str, shared))} would share GPUs: start at most one rank a "
                "GPU, or say --share-gpu"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        self.gpu_mates[:] = same
        return device

    @contextlib.contextmanager
    def agree_group(
        self, torch_name: str, members: Sequence[int] | None = None
    ) -> Iterator[dist.ProcessGroup]:
        """A group of these ranks, None: all, on the backend that torch knows by this name.

        All ranks call it, in the same order; one that is no member gets nothing of use.
        """
        import torch.distributed as dist

        self.watchdog.phase(f"the set-up of the {torch_name} group")
        try:
            group = dist.new_group(members, backend=torch_name, timeout=self.timeout)
        except (AssertionError, ImportError, TypeError, ValueError) as error:
            raise RuntimeError(f"no group on {torch_name}: {control.first_line(error)}") from error
        try:
            yield group
        finally:
            if sys.exc_info()[0] is None:
                _destroy(group)

    @contextlib.contextmanager
    def agree_subgroups(
        self, torch_name: str, world_group: dist.ProcessGroup, names: Sequence[str]
    ) -> Iterator[dict[str, Subgroup]]:
        """This rank's subgroup in each of these partitions, by name.

        world_group: all ranks, on the same backend.
        """
        with contextlib.ExitStack() as groups:
            yield {
                name: self._agree_subgroup(name, torch_name, world_group, groups) for name in names
            }

    def _agree_subgroup(
        self,
        name: str,
        torch_name: str,
        world_group: dist.ProcessGroup,
        groups: contextlib.ExitStack,
    ) -> Subgroup:
        partition = divide_ranks(name, list(self.hosts.values()))
        if partition.size == self.world_size:
            group = None if partition.objection else world_group
            return Subgroup(partition, world_group, group, rank=self.rank)
        subgroup = Subgroup(partition, world_group, None)
        for number, members in enumerate(partition.subgroups):
            group = groups.enter_context(self.agree_group(torch_name, members))
            if self.rank in members:
                rank = members.index(self.rank)
                subgroup = Subgroup(partition, world_group, group, number, rank)
        return subgroup


@contextlib.contextmanager
def join_world(
    place: Placement, rendezvous: Rendezvous, share_gpu: bool = False
) -> Iterator[World]:
    """All ranks, met. Raises Refused, naming the ranks, when some do not come in time;
    ends this process where these are seen to be stopped."""
    import torch.distributed as dist

    family.report(family.JOINS)
    timeout = timedelta(seconds=rendezvous.timeout_seconds)
    store = _meet(place, rendezvous, timeout)
    who, net = _gather_introductions(store, place, rendezvous.timeout_seconds)
    second = board.client(store, place.world_size)
    hurried = place.launcher == "mpirun" and placement.PATIENT not in os.environ
    patience = HURRIED_SECONDS if hurried else SIGNAL_SECONDS
    watchdog = Watchdog(
        second, place.rank, who, rendezvous.timeout_seconds, board.leave, patience,
        rendezvous.watchdog,
    )  # fmt: skip
    family.report(family.MET)
    try:
        with network.kept_on_loopback(net):
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("ddpbench/control", store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=rendezvous.patience,
            )
        own = sockets.connections()
        world = World(
            place, who, net, watchdog, rendezvous.patience, share_gpu, control_connections=own
        )
        yield world
        # The ranks leave together: the store lives in one of them.
        watchdog.phase("the end of the run")
        control.broadcast_decision(world, 0)
    except Refused:
        raise
    except Exception as error:
        cause, where = _told(error)
        watchdog.end(cause, place=where)
    finally:
        watchdog.close()
        family.report(family.LEFT)
        if dist.is_initialized():
            _destroy(None)


def _destroy(group: dist.ProcessGroup | None) -> None:
    """End a group, None: all. A plug-in's group may lack what torch asks of it then."""
    import torch
    import torch.distributed as dist

    if torch.__version__ < "2.9":
        # There gloo's group waits for its threads and holds Python's lock, for which a thread that
        # frees a tensor of the last call waits in turn: never to end.
        time.sleep(0.02)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group(group)


def _meet(place: Placement, rendezvous: Rendezvous, timeout: timedelta) -> dist.Store:
    """The store all ranks share. Raises Refused when it cannot be had."""
    import torch.distributed as dist

    url = _url(place, rendezvous)
    try:
        if not url.startswith("tcp://"):  # torchrun's own store, or a file
            met = dist.rendezvous(url, place.rank, place.world_size, timeout=timeout)
            store: dist.Store = next(met)[0]
            return store
        host, port = url.removeprefix("tcp://").rsplit(":", 1)
        host = host.strip("[]")
        if (why := network.unknown(host)) is not None:
            # c10d would ask again and again; one rank of each host that cannot tells it.
            raise Refused(why, speaker=place.rank - place.local_rank)
        if place.rank == 0:
            placement.require_free(int(port))
            one_host = place.local_world_size == place.world_size
            return serve(host, int(port), timeout, one_host)
        return dist.TCPStore(host, int(port), timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        reason = control.first_line(error)
        family.end_if_stopped(place.rank, rendezvous.timeout_seconds)
        raise Refused(
            f"rank {place.rank} could not meet the others at {url} within "
            f"{timeout.total_seconds():g} s: {reason}",
            speaker=place.rank,
        ) from None


def _url(place: Placement, rendezvous: Rendezvous) -> str:
    """Where the ranks meet: what the user said, else what the launcher offers."""
    method = rendezvous.init_method
    if method and method != "env://":
        return method
    address = rendezvous.master_addr or os.environ.get("MASTER_ADDR")
    port = rendezvous.master_port or os.environ.get("MASTER_PORT")
    said = rendezvous.master_addr or rendezvous.master_port
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        if not said:
            return "env://"
        if rendezvous.master_port is None:  # MASTER_PORT is the port of the launcher's own store
            raise Refused(
                f"--master-addr {rendezvous.master_addr} needs a port that is free there: give "
                "--master-port too, or neither"
            )
    if address and port:
        return f"tcp://{address}:{port}"
    if place.launcher == "srun":
        host, number = placement.slurm_address()
        return f"tcp://{address or slurm.node_address(host, place)}:{port or number}"
    if place.launcher == "mpirun":
        return f"tcp://{_broadcast_address_over_mpi(place, rendezvous, address, port)}"
    return f"tcp://{address or '127.0.0.1'}:{port or placement.free_port()}"


def _broadcast_address_over_mpi(
    place: Placement, rendezvous: Rendezvous, address: str | None, port: str | int | None
) -> str:
    """Rank 0's address and a free port there, told to all over MPI itself."""
    from importlib.util import find_spec

    if find_spec("mpi4py") is None:
        raise Refused(
            "under mpirun the ranks meet over mpi4py, which is not installed: "
            "pip install 'ddpbench[mpi]', or give --master-addr and --master-port"
        )
    from ddpbench.mpi_backend import library as mpi_library

    mpi_library.start(rendezvous.timeout_seconds)
    rank, size = mpi_library.world()
    if size != place.world_size or rank != place.rank:
        raise Refused(
            f"mpirun calls this rank {place.rank} of {place.world_size}, mpi4py calls it {rank} of "
            f"{size}: mpi4py uses another MPI than this mpirun; use the mpirun that belongs to it"
        )
    local = place.local_world_size == place.world_size
    return mpi_library.broadcast_meeting_point(local, address, port)


def _gather_introductions(
    store: dist.Store, place: Placement, seconds: float
) -> tuple[tuple[Who, ...], tuple[NetPlace, ...]]:
    """Who and where all ranks are, once gloo can connect them.

    Raises Refused in all together where it cannot, or naming those that do not come in time.
    """
    me, said = whoami(place.rank), os.environ.get(network.GLOO)
    with network.standing(place.rank, f"{me.boot_id}/{me.network}", said) as mine:
        told = _gather_over_store(store, place, seconds, "here", [asdict(me), asdict(mine)])
        who = tuple(Who(**each) for each, _ in told)
        places = tuple(NetPlace(**each) for _, each in told)
        sentence = network.objection(places)
        if sentence is None and len({each.network for each in places}) > 1:
            why = network.unreached(place.rank, places, min(REACH_SECONDS, seconds))
            answers = _gather_over_store(store, place, seconds, "reached", why)
            sentence = next((each for each in answers if each is not None), None)
    if sentence is not None:
        store.set(f"ddpbench/refused/{place.rank}", "1")
        if place.rank == 0:  # where the store lives: not before all know
            with contextlib.suppress(Refused):
                _await_all(store, place, 5.0, "refused")
        raise Refused(sentence)
    return who, places


def _gather_over_store(
    store: dist.Store, place: Placement, seconds: float, what: str, mine: Any
) -> Any:
    """Every rank's JSON-able value, over the store. Raises Refused, naming who did not come."""
    store.set(f"ddpbench/{what}/{place.rank}", json.dumps(mine))
    _await_all(store, place, seconds, what)
    keys = [f"ddpbench/{what}/{rank}" for rank in range(place.world_size)]
    return [json.loads(store.get(key)) for key in keys]


def _await_all(store: dist.Store, place: Placement, seconds: float, what: str) -> None:
    """Wait until every rank has told `what`. Raises Refused, naming those that do not in time."""
    until = time.monotonic() + seconds
    absent = list(range(place.world_size))
    try:
        while absent := [r for r in absent if not store.check([f"ddpbench/{what}/{r}"])]:
            if time.monotonic() > until:
                break
            time.sleep(0.01)
    except RuntimeError:
        family.end_if_stopped(place.rank, seconds)
        speaker = next((r for r in range(1, place.world_size) if r not in absent), place.rank)
        raise Refused("rank 0, where the ranks meet, has left", speaker) from None
    if absent:
        family.end_if_stopped(place.rank, seconds)
        if place.rank == 0:
            time.sleep(1.0)  # the others' store lives here: let them come to their own end
        raise Refused(
            f"of {place.world_size} ranks these did not come within {seconds:g} s (--timeout): "
            f"{', '.join(map(str, absent))}; see why they did not start",
            speaker=next(r for r in range(place.world_size) if r not in absent),
        )


def _told(error: Exception) -> tuple[str, str]:
    """An error as a cause and a place; one that neither a backend nor the machine raised is a
    defect, shown whole."""
    if not isinstance(error, (RuntimeError, OSError, MemoryError)):
        sys.stderr.write(redact.text("".join(traceback.format_exception(error))))
    return described(error)
