"""Links: measure what each pair of ranks or hosts can send; find slow links, hosts and ranks.

First, pairs that share no rank send all at once; then each pair sends alone. A slow link or end is
measured again, in turn with healthy links, and reported only if it was slow each time. With more
pairs than --max-pairs the ranks are divided into halves, these again, and only pairs across a cut
are measured, all at once. Only links between hosts are judged, and links between GPUs that do not
use sockets: on few cores the scheduler decides what memory and loopback carry.

figures: ends [rank, host]…; kind "hosts" or "ranks"; pairs, rounds, seconds (of one way of a pair);
halved; cells [sender, receiver, alone, at_once, latency_seconds]…, rates in bytes a second, null if
not measured; again, one entry for each suspect: kind, one, other (ranks), ways, confirmed,
bytes_per_second, line_bits_per_second (of the Ethernet on which TCP carries that rate; null without
TCP), and the same of healthy links with the prefix others_.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.links import findings, suspects
from ddpbench.doctor.links.findings import Carried, Places
from ddpbench.doctor.links.suspects import Again, Cell, Halves, Pair, Rates, Suspect
from ddpbench.doctor.links.wire import Reading, Wire, agree_wire, gather_readings
from ddpbench.records.wording import counted
from ddpbench.runtime import devices

UNJUDGED_SECONDS = 0.05  # of one way of a pair
AGAIN_SECONDS = 0.1
MOST_SUSPECTS = 5  # that are measured again

NOTHING = {
    "rank": "links: there is only one rank",
    "host": "links between hosts: there is only one host; --by rank measures the links within it",
}
TWO_HOSTS = (
    "slow link or slow host: with two hosts there is no other link to compare with, so only the "
    "two directions are compared"
)
WITHIN = (
    "links within a host are shown, not judged: their rates depend on the cores on which the "
    "scheduler puts the ranks"
)

Readings = dict[Cell, Reading]
SHARE = 0.7  # of the time of the examination; the rest is for suspects
LEAST_SECONDS, MOST_SECONDS = 0.02, 0.2  # of one way of a pair
FEW = 4  # with fewer ends a round has one pair, so all at once is the same as alone


def examine(context: Context) -> Outcome:
    """Measure and judge the links. All ranks call it."""
    import torch

    world = context.world
    judged = len(world.hosts) > 1 or _between_gpus(context)
    schedule = plan_schedule(
        list(world.hosts.values()),
        context.by,
        context.max_pairs,
        seconds=context.seconds,
        most_seconds=MOST_SECONDS if judged else UNJUDGED_SECONDS,
    )
    if len(schedule.ends) < 2:
        return Outcome(unchecked=(NOTHING[context.by],))
    context.report_progress(f"links, {schedule.cost}")
    # gloo sends no tensor of a GPU from point to point, and its links are the same.
    device = torch.device("cpu") if context.backend.transport == "tcp" else context.device
    wire = agree_wire(world, context.process_group, device)
    # Many connections are made at the first message. The group itself is connected already: with
    # nccl, the first operation of a group needs all its ranks, and some are in no pair.
    gather_readings(world, wire, schedule.rounds, 0.0)
    at_once = gather_readings(world, wire, schedule.at_once(), schedule.seconds)
    steps = schedule.alone(context.seed)
    alone = gather_readings(world, wire, steps, schedule.seconds)
    repeated, doubts = _gather_again(context, schedule, wire, _best(alone, at_once))
    carried = {
        cell: Carried(
            alone[cell].bytes_per_second if cell in alone else None,
            at_once[cell].bytes_per_second if cell in at_once else None,
            (alone or at_once)[cell].latency_seconds,
        )
        for cell in sorted({*alone, *at_once})
    }
    return _outcome(context, schedule, carried, repeated, doubts)


def _gather_again(
    context: Context, schedule: Schedule, wire: Wire, best: Readings
) -> tuple[list[tuple[str, Again]], list[str]]:
    """Measure each suspect again until it is cleared or confirmed; return doubts as well."""
    candidates, places = _suspects(context, schedule, best), _places(context)
    repeated, doubts = [], []
    if len(candidates) > MOST_SUSPECTS:
        more = len(candidates) - MOST_SUSPECTS
        doubts.append(f"{more} more links or ends looked slow and were not measured again")
    for kind, suspect, slow, healthy in candidates[:MOST_SUSPECTS]:
        name = places.names(suspect.ends, kind)
        if not healthy:
            doubts.append(f"{name} looked slow, and there is no healthy link to compare it with")
            continue
        context.report_progress(f"links of {name} again")
        # In turn, then the rest.
        pairs = itertools.zip_longest(slow, healthy)
        steps = [[cell] for pair in pairs for cell in pair if cell is not None]
        again = Again(suspect, suspects.upper(best[cell].bytes_per_second for cell in healthy))
        while not again.decided:
            readings = gather_readings(context.world, wire, steps, AGAIN_SECONDS)
            again = again.and_again(
                *([readings[c].bytes_per_second for c in cells] for cells in (slow, healthy))
            )
        repeated.append((kind, again))
        if not again.confirmed and not again.cleared:
            doubts.append(f"{name} looked slow, but healthy links beside it varied as much")
    return repeated, doubts


def _best(alone: Readings, at_once: Readings) -> Readings:
    """Return the fastest reading of each cell: other load makes a link slower, never faster."""
    best = dict(alone)
    for cell, reading in at_once.items():
        if cell not in best or reading.bytes_per_second > best[cell].bytes_per_second:
            best[cell] = reading
    return best


def _suspects(
    context: Context, schedule: Schedule, readings: Readings
) -> list[tuple[str, Suspect, list[Cell], list[Cell]]]:
    """Return each suspect with the kind of its ends, cells to measure again, and healthy ones."""
    host = schedule.host
    crossing = {c: reading for c, reading in readings.items() if host[c[0]] != host[c[1]]}
    rates = _rates(crossing)
    views: list[tuple[str, Rates, Readings]] = []
    if crossing:
        views.append(("host", suspects.between(rates, host), crossing))
        if schedule.kind == "ranks":
            views.append(("rank", suspects.shares(rates, host), crossing))
    for one in schedule.hosts if _between_gpus(context) else ():
        inside = {c: reading for c, reading in readings.items() if {host[e] for e in c} == {one}}
        views.append(("neighbour", _rates(inside), inside))
    candidates = []
    for kind, seen, measured in views:
        spread = median(reading.spread for reading in measured.values()) if measured else 0.0
        slow = suspects.merged(suspects.suspects(seen, spread), schedule.cuts) if seen else []
        candidates += [(kind, one, *suspects.again(one, seen, slow)) for one in slow]
    return candidates


def _rates(readings: Readings) -> dict[Cell, float]:
    return {cell: reading.bytes_per_second for cell, reading in readings.items()}


def _outcome(
    context: Context,
    schedule: Schedule,
    carried: Mapping[Cell, Carried],
    repeated: Sequence[tuple[str, Again]],
    doubts: Sequence[str],
) -> Outcome:
    host, places = schedule.host, _places(context)
    crossing = {cell: c for cell, c in carried.items() if host[cell[0]] != host[cell[1]]}
    within = {cell: c for cell, c in carried.items() if cell not in crossing}
    lines = [
        schedule.cost,
        *findings.summary("between hosts", crossing),
        *findings.summary("within hosts", within),
    ]
    if within and not _between_gpus(context):
        lines.append(WITHIN)
    if repeated:
        confirmed = sum(again.confirmed for _, again in repeated)
        lines.append(
            f"looked slow and measured again beside healthy links: {len(repeated)}; slow each of "
            f"{suspects.TIMES} times: {confirmed}"
        )
    two_hosts = len(schedule.hosts) == 2
    slow = [
        findings.finding(again, kind, places, two_hosts)
        for kind, again in repeated
        if again.confirmed
    ]
    rates = {cell: c.bytes_per_second for cell, c in crossing.items()}
    unchecked = [*schedule.unchecked, *doubts, *([TWO_HOSTS] if two_hosts else [])]
    figures = _figures(schedule, carried, places, repeated)
    return Outcome(
        lines=tuple(lines),
        unchecked=tuple(unchecked),
        findings=(*slow, *findings.below_nominal(rates, places)),
        figures=figures,
        tables=findings.build_tables(figures, context.backend.name),
    )


def _figures(
    schedule: Schedule,
    carried: Mapping[Cell, Carried],
    places: Places,
    repeated: Sequence[tuple[str, Again]],
) -> dict[str, Any]:
    return {
        "ends": [[end, places.host[end]] for end in schedule.ends],
        "kind": schedule.kind,
        "pairs": schedule.pairs,
        "rounds": len(schedule.rounds),
        "seconds": schedule.seconds,
        "halved": bool(schedule.cuts),
        "cells": [[*cell, c.alone, c.at_once, c.latency_seconds] for cell, c in carried.items()],
        "again": [
            {
                "kind": kind,
                "one": list(again.suspect.one),
                "other": list(again.suspect.other),
                "ways": again.suspect.ways,
                "confirmed": again.confirmed,
                "bytes_per_second": (rate := again.bytes_per_second),
                "others_bytes_per_second": (others_rate := again.others_bytes_per_second),
                "line_bits_per_second": places.line_rate(rate, kind),
                "others_line_bits_per_second": places.line_rate(others_rate, kind),
            }
            for kind, again in repeated
        ],
    }


def _places(context: Context) -> Places:
    interfaces = [rank.get("interface") or {} for rank in context.launch.ranks]
    return Places(
        host={member.rank: member.host for member in context.world.members},
        ethernet=context.backend.transport == "tcp" and len(context.world.hosts) > 1,
        mtu_nbytes=min(i.get("mtu_nbytes") or findings.MTU_NBYTES for i in interfaces),
        nominal={r: i.get("nominal_bytes_per_second") for r, i in enumerate(interfaces)},
    )


def _between_gpus(context: Context) -> bool:
    """Tell whether the links within a host connect GPUs without sockets."""
    on_host = devices.of(context.device).memory == "host"
    return not on_host and context.backend.transport != "tcp"


@dataclass(frozen=True)
class Schedule:
    """The pairs to measure, in rounds."""

    ends: tuple[int, ...]
    host: dict[int, int]  # end → first rank of its host
    rounds: tuple[tuple[Pair, ...], ...]  # disjoint pairs in each
    cuts: tuple[Halves, ...]  # empty: every pair is measured, all at once and alone
    seconds: float  # of one way of a pair
    unchecked: tuple[str, ...] = ()

    @property
    def hosts(self) -> list[int]:
        """Return the first rank of each host."""
        return sorted(set(self.host.values()))

    @property
    def kind(self) -> str:
        """Return what the ends stand for: "hosts" or "ranks"."""
        return "hosts" if 1 < len(self.hosts) == len(self.ends) else "ranks"

    @property
    def pairs(self) -> int:
        return sum(map(len, self.rounds))

    def at_once(self) -> list[list[Cell]]:
        """Return steps in which the pairs of a round send together, one way, then the other."""
        if len(self.ends) < FEW and not self.cuts:
            return []
        return [way for pairs in self.rounds for way in (list(pairs), [(b, a) for a, b in pairs])]

    def alone(self, seed: int) -> list[list[Cell]]:
        """Return steps of one direction of one pair, shuffled so that drift favours no end."""
        if self.cuts:
            return []
        steps = [[way] for pairs in self.rounds for a, b in pairs for way in ((a, b), (b, a))]
        random.Random(seed).shuffle(steps)
        return steps

    @property
    def cost(self) -> str:
        """Describe the links, the order and the time in one line."""
        how = [f"all at once in {counted(len(self.rounds), 'round')}"] if self.at_once() else []
        how += [] if self.cuts else ["one by one"]
        seconds = (len(self.at_once()) + len(self.alone(0))) * self.seconds * 1.2 + 0.5
        return (
            f"{len(self.ends)} {self.kind}, {counted(self.pairs, 'link')}, {' and '.join(how)}, "
            f"both ways, {self.seconds * 1e3:.0f} ms each: about {max(1.0, seconds):.0f} s"
        )


def plan_schedule(
    hosts: Sequence[Sequence[int]], by: str, max_pairs: int, seconds: float, most_seconds: float
) -> Schedule:
    """Plan the links between all ranks of these hosts or, with by "host", the first of each.

    With more pairs than max_pairs only one rank of each host is measured; if these are still too
    many, only pairs across the cuts of their halves. seconds: of everything, approximately;
    most_seconds: of one direction of a pair.
    """
    ends = tuple(rank for ranks in hosts for rank in ranks)
    unchecked = []
    if by == "host":
        ends = tuple(ranks[0] for ranks in hosts)
    elif 1 < len(hosts) < len(ends) and _pairs(ends) > max_pairs:
        unchecked.append(
            f"only one rank of each host was measured: {len(ends)} ranks have {_pairs(ends)} "
            f"links, more than --max-pairs {max_pairs}"
        )
        ends = tuple(ranks[0] for ranks in hosts)
    depths = suspects.halved(ends) if _pairs(ends) > max_pairs else []
    rounds = [[pair for cut in cuts for pair in suspects.across(cut)] for cuts in depths]
    rounds = rounds or suspects.circle(ends)
    pairs = sum(map(len, rounds))
    if pairs < _pairs(ends):
        unchecked.append(
            f"{_pairs(ends) - pairs} of {_pairs(ends)} links were not measured, and a slow one "
            f"among them would not be seen (--max-pairs {_pairs(ends)} measures all)"
        )
    steps = 2 * (len(rounds) + (0 if depths else pairs))
    each = max(LEAST_SECONDS, min(SHARE * seconds / max(1, steps), most_seconds))
    return Schedule(
        ends,
        {rank: ranks[0] for ranks in hosts for rank in ranks if rank in set(ends)},
        tuple(map(tuple, rounds)),
        tuple(cut for cuts in depths for cut in cuts),
        each,
        tuple(unchecked),
    )


def _pairs(ends: Sequence[int]) -> int:
    return len(ends) * (len(ends) - 1) // 2
