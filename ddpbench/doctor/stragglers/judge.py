"""Which rank is slow, and why, from what each rank showed alone, with the others, and in waiting.

A rank is judged by its best round: noise makes rounds slow, and none fast. It is slow when even
that takes RATIO of the others' best, in every pass, so in all of many rounds spread over seconds.
Where the others wait for cores too, the host is busy, and nobody is judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddpbench.analysis.setup import Setup
from ddpbench.doctor.stragglers.causes import ALONE, TOGETHER, Cause, Load, Pass, cause
from ddpbench.records.schema import Finding

RATIO = 1.4
PASSES = 3  # that must agree
LATE_SHARE = 0.75  # of the repetitions in which the others wait for the same rank
BUSY_SHARE = 0.2  # of their time that usual ranks may wait for a core
NOTABLE_SHARE = 0.1  # of all ranks' time, stolen or throttled: worth a note


@dataclass(frozen=True)
class Slow:
    """One load at which a rank was slow."""

    when: str
    load: str


def suspects(passes: Sequence[Pass]) -> dict[int, list[Slow]]:
    """The ranks that were slow in every pass, and at what; where alone, not together as well."""
    found: dict[int, list[Slow]] = {}
    for rank in range(len(passes[0])):
        for when, loads in passes[0][rank].seconds.items():
            for load in loads:
                known = [each.when for each in found.get(rank, []) if each.load == load]
                if not known and all(_slow(one, rank, when, load) for one in passes):
                    found.setdefault(rank, []).append(Slow(when, load))
    return found


def late(passes: Sequence[Pass], work_seconds: float) -> int | None:
    """The rank for which the others waited in every pass, in most repetitions, for longer than it
    would take a rank that is slow to do that work."""
    ranks = {_late(one, work_seconds) for one in passes}
    return ranks.pop() if len(ranks) == 1 else None


def suspected(passes: Sequence[Pass], work_seconds: float) -> bool:
    """Whether any rank still is, so that it must be measured again."""
    return bool(suspects(passes)) or late(passes, work_seconds) is not None


def unjudged(passes: Sequence[Pass]) -> dict[str, float]:
    """When no rank could be judged because all wait for cores, and for which share of the time."""
    shown = passes[-1]
    return {
        when: statistics.median(its.kept[when].get("queued") or 0.0 for its in shown)
        for when in shown[0].seconds
        if all(_busy(shown, rank, when) for rank in range(len(shown)))
    }


def wait_seconds(shown: Pass) -> list[float | None]:
    """What each rank waits for the last to come to an all_reduce, the median: its time there less
    the least of all ranks, which needs no common clock."""
    least = [min(those) for those in zip(*(its.waited_ns for its in shown), strict=True)]
    if not least:
        return [None] * len(shown)
    return [
        statistics.median(ns - first for ns, first in zip(its.waited_ns, least, strict=True)) * 1e-9
        for its in shown
    ]


def findings(
    passes: Sequence[Pass], loads: Mapping[str, Load], setup: Setup, work_seconds: float
) -> tuple[Finding, ...]:
    """A warning for each host and cause of slowness, or for a rank that is late only."""
    if len(passes) < PASSES:
        return tuple(_notes(passes, setup, set()))
    slow, waited_for = suspects(passes), late(passes, work_seconds)
    groups: dict[tuple[str, str], list[tuple[int, Cause]]] = {}
    for rank, those in slow.items():
        why = cause(rank, those[0].when, loads[those[0].load].device, passes[-1], setup)
        groups.setdefault((setup.host(rank), why.name), []).append((rank, why))
    told = [
        _told([rank for rank, _ in group], group[0][1], slow, passes, loads, setup, waited_for)
        for group in groups.values()
    ]
    if waited_for is not None and waited_for not in slow:
        told.append(_late_only(waited_for, passes, setup, work_seconds))
    return (*told, *_notes(passes, setup, {host for host, _ in groups}))


def span(values: Sequence[float]) -> str:
    """ "118 to 121", or one number where they read alike."""
    low, high = (f"{value:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def rates(passes: Sequence[Pass], load: Load, when: str) -> list[float]:
    """Each rank's, in the unit of the load."""
    return [load.rate(best(passes, rank, when, load.name)) for rank in range(len(passes[0]))]


def best(passes: Sequence[Pass], rank: int, when: str, load: str) -> float:
    """Seconds of a repetition in the best of all rounds."""
    return min(s for one in passes for s in one[rank].seconds[when][load])


def _slow(shown: Pass, rank: int, when: str, load: str) -> bool:
    each = [its.seconds.get(when, {}).get(load) or [] for its in shown]
    others = [min(values) for other, values in enumerate(each) if other != rank and values]
    known = others and each[rank] and not _busy(shown, rank, when)
    return bool(known) and min(each[rank]) >= RATIO * statistics.median(others)


def _busy(shown: Pass, rank: int, when: str) -> bool:
    """Whether the ranks but this one usually waited for a core."""
    others = [its.kept.get(when, {}).get("queued") or 0.0 for its in shown]
    del others[rank]
    return bool(others) and statistics.median(others) > BUSY_SHARE


def _late(shown: Pass, work_seconds: float) -> int | None:
    if len(shown) < 2 or not shown[0].waited_ns:
        return None
    import numpy as np

    from ddpbench.analysis import steps  # not for a help text

    each = np.array([its.waited_ns for its in shown], dtype=np.float64) * 1e-9
    rank = steps.late_rank(each, 1 - 0.05 / len(each), (RATIO - 1) * work_seconds)
    often = 0.0 if rank is None else float((each.argmin(axis=0) == rank).mean())
    judged = rank is not None and often >= LATE_SHARE and not _busy(shown, rank, TOGETHER)
    return rank if judged else None


def _told(
    ranks: Sequence[int], why: Cause, slow: Mapping[int, Sequence[Slow]], passes: Sequence[Pass],
    loads: Mapping[str, Load], setup: Setup, waited_for: int | None,
) -> Finding:  # fmt: skip
    figures = []
    for each in slow[ranks[0]]:
        load = loads[each.load]
        others = [rank for rank in range(len(passes[0])) if each not in slow.get(rank, ())]
        own, theirs = (
            span([load.rate(best(passes, rank, each.when, each.load)) for rank in those])
            for those in (ranks, others)
        )
        words = "alone" if each.when == ALONE else "while all ranks work,"
        figures.append(f"{load.name} {words} at best {own} {load.unit}, the others {theirs}")
    late_too = waited_for in ranks and (waiting := _others_wait(passes, waited_for))
    return Finding(
        "warning",
        "slow-rank",
        f"{setup.who(ranks)} {'is' if len(ranks) == 1 else 'are'} slow: {'; '.join(figures)}; "
        f"{f'of rank {ranks[0]}: ' if len(ranks) > 1 else ''}{why.told}"
        + (f"; the others wait {waiting * 1e3:.3g} ms for it in an all_reduce" if late_too else ""),
        why.next_step,
        {**setup.place(ranks), "cause": why.name},
    )


def _others_wait(passes: Sequence[Pass], rank: int | None) -> float:
    waits = [
        seconds
        for one in passes
        for other, seconds in enumerate(wait_seconds(one))
        if other != rank and seconds is not None
    ]
    return statistics.median(waits)


def _late_only(rank: int, passes: Sequence[Pass], setup: Setup, work_seconds: float) -> Finding:
    return Finding(
        "warning",
        "late-rank",
        f"{setup.who([rank])} is late: after {work_seconds * 1e3:.3g} ms of equal work the others "
        f"wait {_others_wait(passes, rank) * 1e3:.3g} ms for it in an all_reduce, though alone it "
        "computes as fast as they do",
        "see what the backend's threads of that rank share their cores with, and its Python "
        "(a profiler, a tracer, a busy thread)",
        setup.place([rank]),
    )


def _notes(passes: Sequence[Pass], setup: Setup, told: Container[str]) -> Iterator[Finding]:
    """What held all ranks of a host up, which therefore makes none of them slow; not of hosts of
    which more is told."""
    for host, ranks, _ in setup.of_hosts():
        if host in told:
            continue
        for kind, words, step in (
            ("stolen", "the hypervisor gave its cores to others for",
             "expect times to scatter; a machine of its own has none of it"),
            ("throttled", "the control group's CPU quota held its ranks back for",
             "raise the quota, or use fewer threads"),
        ):  # fmt: skip
            shares = [
                share
                for one in passes
                for rank in ranks
                if (share := one[rank].kept.get(ALONE, {}).get(kind)) is not None
            ]
            if shares and statistics.median(shares) > NOTABLE_SHARE:
                yield Finding(
                    "note",
                    f"{kind}-time",
                    f"{host}: {words} {statistics.median(shares) * 100:.0f} % of the time that "
                    "they computed",
                    step,
                    {"host": host},
                )
