"""What one rank's links carry: round trips and bursts, timed on the sender's clock alone.

The sender leads: it pings, then says how long a burst will be, sends it, and stops its clock when
the receiver has answered that it is there. What that takes beyond the shortest round trip is the
bytes'; subtracting a usual one would make links faster than they are on a busy host.
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
MESSAGE_NBYTES = 1 << 24  # of which a burst is made: the buffer
GROWTH = 4
BURSTS, FEWEST = 3, 3  # in the time given, about; and at the least


@dataclass(frozen=True)
class Reading:
    """What came out of one way between two ranks."""

    bytes_per_second: float  # of the bursts, upper quartile: other processes only delay them
    latency_seconds: float  # half of a round trip, median
    spread: float  # of the bursts, relative: as of a standard deviation


class Wire:
    """One rank's end of its links on a group; a peer is a rank in that group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch

        self._group, self._device = group, device
        self._data = torch.ones(MESSAGE_NBYTES, dtype=torch.uint8, device=device)
        self._ping = torch.ones(1, dtype=torch.int64, device=device)
        self._order = torch.zeros(2, dtype=torch.int64, device=device)

    def lead(self, peer: int, seconds: float) -> Reading:
        """Measure what this rank sends to one that follows; takes about so long, on a slow link as
        long as the fewest bursts take."""
        until = clock.now_ns() + round(seconds * 1e9)
        trips = [self._timed(self._trip, peer) for _ in range(PINGS)]
        nbytes, rates = FIRST_NBYTES, list[float]()
        self._timed(self._burst, peer, nbytes)  # its connection may have been idle
        while len(rates) < FEWEST or clock.now_ns() < until:
            took = self._timed(self._burst, peer, nbytes)
            rates.append(nbytes / max(took - min(trips), took / 2))
            wanted = min(rates[-1] * seconds / BURSTS, GROWTH * nbytes, MOST_NBYTES)
            if wanted >= 2 * nbytes and clock.now_ns() < until:
                nbytes, rates = int(wanted), []
        self._say(peer, 0, 0)
        low, middle, high = quantiles(rates, n=4, method="inclusive")
        spread = DEVIATION / 2 * (high - low) / middle
        return Reading(upper(rates), median(trips) / 2, spread)

    def follow(self, peer: int) -> None:
        """The other rank's part in what a leading one measures."""
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
        its = nbytes // count
        self._say(peer, its, count)
        self._send(peer, [self._data[:its]] * count)
        self._receive(peer, [self._ping])

    def _say(self, peer: int, nbytes: int, count: int) -> None:
        self._order[0], self._order[1] = nbytes, count
        self._send(peer, [self._order])

    def _timed(self, call: Callable[..., None], *arguments: int) -> float:
        """Seconds until a call's result is there."""
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

    def _move(self, way: Any, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """As a batch even of one: NCCL then uses the connections of the whole group, which are
        there, instead of making a communicator for every pair."""
        import torch.distributed as dist

        ops = [dist.P2POp(way, each, group=self._group, group_peer=peer) for each in tensors]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def gather_readings(
    ranks: World, wire: Wire, steps: Sequence[Sequence[Cell]], seconds: float
) -> list[dict[Cell, Reading]]:
    """Measure step after step, the cells of one at once; of each step what came out, in all ranks,
    which all call it. The ranks of a step must be disjoint; those in none wait.

    seconds: of one step, about.
    """
    mine: list[list[float]] = []
    for number, cells in enumerate(steps):
        who = " and ".join(f"rank {a} to {b}" for a, b in cells[:2])
        more = f" and {len(cells) - 2} more" if len(cells) > 2 else ""
        ranks.watchdog.phase(f"the measurement of links: {who}{more}")
        control.barrier_all()
        for sender, receiver in cells:
            if ranks.rank == sender:
                mine.append([number, receiver, *astuple(wire.lead(receiver, seconds))])
            elif ranks.rank == receiver:
                wire.follow(sender)
    found: list[dict[Cell, Reading]] = [{} for _ in steps]
    for sender, its in enumerate(control.gather_values(ranks, mine)):
        for number, receiver, *values in its:
            found[number][sender, receiver] = Reading(*values)
    return found
