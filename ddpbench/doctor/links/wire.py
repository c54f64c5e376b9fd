"""What the links of one rank carry: round trips and bursts, timed by the sender alone.

The sender leads: it pings, announces the size of a burst, sends it, and stops its clock when the
receiver confirms the last byte. The rate is that of the time beyond the shortest round trip; with
the usual round trip, links of a busy host would look faster than they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partialmethod
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from ddpbench.doctor.links.suspects import DEVIATION, Cell, upper
from ddpbench.measure import clock
from ddpbench.runtime import control, devices
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

PINGS = 20
FIRST_NBYTES, MOST_NBYTES = 1 << 16, 1 << 30  # of a burst
MESSAGE_NBYTES = 1 << 24  # of the host's buffer; a burst consists of such messages
MEMORY_SHARE = 1 / 4  # of a device's free memory, for its buffer
GROWTH = 4
BURSTS, LEAST_BURSTS = 3, 3  # about so many in the time given, and at least so many
LAUNCH_SECONDS = 5e-4  # for which a device sleeps while its host hands over a few operations


@dataclass(frozen=True)
class Reading:
    """One direction between two ranks."""

    bytes_per_second: float  # of the bursts, upper quartile: other processes only delay them
    latency_seconds: float  # half of a round trip, median
    spread: float  # of the bursts, relative, on the scale of a standard deviation


class Wire:
    """One rank's end of its links in a process group of all ranks; a peer is a rank."""

    most_nbytes = MOST_NBYTES  # of a burst
    pings = PINGS
    grows_late = False  # whether bursts may grow after the time given

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch

        self._group, self._device = group, device
        self._ping = torch.ones(1, dtype=torch.int64, device=device)

    def lead(self, peer: int, seconds: float) -> Reading:
        """Measure what this rank sends to a peer that calls `follow`.

        Takes about so many seconds; on a slow link the time of LEAST_BURSTS.
        """
        until = clock.now_ns() + round(seconds * 1e9)
        trips = [self._time_trip(peer) for _ in range(self.pings)]
        nbytes, rates = FIRST_NBYTES, list[float]()
        self._time_burst(peer, nbytes)  # its connection may have been idle
        while len(rates) < LEAST_BURSTS or clock.now_ns() < until:
            took = self._time_burst(peer, nbytes)
            rates.append(nbytes / max(took - min(trips), took / 2))
            wanted = min(rates[-1] * seconds / BURSTS, GROWTH * nbytes, self.most_nbytes)
            if wanted >= 2 * nbytes and (self.grows_late or clock.now_ns() < until):
                nbytes, rates = int(wanted), []
        self._end(peer)
        low, middle, high = quantiles(rates, n=4, method="inclusive")
        spread = DEVIATION / 2 * (high - low) / middle
        return Reading(upper(rates), median(trips) / 2, spread)

    def follow(self, peer: int) -> None:
        """Answer a peer that calls `lead`."""
        raise NotImplementedError

    def _time_trip(self, peer: int) -> float:
        """Return the seconds of one round trip."""
        raise NotImplementedError

    def _time_burst(self, peer: int, nbytes: int) -> float:
        """Return the seconds until the peer has confirmed so many bytes."""
        raise NotImplementedError

    def _end(self, peer: int) -> None:
        """Let the peer return."""
        raise NotImplementedError

    def _move(self, name: str, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send or receive as a batch, even a single tensor.

        NCCL then uses the connections of the whole group instead of a communicator for each pair.
        """
        import torch.distributed as dist

        move: Any = getattr(dist, name)
        batch = [dist.P2POp(move, t, group=self._group, group_peer=peer) for t in tensors]
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    _send, _receive = partialmethod(_move, "isend"), partialmethod(_move, "irecv")


class HostWire(Wire):
    """Messages in the host's memory, timed on the host's clock.

    A burst consists of messages of up to MESSAGE_NBYTES. The span includes the order that announces
    them; so does the round trip.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch

        super().__init__(group, device)
        self._data = torch.ones(MESSAGE_NBYTES, dtype=torch.uint8, device=device)
        self._order = torch.zeros(2, dtype=torch.int64, device=device)

    def follow(self, peer: int) -> None:
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

    def _time_trip(self, peer: int) -> float:
        began = clock.now_ns()
        self._send(peer, [self._ping])
        self._receive(peer, [self._ping])
        return (clock.now_ns() - began) * 1e-9

    def _time_burst(self, peer: int, nbytes: int) -> float:
        began = clock.now_ns()
        count = -(-nbytes // MESSAGE_NBYTES)
        message = nbytes // count
        self._announce(peer, message, count)
        self._send(peer, [self._data[:message]] * count)
        self._receive(peer, [self._ping])
        return (clock.now_ns() - began) * 1e-9

    def _end(self, peer: int) -> None:
        self._announce(peer, 0, 0)

    def _announce(self, peer: int, nbytes: int, count: int) -> None:
        self._order[0], self._order[1] = nbytes, count
        self._send(peer, [self._order])


class DeviceWire(Wire):
    """Messages in a device's memory, timed by events of the sender's device.

    A slow host must not look like a slow link. So a burst is a single message, the control group
    announces it, and the span begins when the receiver's device is ready: it sleeps until its host
    has handed over what it does in the span. A round trip is a burst of a few bytes, so what is
    left of the hosts' time cancels.
    """

    pings = 5  # a device's clock varies less than a host's
    grows_late = True  # a slow host may have spent the time between the spans

    def __init__(self, group: dist.ProcessGroup, device: torch.device, most_nbytes: int) -> None:
        import torch

        super().__init__(group, device)
        self.most_nbytes = most_nbytes
        self._kind = devices.of(device)
        self._data = torch.ones(FIRST_NBYTES, dtype=torch.uint8, device=device)
        self._begin, self._stop = self._kind.event(device), self._kind.event(device)

    def follow(self, peer: int) -> None:
        while nbytes := control.receive_number(peer):
            data = self._part(nbytes)
            if self._kind.sleeps:
                self._kind.sleep(self._device, LAUNCH_SECONDS)
            self._send(peer, [self._ping])
            self._receive(peer, [data])
            self._send(peer, [self._ping])

    def _time_trip(self, peer: int) -> float:
        return self._time_burst(peer, self._ping.nbytes)

    def _time_burst(self, peer: int, nbytes: int) -> float:
        control.send_number(peer, nbytes)
        data = self._part(nbytes)
        self._receive(peer, [self._ping])  # the peer is ready
        self._begin.record()
        self._send(peer, [data])
        self._receive(peer, [self._ping])
        self._stop.record()
        self._stop.synchronize()
        return devices.elapsed_ns(self._begin, self._stop) * 1e-9

    def _end(self, peer: int) -> None:
        control.send_number(peer, 0)

    def _part(self, nbytes: int) -> torch.Tensor:
        """Return so many bytes of the buffer, which grows as needed."""
        import torch

        if self._data.nbytes < nbytes:
            del self._data  # its memory may be needed for the next
            self._data = torch.ones(nbytes, dtype=torch.uint8, device=self._device)
        return self._data.narrow(0, 0, nbytes)


def agree_wire(world: World, group: dist.ProcessGroup, device: torch.device) -> Wire:
    """Return this rank's end of its links. All ranks call it; `group` has all ranks.

    On a device, a burst is as large as all ranks have memory for.
    """
    kind = devices.of(device)
    if kind.clock == "host":
        return HostWire(group, device)
    free = kind.free_nbytes(device)
    share = MOST_NBYTES if free is None else free * MEMORY_SHARE / max(1, len(world.gpu_mates))
    least = min(control.gather_values(world, int(share)))
    return DeviceWire(group, device, max(FIRST_NBYTES, min(MOST_NBYTES, least)))


def gather_readings(
    world: World, wire: Wire, steps: Sequence[Sequence[Cell]], seconds: float
) -> dict[Cell, Reading]:
    """Measure step after step, the cells of one at once; return the reading of each cell.

    All ranks call it, and it returns the same on all. The ranks of a step must be disjoint; a rank
    that is in none waits. A cell is in one step only. seconds: of one step, approximately.
    """
    own: list[list[float]] = []
    for cells in steps:
        names = " and ".join(f"rank {a} to {b}" for a, b in cells[:2])
        more = f" and {len(cells) - 2} more" if len(cells) > 2 else ""
        world.watchdog.begin_phase(f"the measurement of links: {names}{more}")
        control.barrier_all()
        for sender, receiver in cells:
            if world.rank == sender:
                own.append([receiver, *astuple(wire.lead(receiver, seconds))])
            elif world.rank == receiver:
                wire.follow(sender)
    return {
        (sender, receiver): Reading(*values)
        for sender, rows in enumerate(control.gather_values(world, own))
        for receiver, *values in rows
    }
