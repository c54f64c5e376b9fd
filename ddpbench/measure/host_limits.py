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
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import torch

from ddpbench.measure import clock
from ddpbench.measure.offsets import agree_connections
from ddpbench.records.schema import Limit
from ddpbench.runtime import control, devices
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
    fastest: list[float] = []
    is_first_of_host = world.neighbours[0] == world.rank
    copied = sorted({size for size in sizes if 0 < size <= 2**28})
    source, target = (np.full(max(copied, default=0), one, np.uint8) for one in (1, 0))
    for nbytes in copied:
        world.watchdog.rearm()
        for medians, is_active in ((copies, True), (alone, is_first_of_host)):
            control.broadcast_decision(world, 0)
            own = _time_copies(source[:nbytes], target[:nbytes]) if is_active else None
            rates = [each for each in control.gather_values(world, own) if each is not None]
            medians[nbytes] = min(median for median, _ in rates)
            fastest += [best for _, best in rates]
    rings = {each.name: _measure_ring(world, each) for each in partitions if each.size > 1}
    both_ways, one_way = rings.pop("world", (None, None))
    return Rates(copies, alone, max(fastest, default=None), both_ways, one_way, rings)


def _time_copies(
    source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]
) -> tuple[float, float]:
    """Return the median and the best rate of this rank's copies."""
    spans: list[int] = []
    until = clock.now_ns() + COPY_NS
    while len(spans) < 3 or clock.now_ns() < until:
        began = clock.now_ns()
        np.copyto(target, source)
        spans.append(clock.now_ns() - began)
    return source.nbytes / (median(spans) * 1e-9), source.nbytes / (max(min(spans), 1) * 1e-9)


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

        def stream(senders: Set[int]) -> float:
            sends, receives = world.rank in senders, subgroup[index - 1] in senders
            ends = outward if sends else None, inward if receives else None
            return _stream(world, *ends, stream_ns)

        # The best of several rounds, in turn: the cores that the scheduler chooses for sender and
        # receiver can halve a rate, and it keeps them until the pattern changes.
        rounds = [(stream(everyone), stream(every_second)) for _ in range(STREAMS)]
        both_ways, one_way = map(max, zip(*rounds, strict=True))
        return both_ways, one_way


def _stream(
    world: World, outward: socket.socket | None, inward: socket.socket | None, stream_ns: int
) -> float:
    """Send to `outward`, receive from `inward`. Return the slowest receiver's bytes per second.

    A rank that does not send, or receive, passes None. Every sender ends its stream with one more
    byte, END.
    """
    world.watchdog.rearm()
    control.broadcast_decision(world, 0)

    def send(outward: socket.socket) -> None:
        data, until = bytes(CHUNK), clock.now_ns() + stream_ns
        with contextlib.suppress(OSError):  # the receiver has ended; other code reports that
            while clock.now_ns() < until:
                outward.sendall(data)
            outward.sendall(END)

    if outward is not None:
        sender = threading.Thread(target=send, args=(outward,), daemon=True)
        sender.start()
    rate = None
    if inward is not None:
        buffer = memoryview(bytearray(CHUNK))
        count, total = inward.recv_into(buffer), 0
        began = clock.now_ns()  # exclude the sender's start, before the first bytes
        while count and buffer[count - 1 : count] != END:
            count = inward.recv_into(buffer)
            total += count
        rate = total / max((clock.now_ns() - began) * 1e-9, 1e-9)
    if outward is not None:
        sender.join()
    return float(min(r for r in control.gather_values(world, rate) if r is not None))


def measure_device_copy(world: World, device: torch.device) -> float | None:
    """Return the bytes that the fastest rank's device reads and writes per second.

    A copy reads each byte and writes it. None if no device has memory left for it.
    """
    world.watchdog.rearm()
    rates = [_time_device_copies(device, nbytes) for nbytes in SIZES_NBYTES]
    # Ranks that share a GPU measure at once: the sum is the rate of the GPU.
    sharers = max(1, len(world.gpu_mates))
    own = [rate * sharers for rate in rates if rate is not None]
    everyone = control.gather_values(world, max(own, default=None))
    return max((rate for rate in everyone if rate is not None), default=None)


def _time_device_copies(device: torch.device, nbytes: int) -> float | None:
    kind = devices.of(device)
    free = kind.free_nbytes(device)
    if free is not None and free < 4 * nbytes:
        return None
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    begin, end = kind.event(device), kind.event(device)
    spans_ns: list[int] = []
    until = clock.now_ns() + LEAST_NS
    while len(spans_ns) < SPANS or clock.now_ns() < until:
        kind.sleep(device, LAUNCH_SECONDS)
        begin.record()
        for _ in range(COPIES):
            target.copy_(source)
        end.record()
        end.synchronize()
        spans_ns.append(max(1, devices.elapsed_ns(begin, end)))
    return 2 * nbytes * COPIES / (min(spans_ns) * 1e-9)


# --- the round trip of a cache line between the cores of two neighbouring ranks -------------------

# On virtual machines it has two values: every few seconds the hypervisor moves the virtual CPUs
# between host cores that share a cache and host cores that do not. An all_reduce of 1 MiB over
# shared memory took 115 µs with and 350 µs without a shared cache, in one process and on the same
# pages.
TRIPS, DEADLINE_NS = 100, 2_000_000
SPINS = 256  # between two readings of the clock
PING, PONG = 0, 16  # indices of 8-byte words, each in its own cache lines


def agree_handoff(world: World) -> Callable[[], float | None]:
    """Map a page that both ranks of each pair of neighbours can write, all ranks together.

    Return a function that all ranks call together. It returns the median round trip in seconds in
    the first rank of each pair, and None elsewhere, if the ranks cannot share memory, or if one of
    the cores is busy for 2 ms.
    """
    index = world.neighbours.index(world.rank)
    is_first, turn = index % 2 == 0, 0
    page: memoryview[int] | None = None
    fd = os.memfd_create("ddpbench handoff")
    os.ftruncate(fd, mmap.PAGESIZE)
    fds = control.gather_values(world, fd)
    if index ^ 1 < len(world.neighbours):
        first = world.members[world.neighbours[index & ~1]]
        path = Path(f"/proc/{first.pid}/fd/{fds[first.rank]}")
        if world.members[world.rank].sees(first):
            with contextlib.suppress(OSError, ValueError), path.open("r+b") as file:
                page = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")
    control.barrier_all()  # close the page only after the partner has opened it
    os.close(fd)

    def measure_seconds() -> float | None:
        nonlocal turn
        turn += 1
        control.barrier_all()
        if page is None:
            return None
        spans = []
        until = clock.now_ns() + DEADLINE_NS
        for value in range(turn << 20, (turn << 20) + TRIPS):
            began = clock.now_ns()
            if is_first:
                page[PING] = value
            if not _await(page, PONG if is_first else PING, value, until):
                return None
            if not is_first:
                page[PONG] = value
            spans.append(clock.now_ns() - began)
        return median(spans) * 1e-9 if is_first else None

    return measure_seconds


def _await(words: memoryview[int], index: int, value: int, until: int) -> bool:
    """Spin until a word has this value; False at the deadline."""
    while True:
        for _ in range(SPINS):
            if words[index] == value:
                return True
        if clock.now_ns() > until:
            return False
