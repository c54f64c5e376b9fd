"""What the links of one rank carry: round trips and bursts, timed on the sender's clock alone.

The sender leads: it pings, announces the size of a burst, sends it, and stops its clock when the
receiver confirms the last byte. The rate is that of the time beyond the shortest round trip; with
the usual round trip, links of a busy host would look faster than they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from ddpbench.doctor.links.suspects import DEVIATION, Cell, upper
from ddpbench.measure import clock
from ddpbench.runtime import control
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

PINGS = 20
FIRST_NBYTES, MOST_NBYTES = 1 << 16, 1 << 30  # of a burst
MESSAGE_NBYTES = 1 << 24  # of the buffer; a burst consists of such messages
GROWTH = 4
BURSTS, LEAST_BURSTS = 3, 3  # about so many in the time given, and at least so many


@dataclass(frozen=True)
class Reading:
    """One direction between two ranks."""

    bytes_per_second: float  # of the bursts, upper quartile: other processes only delay them
    latency_seconds: float  # half of a round trip, median
    spread: float  # of the bursts, relative, on the scale of a standard deviation


class Wire:
    """One rank's end of its links in a process group; a peer is a rank of that group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch

        self._group, self._device = group, device
        self._data = torch.ones(MESSAGE_NBYTES, dtype=torch.uint8, device=device)
        self._ping = torch.ones(1, dtype=torch.int64, device=device)
        self._order = torch.zeros(2, dtype=torch.int64, device=device)

    def lead(self, peer: int, seconds: float) -> Reading:
        """Measure what this rank sends to a peer that calls `follow`.

        Takes about so many seconds; on a slow link the time of LEAST_BURSTS.
        """
        until = clock.now_ns() + round(seconds * 1e9)
        trips = [self._timed(self._trip, peer) for _ in range(PINGS)]
        nbytes, rates = FIRST_NBYTES, list[float]()
        self._timed(self._burst, peer, nbytes)  # its connection may have been idle
        while len(rates) < LEAST_BURSTS or clock.now_ns() < until:
            took = self._timed(self._burst, peer, nbytes)
            rates.append(nbytes / max(took - min(trips), took / 2))
            wanted = min(rates[-1] * seconds / BURSTS, GROWTH * nbytes, MOST_NBYTES)
            if wanted >= 2 * nbytes and clock.now_ns() < until:
                nbytes, rates = int(wanted), []
        self._announce(peer, 0, 0)
        low, middle, high = quantiles(rates, n=4, method="inclusive")
        spread = DEVIATION / 2 * (high - low) / middle
        return Reading(upper(rates), median(trips) / 2, spread)

    def follow(self, peer: int) -> None:
        """Answer a peer that calls `lead`."""
        for _ in range(PINGS):
            self._receive(peer, [self._ping])
            self._send(peer, [self._ping])
        while True:
            self._receive(peer, [self._order])
            nbytes, count = self._order.tolist()
            if not count:
                return
            self._receive(peer, [self._data[:nbytes]] * count)
            self._send(peer, [self._ping])

    def _trip(self, peer: int) -> None:
        self._send(peer, [self._ping])
        self._receive(peer, [self._ping])

    def _burst(self, peer: int, nbytes: int) -> None:
        count = -(-nbytes // MESSAGE_NBYTES)
        message = nbytes // count
        self._announce(peer, message, count)
        self._send(peer, [self._data[:message]] * count)
        self._receive(peer, [self._ping])

    def _announce(self, peer: int, nbytes: int, count: int) -> None:
        self._order[0], self._order[1] = nbytes, count
        self._send(peer, [self._order])

    def _timed(self, call: Callable[..., None], *arguments: int) -> float:
        """Return the seconds until the result of a call is there."""
        began = clock.now_ns()
        call(*arguments)
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
        return (clock.now_ns() - began) * 1e-9

    def _send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        import torch.distributed as dist

        self._move(dist.isend, peer, tensors)

    def _receive(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        import torch.distributed as dist

        self._move(dist.irecv, peer, tensors)

    def _move(self, operation: Any, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send or receive as a batch, even a single tensor.

        NCCL then uses the connections of the whole group instead of a communicator for each pair.
        """
        import torch.distributed as dist

        batch = [dist.P2POp(operation, t, group=self._group, group_peer=peer) for t in tensors]
        for work in dist.batch_isend_irecv(batch):
            work.wait()


def gather_readings(
    world: World, wire: Wire, steps: Sequence[Sequence[Cell]], seconds: float
) -> list[dict[Cell, Reading]]:
    """Measure step after step, the cells of one at once; return the readings of each step.

    All ranks call it, and it returns the same on all. The ranks of a step must be disjoint; a rank
    that is in none waits. seconds: of one step, approximately.
    """
    own: list[list[float]] = []
    for number, cells in enumerate(steps):
        names = " and ".join(f"rank {a} to {b}" for a, b in cells[:2])
        more = f" and {len(cells) - 2} more" if len(cells) > 2 else ""
        world.watchdog.begin_phase(f"the measurement of links: {names}{more}")
        control.barrier_all()
        for sender, receiver in cells:
            if world.rank == sender:
                own.append([number, receiver, *astuple(wire.lead(receiver, seconds))])
            elif world.rank == receiver:
                wire.follow(sender)
    readings: list[dict[Cell, Reading]] = [{} for _ in steps]
    for sender, rows in enumerate(control.gather_values(world, own)):
        for number, receiver, *values in rows:
            readings[number][sender, receiver] = Reading(*values)
    return readings
