"""A device with a stream, in threads of the CPU, and a backend whose calls run in that stream.

`--import stream_backend --backend stream` behaves like a GPU with NCCL: a call returns once it is
issued, and the device works in this order. Before a call of all_reduce is issued, the host sleeps
for LAUNCH_MS (a slow launch).
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddpbench.catalog import backends
from ddpbench.runtime import devices

NAME = "stream"
LAUNCH_SECONDS = float(os.environ.get("LAUNCH_MS", "0")) * 1e-3


class Stream:
    """A thread, started at the first use, that does all work in order."""

    def __init__(self) -> None:
        self._given: queue.Queue[Callable[[], object]] = queue.Queue()
        self._thread: threading.Thread | None = None

    def give(self, work: Callable[[], object]) -> None:
        """Issue work, and return at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._given.put(work)

    def wait(self) -> None:
        done = threading.Event()
        self.give(done.set)
        done.wait()

    def _run(self) -> None:
        while True:
            self._given.get()()


STREAM = Stream()


class StreamEvent:
    """A stamp in the order of the stream."""

    def __init__(self) -> None:
        self.ns, self.taken = 0, threading.Event()

    def record(self) -> None:
        self.taken.clear()
        STREAM.give(self._take)

    def _take(self) -> None:
        self.ns = time.perf_counter_ns()
        self.taken.set()

    def synchronize(self) -> None:
        self.taken.wait()

    def query(self) -> bool:
        return self.taken.is_set()

    def elapsed_time(self, later: Any) -> float:
        return float(later.ns - self.ns) * 1e-6


class StreamCpu(devices.Cpu):
    """The CPU with a stream."""

    clock = "device"

    def event(self, device: torch.device) -> devices.Event:
        return StreamEvent()

    def synchronize(self, device: torch.device) -> None:
        STREAM.wait()

    synchronize_stream = synchronize

    def sleep(self, device: torch.device, seconds: float) -> None:
        STREAM.give(partial(time.sleep, seconds))


class Issued(dist.Work):  # type: ignore[misc]
    """Work in the stream: what is issued after it comes after it."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class StreamGroup(dist.ProcessGroup):
    """gloo, in the order of the stream."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        time.sleep(LAUNCH_SECONDS)
        STREAM.give(lambda: self.gloo.allreduce(tensors, opts).wait())
        return Issued()

    def barrier(self, opts: Any = None) -> dist.Work:
        STREAM.give(lambda: self.gloo.barrier(dist.BarrierOptions()).wait())
        return Issued()


dist.Backend.register_backend(NAME, StreamGroup, devices=["cpu"])
devices.KINDS["cpu"] = StreamCpu()
backends.BACKENDS[NAME] = backends.Backend(
    name=NAME,
    help="gloo in a stream",
    unavailable=lambda device: None,
    library=lambda: "gloo",
    in_stream=True,
)
