"""Ranks of a watched job without its model: forked processes that use one transport each."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from ddpbench.watch.window import COLUMNS, Call, RankWindow, pack_rows

PERIOD = 0.6
FORK = multiprocessing.get_context("fork")
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000


def make_window(rank: int, first: int, steps: int = 8, last: bool = False) -> RankWindow:
    """A window whose rows and calls name the rank."""
    rows = np.full((steps, COLUMNS), 0.001 * (rank + 1), np.float32)
    now = time.time_ns()
    calls = [
        Call("world", number, "all_reduce", 8, now, 0) for number in range(first, first + steps)
    ]
    return RankWindow(rank, first, pack_rows(rows), now, calls, {"gc_seconds": 0.0}, last=last)


class Rank:
    """A forked process and its end of a pipe."""

    def __init__(self, main: Callable[[Connection], None]) -> None:
        self.pipe, inside = FORK.Pipe()
        self.process = FORK.Process(target=main, args=(inside,), daemon=True)
        self.process.start()
        inside.close()

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def answer(self, seconds: float = 15.0) -> Any:
        """What the process has sent next. Raises AssertionError if it takes too long."""
        assert self.pipe.poll(seconds), "no answer"
        return self.pipe.recv()


def enter_host(namespace: str, name: str) -> None:
    """Move this process to a simulated host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (Path("/run/netns") / namespace).open() as file:
        assert libc.setns(file.fileno(), CLONE_NEWNET) == 0, ctypes.get_errno()
    assert libc.unshare(CLONE_NEWUTS) == 0, ctypes.get_errno()
    socket.sethostname(name)


def open_store(kind: str, place: str) -> dist.Store:
    """A client of a store: "tcp" with "address:port", or "file" with a path."""
    if kind == "file":
        return dist.FileStore(place, -1)
    host, _, port = place.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=10))
    return dist.PrefixStore("default_pg", store)


def serve_store(address: str, pipe: Connection) -> None:
    """Serve a store until the process is killed."""
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()
