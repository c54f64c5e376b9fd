"""How long a cache line takes from one rank's core to its neighbour's and back.

On virtual machines it has two values, near and apart: the hypervisor moves virtual cores between
host cores that share a cache and ones that do not, every few seconds. An all_reduce of 1 MiB over
shared memory took 115 µs in one place and 350 in the other, in one process and on the same pages.
"""

from __future__ import annotations

import mmap
import os
import secrets
from statistics import median

from ddpbench.measure import clock
from ddpbench.runtime import control
from ddpbench.runtime.world import World

ROUNDS, DEADLINE_NS = 100, 2_000_000
LOOK = 256  # spins from one look at the clock to the next
PING, PONG, TOKEN = 0, 16, 32  # places of 8 bytes, each in cache lines of its own


class Handoff:
    """Pairs of neighbouring ranks of a host, each with a page of memory that both can write."""

    def __init__(self, world: World) -> None:
        """Map the page; all ranks together. A pair that cannot share memory measures nothing."""
        self._words: memoryview[int] | None = None
        self._turn = 0
        at = world.neighbours.index(world.rank)
        self._first = at % 2 == 0
        mine = [0, 0, secrets.randbits(63)]
        fd = None
        try:
            fd = os.memfd_create("ddpbench handoff")
            os.ftruncate(fd, mmap.PAGESIZE)
            words = _mapped(fd)
            words[TOKEN] = mine[2]
            mine[:2] = os.getpid(), fd
        except (OSError, AttributeError):
            words = None
        everyone = control.gather_values(world, mine)
        if at ^ 1 < len(world.neighbours):
            self._words = words if self._first else _opened(*everyone[world.neighbours[at ^ 1]])
        control.gather_values(world, None)  # only now has everyone opened what others hold open
        if fd is not None:
            os.close(fd)

    def seconds(self) -> float | None:
        """A round trip's median, in the first rank of each pair; None where it is not known.

        All ranks together; a pair that does not get its cores at once gives up in 2 ms.
        """
        words, self._turn = self._words, self._turn + 1
        control.barrier_all()
        if words is None:
            return None
        spans = []
        until = clock.now_ns() + DEADLINE_NS
        for value in range(self._turn << 20, (self._turn << 20) + ROUNDS):
            began = clock.now_ns()
            if self._first:
                words[PING] = value
            if not _comes(words, PONG if self._first else PING, value, until):
                return None
            if not self._first:
                words[PONG] = value
            spans.append(clock.now_ns() - began)
        return median(spans) * 1e-9 if self._first else None


def _comes(words: memoryview[int], place: int, value: int, until: int) -> bool:
    """Spin until a value stands there; False at the deadline."""
    while True:
        for _ in range(LOOK):
            if words[place] == value:
                return True
        if clock.now_ns() > until:
            return False


def _mapped(fd: int) -> memoryview[int]:
    return memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")


def _opened(pid: int, fd: int, token: int) -> memoryview[int] | None:
    """Another process's page, if that number means the same process here."""
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError:
        return None
    try:
        words = _mapped(own)
        return words if words[TOKEN] == token else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(own)
