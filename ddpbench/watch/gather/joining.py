"""Join the windows of a host's ranks, and those of all hosts. Pure, no torch."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.ma  # np.median imports it when first called, which would be in a watched step
import numpy.typing as npt
from msgspec import structs

from ddpbench.records.load import join_loads
from ddpbench.records.watched import MOST_VALUES
from ddpbench.watch.gather.matching import Indices, match_hosts, match_ranks, tabulate
from ddpbench.watch.gather.offsets import SAME, Line
from ddpbench.watch.observe.links import add_links
from ddpbench.watch.window import (
    BLOCKED,
    COLUMNS,
    HOST_CALLS,
    LINKS,
    RANKS,
    ROUND_RANKS,
    HostWindow,
    Link,
    RankWindow,
    Round,
    Rows,
    Values,
    join_long_steps,
    pack_rows,
    unpack_rows,
)


@dataclass(frozen=True)
class Steps:
    """The steps of a join, and the positions of the windows that have them all."""

    first: int
    end: int
    members: Indices


def join_ranks(
    windows: Sequence[RankWindow],
    host: str,
    addresses: Sequence[str] = (),
    clock: Line = SAME,
) -> HostWindow | None:
    """Join the windows of a host's ranks; None if there are none.

    addresses: of the host; clock: how far it is ahead of rank 0's.
    """
    if not windows:
        return None
    windows = sorted(windows, key=lambda window: window.rank)
    numbers = [window.rank for window in windows]
    all_rows = [unpack_rows(window.rows) for window in windows]
    arrivals, groups, operations = tabulate(windows)
    arrivals["entered_ns"] = clock.correct(arrivals["entered_ns"])
    calls = match_ranks(arrivals)
    newest = np.argsort(calls["last_ns"])[-HOST_CALLS:]
    firsts = [window.first_step for window in windows]
    steps = _find_common(firsts, list(map(len, all_rows)))
    rows = _cut([all_rows[i] for i in steps.members], [firsts[i] for i in steps.members], steps)
    median = _median(rows)
    shown = {numbers[steps.members[i]]: rows[i] for i in _choose_slowest(rows, median, RANKS)}
    return HostWindow(
        host=host,
        ranks=list(_find_runs(_list_ranks(windows, steps.members))),
        first_step=steps.first,
        median=pack_rows(median),
        least_blocked=pack_rows(rows[:, :, BLOCKED].min(axis=0)) if len(rows) else b"",
        rows={rank: pack_rows(row) for rank, row in shown.items()},
        ended_ns=_find_end(windows, all_rows, steps, clock),
        calls=calls[newest].tobytes(),
        groups=groups,
        operations=operations,
        facts=_join_facts(windows, shown or numbers[:RANKS]),
        links=_join_links(windows, host),
        addresses=list(addresses)[:LINKS],
        ahead_ns=round(clock.ahead_ns),
        bound_ns=round(clock.bound_ns),
        load=join_loads([window.load for window in windows if window.load is not None]),
        values=_join_values([window.values for window in windows]),
        findings={window.rank: window.findings for window in windows if window.findings},
        long_steps=join_long_steps(chain(*(window.long_steps for window in windows))),
        lines=_join_lines(windows, shown or numbers[:RANKS]),
        last=all(window.last for window in windows),
    )


def join_hosts(hosts: Sequence[HostWindow]) -> Round | None:
    """Join the windows of all hosts; None if there are none."""
    if not hosts:
        return None
    hosts = sorted(hosts, key=lambda host: host.ranks)
    counts = [len(unpack_rows(host.median)) for host in hosts]
    steps = _find_common([host.first_step for host in hosts], counts)
    members, names = [hosts[i] for i in steps.members], _name_hosts(hosts)
    medians, rows, least_blocked = _join_rows(members, steps)
    return Round(
        first_step=steps.first,
        ended_ns=int(np.median([host.ended_ns for host in members or hosts])),
        rows=rows,
        hosts={name: _expand_runs(host.ranks) for name, host in zip(names, hosts, strict=True)},
        medians=dict(zip([names[i] for i in steps.members], medians, strict=True)),
        least_blocked=least_blocked,
        calls=match_hosts(hosts),
        facts={rank: each for host in hosts for rank, each in host.facts.items() if rank >= 0},
        host_facts={name: host.facts[-1] for name, host in zip(names, hosts, strict=True)},
        links=_name_links(hosts, names),
        load=join_loads([host.load for host in hosts if host.load is not None]),
        values=_join_values([host.values for host in hosts]),
        long_steps=join_long_steps(chain(*(host.long_steps for host in hosts))),
        lines={rank: lines for host in hosts for rank, lines in host.lines.items() if rank >= 0}
        | {-1: _find_means([host.lines.get(-1, {}) for host in hosts])},
    )


# --- steps and rows -------------------------------------------------------------------------------


def _find_common(firsts: Sequence[int], counts: Sequence[int]) -> Steps:
    """The steps that the windows have in common, without windows that have few of the usual ones.

    A rank that is stopped sends no new steps, and must not hide those of the others.
    """
    first, count = np.array(firsts), np.array(counts)
    some = np.flatnonzero(count)
    if not len(some):
        return Steps(0, 0, some)
    end = first + count
    usual = np.median(first[some]), np.median(end[some])
    shared = np.minimum(end, usual[1]) - np.maximum(first, usual[0])
    members = np.flatnonzero((count > 0) & (2 * shared >= usual[1] - usual[0]))
    if not len(members) or first[members].max() >= end[members].min():
        return Steps(0, 0, members[:0])
    return Steps(int(first[members].max()), int(end[members].min()), members)


def _cut(windows: Sequence[Rows], firsts: Sequence[int], steps: Steps) -> Rows:
    """The rows of these steps: float32 [windows, steps, COLUMNS]."""
    count = steps.end - steps.first
    rows = np.empty((len(windows), count, COLUMNS), np.float32)
    for i, (window, first) in enumerate(zip(windows, firsts, strict=True)):
        rows[i] = window[steps.first - first :][:count]
    return rows


def _join_rows(
    hosts: Sequence[HostWindow], steps: Steps
) -> tuple[Rows, dict[int, Rows], npt.NDArray[np.float32]]:
    """The hosts' medians, the rows of the slowest ranks, and the least time that any is blocked."""
    firsts = [host.first_step for host in hosts]
    medians = _cut([unpack_rows(host.median) for host in hosts], firsts, steps)
    passed = [(rank, i, row) for i, host in enumerate(hosts) for rank, row in host.rows.items()]
    owners = [i for _, i, _ in passed]
    rows = _cut([unpack_rows(row) for _, _, row in passed], [firsts[i] for i in owners], steps)
    chosen = _choose_slowest(rows, _median(medians), ROUND_RANKS)
    least = np.full(steps.end - steps.first, np.inf, np.float32)
    for host in hosts:
        blocked = np.frombuffer(host.least_blocked, np.float32)[steps.first - host.first_step :]
        least = np.minimum(least, blocked[: len(least)])
    return medians, {passed[i][0]: rows[i] for i in sorted(chosen)}, least


def _median(rows: Rows) -> Rows:
    """The median of several windows: float32 [steps, COLUMNS]."""
    return np.asarray(np.median(rows, axis=0) if len(rows) else rows.sum(axis=0), np.float32)


def _choose_slowest(rows: Rows, typical: Rows, limit: int) -> list[int]:
    """The positions of the ranks that look slowest, in several ways, in turn."""
    if len(rows) <= limit or not rows.shape[1]:
        return list(range(min(len(rows), limit)))
    late = rows[:, :, :BLOCKED] - typical[:, :BLOCKED]
    often = 9 * rows.shape[1] // 10  # late in every tenth step, or more
    orders = (
        -late.mean(axis=1).max(axis=1),
        -np.partition(late, often, axis=1)[:, often].max(axis=1),
        rows[:, :, BLOCKED].mean(axis=1),
    )
    ranked = np.stack([np.argsort(order) for order in orders], axis=1).ravel()
    return list(dict.fromkeys(ranked.tolist()))[:limit]


def _find_end(
    windows: Sequence[RankWindow], all_rows: Sequence[Rows], steps: Steps, clock: Line
) -> int:
    """When the last common step ended, by rank 0's clock."""
    ends = []
    for i in steps.members if len(steps.members) else range(len(windows)):
        later = all_rows[i][max(0, steps.end - windows[i].first_step) :].sum(dtype=float)
        ends.append(windows[i].ended_ns - round(later * 1e9))
    return int(clock.correct(np.array([int(np.median(ends))]))[0])


# --- ranks, facts and links -----------------------------------------------------------------------


def _list_ranks(windows: Sequence[RankWindow], members: Indices) -> list[int]:
    """The ranks that are members or have ended; all if none are."""
    ended = [i for i, window in enumerate(windows) if window.last]
    listed = sorted({*members, *ended} if len(members) else range(len(windows)))
    return [windows[i].rank for i in listed]


def _find_runs(ranks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs of numbers without a gap among sorted ones, each as its first and last."""
    first = last = None
    for rank in ranks:
        if first is None or last is None:
            first = rank
        elif rank != last + 1:
            yield first, last
            first = rank
        last = rank
    if first is not None and last is not None:
        yield first, last


def _expand_runs(runs: Iterable[tuple[int, int]]) -> list[int]:
    return [rank for first, last in runs for rank in range(first, last + 1)]


def _name_hosts(hosts: Sequence[HostWindow]) -> list[str]:
    """The hosts' names; where several have one name, with their first rank."""
    counts = Counter(host.host for host in hosts)
    return [
        f"{host.host} (rank {host.ranks[0][0]})" if counts[host.host] > 1 else host.host
        for host in hosts
    ]


def _join_facts(windows: Sequence[RankWindow], shown: Iterable[int]) -> dict[int, dict[str, float]]:
    """The median of each fact over the host's ranks, under -1, and the facts of these ranks."""
    values: dict[str, list[float]] = {}
    for window in windows:
        for name, value in window.facts.items():
            values.setdefault(name, []).append(value)
    host = {name: float(np.median(each)) for name, each in values.items()}
    return {-1: host} | {w.rank: w.facts for w in windows if w.rank in shown and w.facts}


def _join_lines(windows: Sequence[RankWindow], shown: Iterable[int]) -> dict[int, dict[str, float]]:
    """The lines of these ranks and, under -1, the means over all ranks."""
    return {window.rank: window.lines for window in windows if window.rank in shown} | {
        -1: _find_means([window.lines for window in windows])
    }


def _find_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each value; a part without it counts as 0."""
    names = {name for part in parts for name in part}
    return {name: sum(part.get(name, 0.0) for part in parts) / len(parts) for name in names}


def _join_links(windows: Sequence[RankWindow], host: str) -> list[Link]:
    """The connections of all ranks to each peer as one link; those that carried most."""
    grouped: dict[tuple[str, str], list[Link]] = {}
    for window in windows:
        for link in window.links:
            grouped.setdefault((link.peer, link.interface), []).append(link)
    links = [structs.replace(add_links(each), host=host) for each in grouped.values()]
    return sorted(links, key=lambda link: -link.nbytes)[:LINKS]


def _name_links(hosts: Sequence[HostWindow], names: Sequence[str]) -> list[Link]:
    """All links; a peer is a host by name if exactly one host has its address."""
    owners: dict[str, list[str]] = {}
    for host, name in zip(hosts, names, strict=True):
        for address in host.addresses:
            owners.setdefault(address, []).append(name)
    return [
        structs.replace(
            link,
            host=name,
            peer=owners[link.peer][0] if len(owners.get(link.peer, ())) == 1 else link.peer,
        )
        for host, name in zip(hosts, names, strict=True)
        for link in host.links
    ]


def _join_values(parts: Sequence[Values]) -> Values:
    """Return the median of each value, and of its step, over those that have it."""
    names = list(dict.fromkeys(name for part in parts for name in part))[: MOST_VALUES + 1]
    grouped = {name: [part[name] for part in parts if name in part] for name in names}
    return {
        name: (
            int(statistics.median(step for step, _ in known)),
            statistics.median(value for _, value in known),
        )
        for name, known in grouped.items()
    }
