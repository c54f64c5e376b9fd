"""Links: measure what each pair of ranks or hosts can send; find slow links, hosts and ranks.

First, pairs that share no rank send all at once; then each pair sends alone. A slow link or end is
measured again, in turn with healthy links, and reported only if it was slow each time. With more
pairs than --max-pairs, they are only measured all at once. Only links between hosts are judged, and
links between GPUs that do not use sockets: on few cores the scheduler decides what memory and
loopback carry.

figures: ends [rank, host]…; kind "hosts" or "ranks"; cells [sender, receiver, alone, at_once,
latency_seconds]…, rates in bytes a second, null if not measured; again, one entry for each suspect:
kind, one, other (ranks), ways, confirmed, bytes_per_second, others_bytes_per_second.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpbench.analysis.rates import upper_quartile
from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.links import judge
from ddpbench.doctor.links.judge import Cell, Rates, Suspect
from ddpbench.measure import clock
from ddpbench.records.wording import counted
from ddpbench.runtime import control, devices
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# --- which pairs, in which order ------------------------------------------------------------------

SHARE = 0.7  # of the time of the examination; the rest is for suspects
LEAST_SECONDS, MOST_SECONDS = 0.02, 0.2  # of one way of a pair
UNJUDGED_SECONDS = 0.05  # the most, of one way of a pair that is not judged
FEW = 4  # with fewer ends a round has one pair, so all at once is the same as alone


@dataclass(frozen=True)
class Schedule:
    """Steps of cells that share no rank, and how long each step takes."""

    ends: tuple[int, ...]
    kind: str  # of the ends: "hosts" or "ranks"
    at_once: Sequence[Sequence[Cell]]
    alone: Sequence[Sequence[Cell]]  # one cell each
    seconds: float  # of a step
    unchecked: tuple[str, ...] = ()

    @property
    def pairs(self) -> int:
        steps = itertools.chain(self.at_once, self.alone)
        return len({frozenset(cell) for step in steps for cell in step})

    @property
    def cost(self) -> str:
        """Describe the links, the order and the time in one line."""
        rounds = counted(len(self.at_once) // 2, "round")
        how = [f"all at once in {rounds}"] if self.at_once else []
        how += ["one by one"] if self.alone else []
        seconds = (len(self.at_once) + len(self.alone)) * self.seconds * 1.2 + 0.5
        return (
            f"{len(self.ends)} {self.kind}, {counted(self.pairs, 'link')}, {' and '.join(how)}, "
            f"both ways, {self.seconds * 1e3:.0f} ms each: about {max(1.0, seconds):.0f} s"
        )


def plan_schedule(
    hosts: Sequence[Sequence[int]],
    by: str,
    max_pairs: int,
    seconds: float,
    *,
    most_seconds: float = MOST_SECONDS,
    seed: int = 0,
) -> Schedule:
    """Plan the links between all ranks of these hosts or, with by "host", the first of each.

    With more pairs than max_pairs only one rank of each host is measured; if these are still too
    many, all of them at once and none alone. seconds: of everything, approximately; most_seconds:
    of one direction of a pair. seed: of the order, so that drift favours no end.
    """
    ends, firsts = tuple(itertools.chain(*hosts)), tuple(ranks[0] for ranks in hosts)
    unchecked = []
    pairs = len(ends) * (len(ends) - 1) // 2
    if by != "host" and 1 < len(hosts) < len(ends) and pairs > max_pairs:
        unchecked.append(
            f"only one rank of each host was measured: {len(ends)} ranks have {pairs} links, more "
            f"than --max-pairs {max_pairs}"
        )
        by = "host"
    ends = firsts if by == "host" else ends
    rounds = plan_circle(ends)
    pairs = sum(map(len, rounds))
    alone = [[way] for pair in itertools.chain(*rounds) for way in (pair, pair[::-1])]
    if pairs > max_pairs:
        alone = []
    random.Random(seed).shuffle(alone)
    at_once = [way for pairs in rounds for way in (pairs, [pair[::-1] for pair in pairs])]
    if alone and len(ends) < FEW:
        at_once = []
    steps = max(1, len(at_once) + len(alone))
    step_seconds = max(LEAST_SECONDS, min(SHARE * seconds / steps, most_seconds))
    kind = "hosts" if 1 < len(hosts) == len(ends) else "ranks"
    return Schedule(ends, kind, at_once, alone, step_seconds, tuple(unchecked))


def plan_circle(ends: Sequence[int]) -> list[list[Cell]]:
    """Return rounds in which every end meets every other once.

    There are n - 1 rounds for n ends, or n if n is odd, because one end then rests. The first end
    stays in its place while the others go round a circle, and opposite ends meet.
    """
    ring: list[int | None] = [*ends, *([None] if len(ends) % 2 else [])]
    rounds = []
    for _ in ring[1:]:
        opposite = zip(ring[: len(ring) // 2], reversed(ring), strict=False)
        rounds.append([(a, b) for a, b in opposite if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


# --- the examination ------------------------------------------------------------------------------

AGAIN_SECONDS = 0.1  # of one way of a pair that is measured again
MOST_SUSPECTS, MOST_TIMES = 5, 10  # that are measured again; how often each, if undecided
NOTHING = {
    "rank": "links: there is only one rank",
    "host": "links between hosts: there is only one host; --by rank measures the links within it",
}
TWO_HOSTS = "slow link or slow host: with two hosts there is no other link to compare with"
WITHIN = (
    "links within a host are shown, not judged: their rates depend on the cores on which the "
    "scheduler puts the ranks"
)


def examine(context: Context) -> Outcome:
    """Measure and judge the links. All ranks call it."""
    import torch

    world, between_gpus = context.world, _between_gpus(context)
    hosts = list(world.hosts.values())
    schedule = plan_schedule(
        hosts,
        context.by,
        context.max_pairs,
        context.seconds,
        most_seconds=MOST_SECONDS if len(hosts) > 1 or between_gpus else UNJUDGED_SECONDS,
        seed=context.seed,
    )
    if len(schedule.ends) < 2:
        return Outcome(unchecked=(NOTHING[context.by],))
    context.report_progress(f"links, {schedule.cost}")
    # gloo sends no tensor of a GPU from point to point, and its links are the same.
    device = torch.device("cpu") if context.backend.transport == "tcp" else context.device
    wire = Wire(context.process_group, device)
    at_once = gather_readings(world, wire, schedule.at_once, schedule.seconds)
    alone = gather_readings(world, wire, schedule.alone, schedule.seconds)
    best = dict(alone)
    for cell, reading in at_once.items():  # other load makes a link slower, never faster
        best[cell] = max(reading, best.get(cell, reading))
    suspects = list_suspects(best, hosts, schedule.kind, between_gpus)
    repeated, doubts = _gather_again(context, wire, suspects)
    cells = [
        [*cell, _rate(alone, cell), _rate(at_once, cell), (alone or at_once)[cell].latency_seconds]
        for cell in sorted(best)
    ]
    return _judge(context, schedule, cells, repeated, doubts)


def _rate(readings: Mapping[Cell, Reading], cell: Cell) -> float | None:
    return readings[cell].bytes_per_second if cell in readings else None


def list_suspects(
    readings: Mapping[Cell, Reading],
    hosts: Sequence[Sequence[int]],
    kind: str,
    between_gpus: bool,
) -> list[Suspect]:
    """Return the suspects with the cells to measure again: hosts, their links, ranks.

    kind: as in `Schedule`. between_gpus: whether links within a host are judged, too.
    """
    host = {rank: ranks[0] for ranks in hosts for rank in ranks}
    rates = {cell: reading.bytes_per_second for cell, reading in readings.items()}
    within: dict[int | None, dict[Cell, float]] = {}  # host, None between hosts → cell → rate
    for (a, b), rate in rates.items():
        within.setdefault(host[a] if host[a] == host[b] else None, {})[a, b] = rate
    views: list[tuple[str, Rates, Rates]] = []
    if crossing := within.pop(None, None):
        views.append(("host", judge.combine_hosts(crossing, host), crossing))
        if kind == "ranks":
            views.append(("rank", judge.compare_with_hosts(crossing, host), crossing))
    views += [("neighbour", inside, inside) for inside in within.values() if between_gpus]
    found = []
    for name, compared, measured in views:
        spread = median(readings[cell].spread for cell in measured)
        suspects = judge.find_suspects(compared, spread)
        for suspect in suspects:
            suspect.kind = name
            judge.choose_cells(suspect, compared, suspects)
            suspect.usual = upper_quartile([rates[cell] for cell in suspect.healthy] or [0.0])
        found += suspects
    return found


def _gather_again(
    context: Context, wire: Wire, suspects: Sequence[Suspect]
) -> tuple[list[Suspect], list[str]]:
    """Measure each suspect again until it is clear whether it is slow; return doubts as well."""
    repeated, doubts = [], []
    if len(suspects) > MOST_SUSPECTS:
        more = len(suspects) - MOST_SUSPECTS
        doubts.append(f"{more} more links or ends looked slow and were not measured again")
    for suspect in suspects[:MOST_SUSPECTS]:
        name = " and ".join(judge.name_suspect_ends(suspect, _name_hosts(context)))
        if not suspect.healthy:
            doubts.append(f"{name} looked slow, and there is no healthy link to compare with")
            continue
        context.report_progress(f"links of {name} again")
        steps = [[cell] for cell in (*suspect.cells, *suspect.healthy)]
        for _ in range(MOST_TIMES):
            readings = gather_readings(context.world, wire, steps, AGAIN_SECONDS)
            slow, healthy = (
                max(readings[cell].bytes_per_second for cell in cells)
                for cells in (suspect.cells, suspect.healthy)
            )
            suspect.measured.append((slow, healthy))
            if suspect.is_slow is not None:
                break
        else:
            doubts.append(f"{name} looked slow, but healthy links beside it varied as much")
        repeated.append(suspect)
    return repeated, doubts


def _name_hosts(context: Context) -> dict[int, str]:
    return {member.rank: member.host for member in context.world.members}


def _between_gpus(context: Context) -> bool:
    """Return whether the links within a host connect GPUs without sockets."""
    on_host = devices.of(context.device).memory == "host"
    return not on_host and context.backend.transport != "tcp"


def _judge(
    context: Context,
    schedule: Schedule,
    cells: list[list[Any]],
    repeated: Sequence[Suspect],
    doubts: Sequence[str],
) -> Outcome:
    host = _name_hosts(context)
    figures = {
        "ends": [[end, host[end]] for end in schedule.ends],
        "kind": schedule.kind,
        "cells": cells,
        "again": [_list_figures(suspect) for suspect in repeated],
    }
    crossing = [cell for cell in cells if host[cell[0]] != host[cell[1]]]
    within = [cell for cell in cells if host[cell[0]] == host[cell[1]]]
    confirmed = [suspect for suspect in repeated if suspect.is_slow]
    lines = [
        schedule.cost,
        *judge.summarise("between hosts", crossing),
        *judge.summarise("within hosts", within),
        *([WITHIN] if within and not _between_gpus(context) else []),
    ]
    if repeated:
        lines.append(
            f"looked slow and measured again beside healthy links: {len(repeated)}; slow each of "
            f"{judge.TIMES} times: {len(confirmed)}"
        )
    two_hosts = [TWO_HOSTS] if len(context.world.hosts) == 2 else []
    return Outcome(
        lines=tuple(lines),
        unchecked=(*schedule.unchecked, *doubts, *two_hosts),
        findings=tuple(judge.describe_slow(suspect, host) for suspect in confirmed),
        figures=figures,
        tables=(judge.build_table(figures),),
    )


def _list_figures(suspect: Suspect) -> dict[str, Any]:
    slow, others = suspect.rates
    return {
        "kind": suspect.kind,
        "one": [suspect.one],
        "other": [] if suspect.other is None else [suspect.other],
        "ways": suspect.ways,
        "confirmed": bool(suspect.is_slow),
        "bytes_per_second": slow,
        "others_bytes_per_second": others,
    }


# --- one direction of one link --------------------------------------------------------------------

# The sender alone takes the time. The control group announces the size of a burst. The clock of the
# sender's device runs from when the receiver is ready until the receiver confirms the last byte; a
# round trip is a burst of a few bytes. The rate is that of the time beyond the shortest round trip;
# with the usual round trip, links of a busy host would look faster than they are.
#
# On a GPU a burst is a single message, and the receiving GPU sleeps until its host has handed over
# all of it, because a slow host must not look like a slow link.

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
        spread = judge.DEVIATION / 2 * (high - low) / middle
        return Reading(upper_quartile(rates), median(trips) / 2, spread)

    def follow(self, peer: int) -> None:
        """Answer a peer that calls `lead`."""
        while nbytes := control.receive_number(peer):
            messages = self._messages(nbytes)
            if not self._on_host:
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
