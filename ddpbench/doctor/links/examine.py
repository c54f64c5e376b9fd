"""What every pair of ranks or hosts can send each other, and which link, host or rank is slow.

First pairs that share no rank work all at once, then each alone. What is slow then is measured
again, in turn with healthy links, and told only when it was slow each time. Of more pairs than
--max-pairs the ranks are cut in halves, these again, and only pairs across a cut are measured, all
at once. Only links between hosts are judged, and between GPUs that do not use sockets: what memory
or loopback carries on few cores is the scheduler's choice.

figures: ends [rank, host]…; kind "hosts" or "ranks"; pairs, rounds, seconds (of one way of a pair);
halved; cells [sender, receiver, alone, at_once, latency_seconds]…, rates in bytes a second, null
where not measured; again, a suspicion each: kind, one, other (ranks), ways, confirmed,
bytes_per_second, line_bits_per_second (of the Ethernet on which TCP carries so much; null where no
TCP does), the same of healthy links with others_ before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.links import findings, suspects
from ddpbench.doctor.links.findings import Carried, Places
from ddpbench.doctor.links.schedule import MOST_SECONDS, Course, planned
from ddpbench.doctor.links.suspects import Again, Cell, Rates, Suspect
from ddpbench.doctor.links.wire import Reading, Wire, walked

UNJUDGED_SECONDS = 0.05  # of one way of a pair
AGAIN_SECONDS = 0.1
MOST_SUSPECTS = 5  # that are measured again

NOTHING = {
    "rank": "one rank: there is no link",
    "host": "one host: there is no link between hosts; --by rank measures those within it",
}
TWO_HOSTS = (
    "two hosts: there is no other link to hold theirs against, so only the two ways are compared, "
    "and a slow link is not told from a slow host"
)
WITHIN = (
    "links within a host are shown, not judged: what memory and loopback carry depends on where "
    "the scheduler puts the ranks"
)


def examine(context: Context) -> Outcome:
    """All ranks call it."""
    import torch

    ranks = context.ranks
    judged = len(ranks.hosts) > 1 or _gpus(context)
    its = planned(
        list(ranks.hosts.values()), context.by, context.max_pairs, context.seconds,
        MOST_SECONDS if judged else UNJUDGED_SECONDS,
    )  # fmt: skip
    if len(its.ends) < 2:
        return Outcome(unchecked=(NOTHING[context.by],))
    context.tell(f"links, {its.cost}")
    # gloo's point-to-point takes no tensor of a GPU, and its links are the same.
    device = torch.device("cpu") if context.backend.transport == "tcp" else context.device
    wire = Wire(context.tested, device)
    walked(ranks, wire, its.connecting(), 0.0)  # many connections are made at the first message
    at_once = _joined(walked(ranks, wire, its.at_once(), its.seconds))
    alone = _joined(walked(ranks, wire, its.alone(context.seed), its.seconds))
    seen, doubts = _again(context, its, wire, [alone, at_once])
    carried = {
        cell: Carried(
            alone[cell].bytes_per_second if cell in alone else None,
            at_once[cell].bytes_per_second if cell in at_once else None,
            (alone or at_once)[cell].latency_seconds,
        )
        for cell in sorted({*alone, *at_once})
    }
    return _outcome(context, its, carried, seen, doubts)


def _again(
    context: Context, course: Course, wire: Wire, readings: Sequence[dict[Cell, Reading]]
) -> tuple[list[tuple[str, Again]], list[str]]:
    """What looks slow, measured again until it once does not; what could not be."""
    best = _best(readings)
    suspected, places = _suspected(context, course, best), _places(context)
    done, doubts = [], []
    if len(suspected) > MOST_SUSPECTS:
        more = len(suspected) - MOST_SUSPECTS
        doubts.append(f"{more} more links or ends looked slow, and were not measured again")
    for kind, suspect, slow, healthy in suspected[:MOST_SUSPECTS]:
        name = places.names(suspect.ends, kind)
        if not healthy:
            doubts.append(f"{name} looked slow, and no healthy link is left to hold it against")
            continue
        context.tell(f"links of {name} again")
        steps = [[cell] for cell in _in_turn(slow, healthy)]
        seen = Again(suspect, suspects.upper(best[cell].bytes_per_second for cell in healthy))
        while not seen.decided:
            its = _joined(walked(context.ranks, wire, steps, AGAIN_SECONDS))
            rates = [[its[c].bytes_per_second for c in cells] for cells in (slow, healthy)]
            seen = seen.and_again(*rates)
        done.append((kind, seen))
        if not seen.confirmed and not seen.cleared:
            doubts.append(f"{name} looked slow, but beside it healthy links varied as much")
    return done, doubts


def _best(readings: Sequence[dict[Cell, Reading]]) -> dict[Cell, Reading]:
    """Of each cell its fastest reading: what else a host does makes a link slower, never faster."""
    best: dict[Cell, Reading] = {}
    for cell, each in (item for its in readings for item in its.items()):
        if cell not in best or each.bytes_per_second > best[cell].bytes_per_second:
            best[cell] = each
    return best


def _suspected(
    context: Context, course: Course, readings: dict[Cell, Reading]
) -> list[tuple[str, Suspect, list[Cell], list[Cell]]]:
    """What looks slow: the kind of its ends, the cells to measure again, healthy ones."""
    host = course.host
    crossing = {c: each for c, each in readings.items() if host[c[0]] != host[c[1]]}
    rates = {cell: each.bytes_per_second for cell, each in crossing.items()}
    views: list[tuple[str, Rates, Sequence[Reading]]] = []
    if crossing:
        views.append(("host", suspects.between(rates, host), [*crossing.values()]))
        if course.kind == "ranks":
            views.append(("rank", suspects.shares(rates, host), [*crossing.values()]))
    for each in course.hosts if _gpus(context) else ():
        inside = {c: its for c, its in readings.items() if {host[end] for end in c} == {each}}
        rates = {cell: its.bytes_per_second for cell, its in inside.items()}
        views.append(("neighbour", rates, [*inside.values()]))
    suspected = []
    for kind, its, read in views:
        spread = median(each.spread for each in read) if read else 0.0
        found = suspects.merged(suspects.suspects(its, spread), course.cuts) if its else []
        suspected += [(kind, each, *suspects.again(each, its, found)) for each in found]
    return suspected


def _outcome(
    context: Context, course: Course, carried: dict[Cell, Carried],
    seen: Sequence[tuple[str, Again]], doubts: Sequence[str],
) -> Outcome:  # fmt: skip
    crossing = {c: its for c, its in carried.items() if course.host[c[0]] != course.host[c[1]]}
    within = {c: its for c, its in carried.items() if c not in crossing}
    told = [course.cost, *findings.told("between hosts", crossing)]
    told += findings.told("within hosts", within)
    if seen:
        confirmed = sum(each.confirmed for _, each in seen)
        told.append(
            f"measured again beside healthy links, since they looked slow: {len(seen)}; slow each "
            f"of {suspects.TIMES} times: {confirmed}"
        )
    places, two = _places(context), len(course.hosts) == 2
    found = [findings.finding(each, kind, places, two) for kind, each in seen if each.confirmed]
    rates = {cell: its.bytes_per_second for cell, its in crossing.items()}
    found += findings.below_nominal(rates, places)
    unchecked = [*course.unchecked, *doubts, *([TWO_HOSTS] if two else [])]
    unchecked += [WITHIN] if within and not _gpus(context) else []
    figures = _figures(course, carried, places, seen)
    return Outcome(tuple(told), tuple(unchecked), tuple(found), figures)


def _figures(
    course: Course, carried: dict[Cell, Carried], places: Places, seen: Sequence[tuple[str, Again]]
) -> dict[str, Any]:
    again = []
    for kind, each in seen:
        rates = each.bytes_per_second, each.others_bytes_per_second
        line = [places.line_rate(rate, kind) for rate in rates]
        again.append(
            {
                "kind": kind,
                "one": list(each.suspect.one),
                "other": list(each.suspect.other),
                "ways": each.suspect.ways,
                "confirmed": each.confirmed,
                "bytes_per_second": rates[0],
                "others_bytes_per_second": rates[1],
                "line_bits_per_second": line[0],
                "others_line_bits_per_second": line[1],
            }
        )
    return {
        "ends": [[end, places.host[end]] for end in course.ends],
        "kind": course.kind,
        "pairs": course.pairs,
        "rounds": len(course.rounds),
        "seconds": course.seconds,
        "halved": bool(course.cuts),
        "cells": [
            [*cell, its.alone, its.at_once, its.latency_seconds] for cell, its in carried.items()
        ],
        "again": again,
    }


def _places(context: Context) -> Places:
    facts = [rank.get("interface") or {} for rank in context.launch.ranks]
    return Places(
        host={who.rank: who.host for who in context.ranks.members},
        ethernet=context.backend.transport == "tcp" and len(context.ranks.hosts) > 1,
        mtu_nbytes=min(its.get("mtu_nbytes") or findings.MTU_NBYTES for its in facts),
        nominal={r: its.get("nominal_bytes_per_second") for r, its in enumerate(facts)},
    )


def _gpus(context: Context) -> bool:
    """Whether the links within a host are those of GPUs, and no sockets."""
    return context.device.type == "cuda" and context.backend.transport != "tcp"


def _joined(found: Sequence[dict[Cell, Reading]]) -> dict[Cell, Reading]:
    return {cell: reading for each in found for cell, reading in each.items()}


def _in_turn(slow: Sequence[Cell], healthy: Sequence[Cell]) -> list[Cell]:
    """One of these, one of those, and the rest."""
    both = [cell for pair in zip(slow, healthy, strict=False) for cell in pair]
    return [*both, *slow[len(healthy) :], *healthy[len(slow) :]]
