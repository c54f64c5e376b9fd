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
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ddpbench.analysis.rates import upper_quartile
from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.links import judge
from ddpbench.doctor.links.judge import Again, Cell, Halves, Pair, Places, Rates
from ddpbench.doctor.links.wire import Readings, Wire, agree_wire, gather_readings
from ddpbench.records.table import Table, TableColumn
from ddpbench.records.wording import counted
from ddpbench.runtime import devices

# --- which pairs, in which order ------------------------------------------------------------------

SHARE = 0.7  # of the time of the examination; the rest is for suspects
LEAST_SECONDS, MOST_SECONDS = 0.02, 0.2  # of one way of a pair
UNJUDGED_SECONDS = 0.05  # the most, of one way of a pair that is not judged
FEW = 4  # with fewer ends a round has one pair, so all at once is the same as alone


@dataclass(frozen=True)
class Schedule:
    """The pairs to measure, in rounds."""

    ends: tuple[int, ...]
    host: dict[int, int]  # end → first rank of its host
    rounds: Sequence[Sequence[Pair]]  # disjoint pairs in each
    cuts: Sequence[Halves]  # empty: every pair is measured, all at once and alone
    seconds: float  # of one way of a pair
    unchecked: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Return what the ends stand for: "hosts" or "ranks"."""
        return "hosts" if 1 < len(set(self.host.values())) == len(self.ends) else "ranks"

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
    ends, firsts = tuple(itertools.chain(*hosts)), tuple(ranks[0] for ranks in hosts)
    unchecked = []
    if by != "host" and 1 < len(hosts) < len(ends) and (every := _count_pairs(ends)) > max_pairs:
        unchecked.append(
            f"only one rank of each host was measured: {len(ends)} ranks have {every} links, more "
            f"than --max-pairs {max_pairs}"
        )
        by = "host"
    ends = firsts if by == "host" else ends
    every = _count_pairs(ends)
    depths = judge.halve(ends) if every > max_pairs else []
    rounds = [[pair for cut in cuts for pair in judge.pair_across(cut)] for cuts in depths]
    rounds = rounds or judge.plan_circle(ends)
    pairs = sum(map(len, rounds))
    if pairs < every:
        unchecked.append(
            f"{every - pairs} of {every} links were not measured, and a slow one among them would "
            f"not be seen (--max-pairs {every} measures all)"
        )
    steps = 2 * (len(rounds) + (0 if depths else pairs))
    each = max(LEAST_SECONDS, min(SHARE * seconds / max(1, steps), most_seconds))
    host = {rank: ranks[0] for ranks in hosts for rank in ranks if rank in set(ends)}
    return Schedule(ends, host, rounds, list(itertools.chain(*depths)), each, tuple(unchecked))


def _count_pairs(ends: Sequence[int]) -> int:
    return len(ends) * (len(ends) - 1) // 2


# --- the examination ------------------------------------------------------------------------------

AGAIN_SECONDS = 0.1  # of one way of a pair that is measured again
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


def examine(context: Context) -> Outcome:
    """Measure and judge the links. All ranks call it."""
    import torch

    world, between_gpus = context.world, _between_gpus(context)
    hosts = list(world.hosts.values())
    most_seconds = MOST_SECONDS if len(hosts) > 1 or between_gpus else UNJUDGED_SECONDS
    schedule = plan_schedule(hosts, context.by, context.max_pairs, context.seconds, most_seconds)
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
    alone = gather_readings(world, wire, schedule.alone(context.seed), schedule.seconds)
    best = dict(alone)
    for cell, reading in at_once.items():  # other load makes a link slower, never faster
        best[cell] = max(reading, best.get(cell, reading))
    suspects = _list_suspects(schedule, best, between_gpus)
    repeated, doubts = _gather_again(context, wire, suspects)
    cells = [
        [*cell, _rate(alone, cell), _rate(at_once, cell), (alone or at_once)[cell].latency_seconds]
        for cell in sorted(best)
    ]
    return _outcome(context, schedule, cells, repeated, doubts)


def _rate(readings: Readings, cell: Cell) -> float | None:
    return readings[cell].bytes_per_second if cell in readings else None


def _outcome(
    context: Context,
    schedule: Schedule,
    cells: list[list[Any]],
    repeated: Sequence[Again],
    doubts: Sequence[str],
) -> Outcome:
    host, places = schedule.host, _places(context)
    crossing = [cell for cell in cells if host[cell[0]] != host[cell[1]]]
    within = [cell for cell in cells if host[cell[0]] == host[cell[1]]]
    confirmed = [again for again in repeated if again.confirmed]
    lines = [
        schedule.cost,
        *summarise("between hosts", crossing),
        *summarise("within hosts", within),
        *([WITHIN] if within and not _between_gpus(context) else []),
    ]
    if repeated:
        lines.append(
            f"looked slow and measured again beside healthy links: {len(repeated)}; slow each of "
            f"{judge.TIMES} times: {len(confirmed)}"
        )
    two_hosts = len(set(host.values())) == 2
    slow = [judge.describe_slow(again, places, two_hosts) for again in confirmed]
    rates = {(a, b): alone or at_once for a, b, alone, at_once, _ in crossing}
    figures = _figures(schedule, places, cells, repeated)
    return Outcome(
        lines=tuple(lines),
        unchecked=(*schedule.unchecked, *doubts, *([TWO_HOSTS] if two_hosts else [])),
        findings=(*slow, *judge.find_below_nominal(rates, places)),
        figures=figures,
        tables=build_tables(figures, context.backend.name),
    )


def _figures(
    schedule: Schedule, places: Places, cells: list[list[Any]], repeated: Sequence[Again]
) -> dict[str, Any]:
    return {
        "ends": [[end, places.host[end]] for end in schedule.ends],
        "kind": schedule.kind,
        "pairs": schedule.pairs,
        "rounds": len(schedule.rounds),
        "seconds": schedule.seconds,
        "halved": bool(schedule.cuts),
        "cells": cells,
        "again": [
            {
                "kind": (kind := again.suspect.kind),
                "one": list(again.suspect.one),
                "other": list(again.suspect.other),
                "ways": again.suspect.ways,
                "confirmed": again.confirmed,
                "bytes_per_second": again.slow_rate,
                "others_bytes_per_second": again.others_rate,
                "line_bits_per_second": places.line_rate(again.slow_rate, kind),
                "others_line_bits_per_second": places.line_rate(again.others_rate, kind),
            }
            for again in repeated
        ],
    }


def _list_suspects(schedule: Schedule, readings: Readings, between_gpus: bool) -> list[Again]:
    """Return each suspect with the cells to measure again, and healthy ones."""
    host = schedule.host
    rates = {cell: reading.bytes_per_second for cell, reading in readings.items()}
    within: dict[int | None, dict[Cell, float]] = {}  # host, None between hosts → cell → rate
    for (a, b), rate in rates.items():
        within.setdefault(host[a] if host[a] == host[b] else None, {})[a, b] = rate
    views: list[tuple[str, Rates, Rates]] = []
    if crossing := within.pop(None, None):
        views.append(("host", judge.combine_hosts(crossing, host), crossing))
        if schedule.kind == "ranks":
            views.append(("rank", judge.compare_with_hosts(crossing, host), crossing))
    views += [("neighbour", inside, inside) for inside in within.values() if between_gpus]
    found = []
    for kind, seen, measured in views:
        spread = median(readings[cell].spread for cell in measured)
        slow = judge.merge_cuts(judge.find_suspects(seen, spread), schedule.cuts)
        for suspect in slow:
            cells, healthy = judge.choose_cells(suspect, seen, slow)
            usual = upper_quartile(rates[cell] for cell in healthy) if healthy else 0.0
            found.append(Again(replace(suspect, kind=kind), cells, healthy, usual))
    return found


def _gather_again(
    context: Context, wire: Wire, suspects: Sequence[Again]
) -> tuple[list[Again], list[str]]:
    """Measure each suspect again until it is cleared or confirmed; return doubts as well."""
    places, repeated, doubts = _places(context), list[Again](), list[str]()
    if len(suspects) > MOST_SUSPECTS:
        more = len(suspects) - MOST_SUSPECTS
        doubts.append(f"{more} more links or ends looked slow and were not measured again")
    for again in suspects[:MOST_SUSPECTS]:
        name = places.names(again.suspect.ends, again.suspect.kind)
        if not again.healthy:
            doubts.append(f"{name} looked slow, and there is no healthy link to compare it with")
            continue
        context.report_progress(f"links of {name} again")
        # In turn, then the rest.
        pairs = itertools.zip_longest(again.cells, again.healthy)
        steps = [[cell] for pair in pairs for cell in pair if cell is not None]
        while not again.decided:
            readings = gather_readings(context.world, wire, steps, AGAIN_SECONDS)
            again.add({cell: reading.bytes_per_second for cell, reading in readings.items()})
        repeated.append(again)
        if not again.confirmed and not again.cleared:
            doubts.append(f"{name} looked slow, but healthy links beside it varied as much")
    return repeated, doubts


def _places(context: Context) -> Places:
    interfaces = [rank.get("interface") or {} for rank in context.launch.ranks]
    return Places(
        host={member.rank: member.host for member in context.world.members},
        ethernet=context.backend.transport == "tcp" and len(context.world.hosts) > 1,
        mtu_nbytes=min(i.get("mtu_nbytes") or judge.MTU_NBYTES for i in interfaces),
        nominal={r: i.get("nominal_bytes_per_second") for r, i in enumerate(interfaces)},
    )


def _between_gpus(context: Context) -> bool:
    """Tell whether the links within a host connect GPUs without sockets."""
    on_host = devices.of(context.device).memory == "host"
    return not on_host and context.backend.transport != "tcp"


# --- output ---------------------------------------------------------------------------------------

MOST_ENDS = 10  # in a matrix
SLOWEST = 10  # in a list


def summarise(title: str, cells: Sequence[Sequence[Any]]) -> list[str]:
    """Return one line on the rates and latencies of these cells; none without cells."""
    if not cells:
        return []
    rates = [(alone or at_once) / 1e6 for _, _, alone, at_once, _ in cells]
    shares = [at_once / alone for _, _, alone, at_once, _ in cells if at_once and alone]
    where = "alone" if all(cell[2] for cell in cells) else "all at once"
    parts = [f"{title}: {_range(rates)} MB/s {where}"]
    if shares:
        parts.append(f"{median(shares) * 100:.0f} % of that all at once")
    return [", ".join([*parts, f"latency {_range([cell[4] * 1e6 for cell in cells])} µs"])]


def _range(values: Sequence[float]) -> str:
    middle, least, most = map(_short, (median(values), min(values), max(values)))
    return f"{middle} ({least} … {most})"


def build_tables(figures: Mapping[str, Any], backend: str) -> tuple[Table, ...]:
    """Return matrices of rates and latencies; with many ends a list of the slowest cells."""
    cells, names = figures["cells"], _name_ends(figures)
    measured = [rate for cell in cells for rate in cell[2:4] if rate]
    scale, unit = (1e9, "GB/s") if min(measured) >= 1e9 else (1e6, "MB/s")
    shown = [
        (names[a], names[b], _scaled(alone, scale), _scaled(at_once, scale), _short(latency * 1e6))
        for a, b, alone, at_once, latency in sorted(cells, key=lambda cell: cell[2] or cell[3])
    ]
    if len(names) > MOST_ENDS:
        headings = ["from", "to", f"{unit} alone", "all at once", "latency µs"]
        title = f"the slowest {SLOWEST} of {len(cells)} ways between {figures['kind']}"
        return (Table(title, tuple(map(TableColumn, headings)), tuple(shown[:SLOWEST])),)
    ways = [] if figures["halved"] else ["alone"]
    ways += ["all at once"] if any(cell[3] for cell in cells) else []
    rates = {(a, b): " / ".join(filter(None, both)) for a, b, *both, _ in shown}
    latencies = {(a, b): latency for a, b, _, _, latency in shown}
    return (
        _matrix(f"{unit} {' / '.join(ways)}", rates, list(names.values())),
        _matrix("latency µs, half a round trip", latencies, list(names.values())),
    )


def _matrix(content: str, cells: Mapping[tuple[str, str], str], names: Sequence[str]) -> Table:
    return Table(
        f"{content}; each row sends to the columns",
        tuple(map(TableColumn, ["", *names])),
        tuple((sender, *(cells.get((sender, receiver)) for receiver in names)) for sender in names),
    )


def _name_ends(figures: Mapping[str, Any]) -> dict[int, str]:
    """Return a name for each end: its host, its rank, or both."""
    hosts = {host for _, host in figures["ends"]}
    if figures["kind"] == "hosts" and len(hosts) == len(figures["ends"]):
        return dict(figures["ends"])
    if len(hosts) == 1:
        return {rank: f"rank {rank}" for rank, _ in figures["ends"]}
    return {rank: f"{rank} {host}" for rank, host in figures["ends"]}


def _scaled(rate: float | None, scale: float) -> str | None:
    return _short(rate / scale) if rate else None


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
