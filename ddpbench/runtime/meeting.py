"""The rendezvous of a launch's ranks: their store, and the identity and address of each."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ddpbench.hang.status_board import RankIdentity, identify
from ddpbench.launch import supervise
from ddpbench.launch.placement import (
    Placement,
    Refused,
    free_port,
    slurm_address,
)
from ddpbench.launch.sockets import serve
from ddpbench.records.wording import install_extra
from ddpbench.runtime import control, network
from ddpbench.runtime.network import Endpoint

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class Rendezvous:
    """The deadlines of the rendezvous and of the groups."""

    timeout_seconds: float = 60.0
    watchdog: str = "end"  # at a missed deadline: "end" the run, or "off"

    @property
    def group_timeout(self) -> timedelta:
        """Return the time-out of torch's groups: later than the watchdog, which can name ranks."""
        if self.watchdog != "end":
            return timedelta(days=20)  # more would overflow 32 bits of milliseconds
        return timedelta(seconds=self.timeout_seconds + 30)


def connect_store(placement: Placement, rendezvous: Rendezvous) -> dist.Store:
    """Return the store that all ranks share. Raises Refused if it cannot be reached."""
    import torch.distributed as dist

    timeout = timedelta(seconds=supervise.add_patience(rendezvous.timeout_seconds))
    url = _choose_url(placement, rendezvous)
    try:
        if url == "env://":  # the launcher's own store
            meeting = dist.rendezvous(url, placement.rank, placement.world_size, timeout=timeout)
            store: dist.Store = next(meeting)[0]
            return store
        host, port = url.removeprefix("tcp://").rsplit(":", 1)
        host = host.strip("[]")
        if placement.rank == 0:
            one_host = placement.local_world_size == placement.world_size
            return serve(host, int(port), timeout, one_host)
        return dist.TCPStore(host, int(port), timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        reason = control.first_line(error)
        raise Refused(
            f"rank {placement.rank} could not connect to the other ranks at {url} within "
            f"{rendezvous.timeout_seconds:g} s: {reason}",
            speaker=placement.rank,
        ) from None


def _choose_url(placement: Placement, rendezvous: Rendezvous) -> str:
    """Return the URL of the store: the launcher's, else from MASTER_ADDR and MASTER_PORT."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "env://"
    if address and port:
        return f"tcp://{address}:{port}"
    if placement.launcher == "srun":
        host, number = slurm_address()
        return f"tcp://{address or host}:{port or number}"
    if placement.launcher == "mpirun":
        return f"tcp://{_broadcast_address_over_mpi(placement, rendezvous, address, port)}"
    return f"tcp://{address or '127.0.0.1'}:{port or free_port()}"


def _broadcast_address_over_mpi(
    placement: Placement, rendezvous: Rendezvous, address: str | None, port: str | None
) -> str:
    """Return rank 0's "address:port" on every rank."""
    if find_spec("mpi4py") is None:
        raise Refused(
            "mpi4py is not installed, but ranks under mpirun need it to connect: "
            f"{install_extra('mpi')}, or set MASTER_ADDR and MASTER_PORT"
        )
    from ddpbench.mpi_backend import library as mpi_library

    mpi_library.start(rendezvous.timeout_seconds)
    rank, size = mpi_library.world()
    if size != placement.world_size or rank != placement.rank:
        raise Refused(
            f"this is rank {placement.rank} of {placement.world_size} for mpirun, but rank {rank} "
            f"of {size} for mpi4py, because mpi4py uses another MPI: use the mpirun of "
            f"{mpi_library.library()}"
        )
    one_host = placement.local_world_size == placement.world_size
    return mpi_library.broadcast_meeting_point(one_host, address, port)


def gather_introductions(
    store: dist.Store, placement: Placement, seconds: float
) -> tuple[tuple[RankIdentity, ...], tuple[Endpoint, ...]]:
    """Return the RankIdentity and Endpoint of all ranks, before gloo connects them.

    Raises Refused on all ranks if gloo would listen where other hosts cannot reach it, or if ranks
    do not come in time, with their numbers.
    """
    me, rank = identify(placement.rank), placement.rank
    requested = os.environ.get(network.GLOO)
    own = network.find_endpoint(rank, f"{me.boot_id}/{me.network}", requested)
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
