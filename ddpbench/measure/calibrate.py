"""Measure how fast these ranks can move bytes, in the same launch as the cases.

These rates are upper limits for the operations: concurrent copies in memory for shared memory,
streams in both directions around a ring of ranks for TCP.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import torch

from ddpbench.measure import clock
from ddpbench.measure.offsets import agree_connections
from ddpbench.records.schema import Limit
from ddpbench.runtime import control, devices
from ddpbench.runtime.devices import elapsed_ns
from ddpbench.runtime.subgroups import Partition
from ddpbench.runtime.world import World

COPY_NS = 8_000_000
# Streams between hosts last longer: a rank that the scheduler wakes 1 ms late distorts the rate.
STREAM_NS, STREAM_BETWEEN_HOSTS_NS, STREAMS = 60_000_000, 200_000_000, 3
CHUNK, END = 1 << 22, b"\1"  # smaller chunks are slower: 3 GB/s at 256 KiB, 5.5 GB/s at 4 MiB
SIZES_NBYTES = (1 << 24, 1 << 26)  # one fits into the cache of a GPU, one does not
COPIES, SPANS = 4, 5
LEAST_NS = 100_000_000  # an idle GPU takes some time to raise its clocks
LAUNCH_SECONDS = 5e-4  # how long the device waits while the host enqueues the copies


@dataclass(frozen=True)
class Rates:
    """Measured rates, in bytes per second of one rank."""

    copies: dict[int, float] = field(default_factory=dict)  # size → slowest rank, all ranks at once
    copies_alone: dict[int, float] = field(default_factory=dict)  # the same, one rank per host
    fastest_copy: float | None = None  # of any size and rank
    both_ways: float | None = None  # slowest rank's receiving rate while it also sends
    one_way: float | None = None  # the same, if every second rank sends and the others receive
    # (both_ways, one_way) of each partition into several subgroups, with all subgroups at once.
    # This name is stored with the run.
    teams: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    device_copy: float | None = None  # bytes that the fastest device reads and writes in its memory

    def limit(
        self, transport: str, nbytes: int, one_way: bool, one_host: bool, partition: str = "world"
    ) -> Limit | None:
        """Return the limit of a case of this total size; None if it is unknown."""
        if one_host and transport == "memory":
            copies = self.copies_alone if one_way else self.copies
            source = f"{'one' if one_way else 'concurrent'} memcpy of the same size"
            return Limit(copies[nbytes], source) if nbytes in copies else None
        rate = self.teams.get(partition, (self.both_ways, self.one_way))[one_way]
        if rate is None or not transport:
            return None
        kind = "one-way" if one_way else "bidirectional"
        return Limit(rate, f"{kind} TCP streams {'on this host' if one_host else 'across hosts'}")

    def hard_limit(self, one_host: bool) -> Limit | None:
        """Return the limit of any case: the fastest copy of any size, even in cache.

        On the CPU it applies to cases on one host.
        """
        if self.device_copy is not None:
            return Limit(self.device_copy, "the fastest copy in a GPU's memory, read and written")
        if one_host and self.fastest_copy is not None:
            return Limit(self.fastest_copy, "fastest memcpy of any size")
        return None


def measure_rates(
    world: World, device: torch.device, sizes: Iterable[int], partitions: Iterable[Partition]
) -> Rates:
    """Measure on all ranks together: a device's memory, or the host's memory and TCP.

    On the CPU this takes about 30 ms per size, and for the streams of each partition half a
    second, or 2 seconds between hosts.
    """
    if devices.of(device).memory != "host":
        return Rates(device_copy=measure_device_copy(world, device))
    copies: dict[int, float] = {}
    alone: dict[int, float] = {}
    fastest = 0.0
    first_of_host = world.neighbours[0] == world.rank
    copied = sorted({size for size in sizes if 0 < size <= 2**28})
    source, target = (np.full(max(copied, default=0), one, np.uint8) for one in (1, 0))
    for nbytes in copied:
        world.watchdog.rearm()
        copy = partial(_measure_copy, world, source[:nbytes], target[:nbytes])
        together = control.gather_values(world, copy(True))
        single = control.gather_values(world, copy(first_of_host))
        copies[nbytes] = min(median for median, _ in together)
        alone[nbytes] = min(median for median, _ in single if median)
        fastest = max(fastest, *(best for _, best in together + single))
    rings = {each.name: _measure_ring(world, each) for each in partitions if each.size > 1}
    both_ways, one_way = rings.pop("world", (None, None))
    return Rates(copies, alone, fastest or None, both_ways, one_way, rings)


def _measure_copy(
    world: World, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], active: bool
) -> tuple[float, float]:
    """Return median and best rate of this rank's copies while others copy; 0 if not `active`."""
    control.broadcast_decision(world, 0)
    if not active:
        return 0.0, 0.0
    spans: list[int] = []
    until = clock.now_ns() + COPY_NS
    while len(spans) < 3 or clock.now_ns() < until:
        began = clock.now_ns()
        np.copyto(target, source)
        spans.append(clock.now_ns() - began)
    median_ns, best_ns = float(np.median(spans)), max(min(spans), 1)
    return source.nbytes / (median_ns * 1e-9), source.nbytes / (best_ns * 1e-9)


def _measure_ring(world: World, partition: Partition) -> tuple[float | None, float | None]:
    """Return the slowest rank's receiving rates: if every rank sends, and if every second does.

    Each rank sends to the next rank of its subgroup and receives from the previous one, in all
    subgroups at once. None if the ranks cannot open sockets to each other.
    """
    subgroup = partition.subgroup_of(world.rank) or (world.rank,)  # in none: only gets decisions
    index = subgroup.index(world.rank)
    with contextlib.ExitStack() as sockets:
        next_rank = subgroup[(index + 1) % len(subgroup)]
        outward, others, objection = agree_connections(world, next_rank, 1, sockets)
        if objection is not None:
            return None, None
        (inward,) = others.values()
        everyone = {rank for ranks in partition.subgroups for rank in ranks}
        every_second = {
            rank for ranks in partition.subgroups for rank in ranks[: partition.size - 1 : 2]
        }
        stream_ns = STREAM_BETWEEN_HOSTS_NS if len(partition.ranks_per_host) > 1 else STREAM_NS

        def stream(senders: Container[int]) -> float:
            sends, hears = world.rank in senders, subgroup[index - 1] in senders
            return _stream(world, outward if sends else None, inward if hears else None, stream_ns)

        # The best of several rounds, in turn: the cores that the scheduler chooses for sender and
        # receiver can halve a rate, and it keeps them until the pattern changes.
        both_ways = one_way = 0.0
        for _ in range(STREAMS):
            both_ways = max(both_ways, stream(everyone))
            one_way = max(one_way, stream(every_second))
        return both_ways, one_way


def _send(outward: socket.socket, stream_ns: int) -> None:
    data = memoryview(bytes(CHUNK))
    until = clock.now_ns() + stream_ns
    with contextlib.suppress(OSError):  # the receiver has ended; other code reports that
        while clock.now_ns() < until:
            outward.sendall(data)
        outward.sendall(END)


def _stream(
    world: World, outward: socket.socket | None, inward: socket.socket | None, stream_ns: int
) -> float:
    """Send to `outward`, receive from `inward`. Return the slowest receiver's bytes per second.

    A rank that does not send, or receive, passes None. Every sender ends its stream with one more
    byte, END.
    """
    world.watchdog.rearm()
    control.broadcast_decision(world, 0)
    if outward is not None:
        sender = threading.Thread(target=_send, args=(outward, stream_ns), daemon=True)
        sender.start()
    total, began, ended = 0, 0, 0
    buffer = memoryview(bytearray(CHUNK))
    while inward is not None and not ended:
        count = inward.recv_into(buffer)
        if began:
            total += count
        else:  # exclude the time before the first bytes, in which the sender starts
            began = clock.now_ns()
        if count == 0 or buffer[count - 1 : count] == END:
            ended = clock.now_ns()
    if outward is not None:
        sender.join()
    rate = None if inward is None else total / ((ended - began) * 1e-9)
    return float(min(r for r in control.gather_values(world, rate) if r is not None))


def measure_device_copy(world: World, device: torch.device) -> float | None:
    """Return the bytes that the fastest rank's device reads and writes per second.

    A copy reads each byte and writes it. None if a device has no memory left for it.
    """
    world.watchdog.rearm()
    rates = [_measure_rate(device, nbytes) for nbytes in SIZES_NBYTES]
    # Ranks that share a GPU measure at once: the sum is the rate of the GPU.
    sharers = max(1, len(world.gpu_mates))
    best = max((rate for rate in rates if rate is not None), default=None)
    everyone = control.gather_values(world, best and best * sharers)
    return max((rate for rate in everyone if rate is not None), default=None)


def _measure_rate(device: torch.device, nbytes: int) -> float | None:
    kind = devices.of(device)
    free = kind.free_nbytes(device)
    if free is not None and free < 4 * nbytes:
        return None
    source, target = (
        torch.full((nbytes,), one, dtype=torch.uint8, device=device) for one in (1, 0)
    )
    if kind.sleeps:
        kind.sleep(device, 0.0)  # the first sleep measures the speed of the clock
    begin, end = kind.event(device), kind.event(device)
    spans_ns: list[int] = []
    until = clock.now_ns() + LEAST_NS
    while len(spans_ns) < SPANS or clock.now_ns() < until:
        if kind.sleeps:
            kind.sleep(device, LAUNCH_SECONDS)
        begin.record()
        for _ in range(COPIES):
            target.copy_(source)
        end.record()
        end.synchronize()
        spans_ns.append(max(1, elapsed_ns(begin, end)))
    return 2 * nbytes * COPIES / (min(spans_ns) * 1e-9)


# --- the round trip of a cache line between the cores of two neighbouring ranks -------------------

# On virtual machines it has two values: every few seconds the hypervisor moves the virtual CPUs
# between host cores that share a cache and host cores that do not. An all_reduce of 1 MiB over
# shared memory took 115 µs with and 350 µs without a shared cache, in one process and on the same
# pages.
TRIPS, DEADLINE_NS = 100, 2_000_000
SPINS = 256  # between two readings of the clock
PING, PONG = 0, 16  # indices of 8-byte words, each in its own cache lines


class Handoff:
    """Pairs of neighbouring ranks of a host. Both ranks of a pair can write to one page."""

    def __init__(self, world: World) -> None:
        """Map the page; all ranks together. A pair that cannot share memory does not measure."""
        self._words: memoryview[int] | None = None
        self._turn = 0
        index = world.neighbours.index(world.rank)
        self._first = index % 2 == 0
        fd, words = -1, None
        with contextlib.suppress(OSError, AttributeError):
            fd = os.memfd_create("ddpbench handoff")
            os.ftruncate(fd, mmap.PAGESIZE)
            words = _map_page(fd)
        fds = control.gather_values(world, fd)
        if index ^ 1 < len(world.neighbours):
            partner = world.members[world.neighbours[index ^ 1]]
            if self._first:
                self._words = words
            elif world.members[world.rank].sees(partner):
                self._words = _open_page(partner.pid, fds[partner.rank])
        control.barrier_all()  # close the page only after the partner has opened it
        if fd >= 0:
            os.close(fd)

    def measure_seconds(self) -> float | None:
        """Return the median round trip, in the first rank of each pair; None if it is unknown.

        All ranks call it together. A pair gives up after 2 ms if one of its cores is busy.
        """
        words, self._turn = self._words, self._turn + 1
        control.barrier_all()
        if words is None:
            return None
        spans = []
        until = clock.now_ns() + DEADLINE_NS
        for value in range(self._turn << 20, (self._turn << 20) + TRIPS):
            began = clock.now_ns()
            if self._first:
                words[PING] = value
            if not _await(words, PONG if self._first else PING, value, until):
                return None
            if not self._first:
                words[PONG] = value
            spans.append(clock.now_ns() - began)
        return median(spans) * 1e-9 if self._first else None


def _await(words: memoryview[int], index: int, value: int, until: int) -> bool:
    """Spin until a word has this value; False at the deadline."""
    while True:
        for _ in range(SPINS):
            if words[index] == value:
                return True
        if clock.now_ns() > until:
            return False


def _map_page(fd: int) -> memoryview[int]:
    return memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")


def _open_page(pid: int, fd: int) -> memoryview[int] | None:
    """Map another process's page; None if this process may not, or there is none."""
    try:
        with Path(f"/proc/{pid}/fd/{fd}").open("r+b") as page:
            return _map_page(page.fileno())
    except (OSError, ValueError):
        return None
