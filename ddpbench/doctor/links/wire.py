"""Bursts and round trips on the links of one rank, timed by the sender alone.

The control group announces the size of a burst. The clock of the sender's device runs from when the
receiver is ready until the receiver confirms the last byte; a round trip is a burst of a few bytes.
The rate is that of the time beyond the shortest round trip; with the usual round trip, links of a
busy host would look faster than they are.

On a GPU a burst is a single message, and the receiving GPU sleeps until its host has handed over
all of it, because a slow host must not look like a slow link.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpbench.analysis.rates import upper_quartile
from ddpbench.doctor.links.judge import DEVIATION, Cell
from ddpbench.measure import clock
from ddpbench.runtime import control, devices
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

PINGS = 20
FIRST_NBYTES, MOST_NBYTES = 1 << 16, 1 << 30  # of a burst
MESSAGE_NBYTES = 1 << 24  # of the host's buffer; a burst consists of such messages
MOST_ON_DEVICE_NBYTES = 1 << 28  # of a burst, which is one message in the memory of the device
GROWTH = 4
BURSTS, LEAST_BURSTS = 3, 3  # about so many in the time given, and at least so many
LAUNCH_SECONDS = 5e-4  # for which a device sleeps while its host hands over a few operations


class Reading(NamedTuple):
    """One direction between two ranks."""

    bytes_per_second: float  # of the bursts, upper quartile: other processes only delay them
    latency_seconds: float  # half of a round trip, median
    spread: float  # of the bursts, relative, on the scale of a standard deviation


class Wire:
    """One rank's end of its links in a process group of all ranks; a peer is a rank."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch

        self._group, self._device, self._kind = group, device, devices.of(device)
        self._on_host = self._kind.clock == "host"
        self._most_nbytes = MOST_NBYTES if self._on_host else MOST_ON_DEVICE_NBYTES
        size = MESSAGE_NBYTES if self._on_host else MOST_ON_DEVICE_NBYTES
        self._ping = torch.ones(1, dtype=torch.int64, device=device)
        self._data = torch.ones(size, dtype=torch.uint8, device=device)

    def lead(self, peer: int, seconds: float) -> Reading:
        """Measure what this rank sends to a peer that calls `follow`.

        Takes about so many seconds; on a slow link the time of LEAST_BURSTS.
        """
        trips = [self._time_burst(peer, self._ping.nbytes) for _ in range(PINGS)]  # may connect
        until = clock.now_ns() + round(seconds * 1e9)
        nbytes, rates = FIRST_NBYTES, list[float]()
        self._time_burst(peer, nbytes)  # its connection may have been idle
        while len(rates) < LEAST_BURSTS or clock.now_ns() < until:
            took = self._time_burst(peer, nbytes)
            rates.append(nbytes / max(took - min(trips), took / 2))
            wanted = min(rates[-1] * seconds / BURSTS, GROWTH * nbytes, self._most_nbytes)
            # With a device, its host may have spent the time between the spans.
            if wanted >= 2 * nbytes and (clock.now_ns() < until or not self._on_host):
                nbytes, rates = int(wanted), []
        control.send_number(peer, 0)
        low, middle, high = quantiles(rates, n=4, method="inclusive")
        spread = DEVIATION / 2 * (high - low) / middle
        return Reading(upper_quartile(rates), median(trips) / 2, spread)

    def follow(self, peer: int) -> None:
        """Answer a peer that calls `lead`."""
        while nbytes := control.receive_number(peer):
            messages = self._messages(nbytes)
            if self._kind.sleeps and not self._on_host:
                self._kind.sleep(self._device, LAUNCH_SECONDS)
            self._move("isend", peer, [self._ping])
            self._move("irecv", peer, messages)
            self._move("isend", peer, [self._ping])

    def _time_burst(self, peer: int, nbytes: int) -> float:
        """Return the seconds until the peer has confirmed so many bytes."""
        control.send_number(peer, nbytes)
        messages = self._messages(nbytes)
        self._move("irecv", peer, [self._ping])  # the peer is ready

        def send() -> None:
            self._move("isend", peer, messages)
            self._move("irecv", peer, [self._ping])

        return devices.time_call(self._device, send)

    def _messages(self, nbytes: int) -> list[torch.Tensor]:
        """Return so many bytes as one message, or as several of the host's buffer."""
        count = -(-nbytes // self._data.nbytes)
        return [self._data.narrow(0, 0, nbytes // count)] * count

    def _move(self, name: str, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send or receive as a batch, even a single tensor.

        NCCL then uses the connections of the whole group instead of a communicator for each pair.
        """
        import torch.distributed as dist

        move: Any = getattr(dist, name)
        batch = [dist.P2POp(move, t, group=self._group, group_peer=peer) for t in tensors]
        for work in dist.batch_isend_irecv(batch):
            work.wait()


def gather_readings(
    world: World, wire: Wire, steps: Sequence[Sequence[Cell]], seconds: float
) -> dict[Cell, Reading]:
    """Measure step after step, the cells of one at once; return the reading of each cell.

    All ranks call it, and it returns the same on all. The ranks of a step must be disjoint; other
    ranks wait. A cell is in one step only. seconds: of one step, approximately.
    """
    own: list[list[float]] = []
    for cells in steps:
        names = ", ".join(f"rank {a} to {b}" for a, b in cells[:3])
        world.watchdog.begin_phase(f"the measurement of links: {names}")
        control.barrier_all()
        for sender, receiver in cells:
            if world.rank == sender:
                own.append([receiver, *wire.lead(receiver, seconds)])
            elif world.rank == receiver:
                wire.follow(sender)
    return {
        (sender, receiver): Reading(*values)
        for sender, rows in enumerate(control.gather_values(world, own))
        for receiver, *values in rows
    }
