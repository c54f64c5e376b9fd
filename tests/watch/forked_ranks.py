"""Ranks of a watched job without its model: forked processes, each with a transport of its own."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from msgspec import structs
from patience import PATIENCE_SECONDS

from ddpbench.watch.transport import Transport
from ddpbench.watch.window import COLUMNS, JoinedCall, Window, join

PERIOD = 0.5
FORK = multiprocessing.get_context("fork")
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000


@dataclass(frozen=True)
class Place:
    """Where a rank runs and what it is told: a namespace of simulated hosts, or this host."""

    namespace: str = ""
    host: str = ""
    environ: dict[str, str] = field(default_factory=dict)

    def enter(self) -> None:
        """Move this process there."""
        os.environ.update(self.environ)
        if self.namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            with (Path("/run/netns") / self.namespace).open() as file:
                assert libc.setns(file.fileno(), CLONE_NEWNET) == 0, ctypes.get_errno()
            assert libc.unshare(CLONE_NEWUTS) == 0, ctypes.get_errno()
            socket.sethostname(self.host)


HERE = Place()


def a_window(rank: int, first: int, last: bool = False, **known: Any) -> Window:
    """A window of eight steps whose rows tell the rank."""
    rows = np.full((8, COLUMNS), rank + 1, np.float32)
    now = time.time_ns()
    calls = [
        JoinedCall("world", first + n, "all_reduce", 8, -1, now, now, now, rank) for n in range(8)
    ]
    hosts = {socket.gethostname(): [rank]}
    return Window(first, hosts, now, first, {rank: rows}, calls, last=last, **known)


@dataclass(frozen=True)
class Reported:
    """What an exchange gave a rank."""

    ranks: dict[str, list[int]]  # of each host
    first_step: int
    last: bool


class Process:
    """A forked process that answers orders through a pipe."""

    def __init__(self, main: Callable[[Connection], None], place: Place = HERE) -> None:
        self.pipe, inside = FORK.Pipe()
        self.process = FORK.Process(target=_start, args=(main, place, inside), daemon=True)
        self.process.start()
        inside.close()

    def signal(self, number: int) -> None:
        """Send a signal; wait for the end of a process that is killed."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join()

    def answer(self) -> Any:
        """Return what the process has sent next."""
        assert self.pipe.poll(PATIENCE_SECONDS), "no answer"
        return self.pipe.recv()


def _start(main: Callable[[Connection], None], place: Place, pipe: Connection) -> None:
    place.enter()
    main(pipe)


def _serve(address: str, pipe: Connection) -> None:
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    pipe.send(f"{address}:{store.port}")
    signal.pause()


def open_store(where: str) -> dist.Store:
    """A client of the store at "address:port" or in a file, as init_process_group makes it."""
    if where.startswith("/"):
        return dist.PrefixStore("default_pg", dist.FileStore(where, -1))
    host, _, port = where.rpartition(":")
    client = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=60))
    return dist.PrefixStore("default_pg", client)


def _follow_orders(where: str, rank: int, world_size: int, pipe: Connection) -> None:
    """Make one exchange per order, which is (first step, whether it is the last)."""
    store = open_store(where)  # a transport does not keep it
    transport = Transport(store, "watch/1", rank, world_size, period=PERIOD)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        first, last = order
        if not last:
            time.sleep(transport.seconds_to_round())
        window = a_window(rank, first, last)
        number = transport.begin_round().number
        windows = transport.exchange(structs.replace(window, number=number))
        if windows:
            joined = join(windows)
            pipe.send(Reported(joined.hosts, joined.first_step, joined.last))
        else:
            pipe.send(None)
    transport.close()
    pipe.send("closed")


class Job:
    """The ranks of a job and, unless they meet in a file, a process with their store."""

    def __init__(
        self, places: Sequence[Place], where: str = "", address: str = "127.0.0.1"
    ) -> None:
        self.store: Process | None = None
        if not where:
            self.store = Process(lambda pipe: _serve(address, pipe), places[0])
            where = self.store.answer()
        self.ranks = []
        for rank, place in enumerate(places):
            self.ranks.append(
                Process(
                    lambda pipe, rank=rank: _follow_orders(where, rank, len(places), pipe), place
                )
            )
        for rank in self.ranks:
            rank.answer()
        self.step = 0

    def round(self, *without: int, last: bool = False) -> list[Reported | None]:
        """Let all ranks but some make one exchange; return what each was given."""
        self.step += 3
        for number, rank in enumerate(self.ranks):
            if number not in without:
                rank.pipe.send((self.step, last))
        return [None if n in without else rank.answer() for n, rank in enumerate(self.ranks)]

    def close(self) -> None:
        """Kill everything."""
        for process in [*self.ranks, *([self.store] if self.store else [])]:
            process.process.kill()
            process.process.join()


@contextlib.contextmanager
def open_job(*places: Place, where: str = "", address: str = "127.0.0.1") -> Iterator[Job]:
    """Start a job and kill what is left of it at the end."""
    job = Job(places, where, address)
    try:
        yield job
    finally:
        job.close()
