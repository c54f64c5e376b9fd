"""Join the windows of a host's ranks, and those of all hosts. Pure, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.ma  # np.median imports it when first called, which would be in a watched step
from msgspec import structs

from ddpbench.watch.window import (
    ALL,
    BLOCKED,
    CALLS,
    HOST_CALLS,
    LINKS,
    RANKS,
    ROUND_RANKS,
    JoinedCall,
    Link,
    Rows,
    Window,
    add_links,
    join_long_steps,
)

T = TypeVar("T")


def join_ranks(
    windows: Sequence[Window], host: str, addresses: Sequence[str] = (), ahead_ns: int = 0
) -> Window:
    """Join the windows of a host's ranks, at least one.

    addresses: of the host; ahead_ns: how far rank 0's clock is ahead of the host's. All times of
    the joined window are by rank 0's clock.
    """
    joined = _join([_rename(window, host) for window in windows], RANKS, HOST_CALLS)
    return structs.replace(
        joined,
        calls=[
            structs.replace(
                call,
                first_ns=call.first_ns + ahead_ns,
                second_ns=call.second_ns + ahead_ns,
                last_ns=call.last_ns + ahead_ns,
            )
            for call in joined.calls
        ],
        ended_ns=joined.ended_ns + ahead_ns,
        links=add_links(joined.links),
        addresses=list(addresses)[:LINKS],
    )


def join_hosts(hosts: Sequence[Window]) -> Window:
    """Join the windows of all hosts, at least one."""
    hosts = sorted(hosts, key=lambda host: host.ranks)
    joined = _join(hosts, ROUND_RANKS, CALLS)
    listed = {host: ranks for window in hosts for host, ranks in window.hosts.items()}
    return structs.replace(joined, hosts=listed, links=_name_peers(joined.links, hosts))


def _rename(window: Window, host: str) -> Window:
    """Return the window of one host, or of a rank of it, with this name of the host."""
    return structs.replace(
        window,
        hosts={host: window.ranks},
        medians=dict(zip([host], window.medians.values(), strict=False)),
        host_facts=dict(zip([host], window.host_facts.values(), strict=False)),
        links=[structs.replace(link, host=host) for link in window.links],
    )


def _join(windows: Sequence[Window], most_ranks: int, most_calls: int) -> Window:
    """Join windows. most_ranks: whose rows are kept: those that look slowest."""
    windows = sorted(windows, key=lambda window: window.ranks)
    chosen, first, end = _find_common(windows)
    members = [_cut(windows[i], first, end) for i in chosen]
    rows = _choose_slowest(members, most_ranks)
    listed = [w for i, w in enumerate(windows) if w.last or i in chosen or not chosen]
    with_facts = rows or dict.fromkeys(chain(*(window.facts for window in windows)))
    shown = {*[*with_facts][:most_ranks]}
    least = [window.least_blocked for window in members]
    lines = _summarize([window.lines.get(ALL, {}) for window in windows], sum)
    return Window(
        hosts={host: [*chain(*lists)] for host, lists in _group(listed, "hosts").items()},
        ended_ns=int(np.median([window.ended_ns for window in members or windows])),
        first_step=first,
        rows=rows,
        medians={
            host: np.median(np.stack(rows), axis=0).astype(np.float32)
            for host, rows in _group(members, "medians").items()
        },
        least_blocked=np.minimum.reduce(least) if least else np.empty(0, np.float32),
        calls=_join_calls(chain(*(window.calls for window in windows)))[-most_calls:],
        facts={rank: facts for w in windows for rank, facts in w.facts.items() if rank in shown},
        host_facts={
            host: _summarize(facts, statistics.median)
            for host, facts in _group(windows, "host_facts").items()
        },
        links=[*chain.from_iterable(window.links for window in windows)],
        findings=dict(chain.from_iterable(window.findings.items() for window in windows)),
        long_steps=join_long_steps(chain(*(window.long_steps for window in windows))),
        lines={rank: lines for w in windows for rank, lines in w.lines.items() if rank in shown}
        | {ALL: {line: seconds / len(windows) for line, seconds in lines.items()}},
        last=all(window.last for window in windows),
    )


def _find_common(windows: Sequence[Window]) -> tuple[list[int], int, int]:
    """Return the positions of windows with common steps, the first step, and the one behind.

    Windows that have few of the usual steps are left out: a rank that is stopped sends no new
    steps, and must not hide those of the others.
    """
    first = np.array([window.first_step for window in windows])
    count = np.array([len(window.least_blocked) for window in windows])
    some = np.flatnonzero(count)
    if not len(some):
        return [], 0, 0
    end = first + count
    usual = np.median(first[some]), np.median(end[some])
    shared = np.minimum(end, usual[1]) - np.maximum(first, usual[0])
    members = np.flatnonzero((count > 0) & (2 * shared >= usual[1] - usual[0]))
    if not len(members) or first[members].max() >= end[members].min():
        return [], 0, 0
    return members.tolist(), int(first[members].max()), int(end[members].min())


def _cut(window: Window, first: int, end: int) -> Window:
    steps = slice(first - window.first_step, end - window.first_step)
    return structs.replace(
        window,
        rows={rank: rows[steps] for rank, rows in window.rows.items()},
        medians={host: rows[steps] for host, rows in window.medians.items()},
        least_blocked=window.least_blocked[steps],
    )


def _choose_slowest(windows: Sequence[Window], most: int) -> dict[int, Rows]:
    """Return the rows of the ranks that look slowest, in several ways, in turn; by rank."""
    rows_of = {rank: rows for window in windows for rank, rows in window.rows.items()}
    if len(rows_of) <= most:
        return rows_of
    rows = np.stack([*rows_of.values()])
    medians = np.stack([rows for window in windows for rows in window.medians.values()])
    late = rows[:, :, :BLOCKED] - np.median(medians, axis=0)[:, :BLOCKED]
    often = 9 * rows.shape[1] // 10  # late in every tenth step, or more
    orders = (
        -late.mean(axis=1).max(axis=1),
        -np.partition(late, often, axis=1)[:, often].max(axis=1),
        rows[:, :, BLOCKED].mean(axis=1),
    )
    ranked = np.stack([np.argsort(order) for order in orders], axis=1).ravel()
    ranks = [*rows_of]
    slowest = {ranks[i] for i in [*dict.fromkeys(ranked.tolist())][:most]}
    return {rank: rows for rank, rows in rows_of.items() if rank in slowest}


def _join_calls(calls: Iterable[JoinedCall]) -> list[JoinedCall]:
    """Join what ranks or hosts report of the same calls: those of a group with the same number.

    Returns the newest call last.
    """
    joined: dict[tuple[str, int], JoinedCall] = {}
    for call in sorted(calls, key=_find_last_ns):
        before = joined.get((call.group, call.number))
        joined[call.group, call.number] = call if before is None else _join_call(before, call)
    return sorted(joined.values(), key=_find_last_ns)


def _find_last_ns(call: JoinedCall) -> int:
    return call.last_ns


def _join_call(before: JoinedCall, last: JoinedCall) -> JoinedCall:
    """Join two reports of a call, the last arrival of which is in the second one."""
    wires_ns = [call.wire_ns for call in (before, last) if call.wire_ns >= 0]
    return structs.replace(
        last,
        step=max(before.step, last.step),
        first_ns=min(before.first_ns, last.first_ns),
        # The last arrival but one is of the same host as the last, or the last of another host.
        second_ns=max(before.last_ns, last.second_ns if last.ranks > 1 else 0),
        ranks=before.ranks + last.ranks,
        wire_ns=min(wires_ns, default=-1),  # only the last rank to arrive waits for nobody
    )


def _group(windows: Sequence[Window], field: str) -> dict[str, list[Any]]:
    """Return the values of a field that is a dictionary by host: host → of each window."""
    grouped: dict[str, list[Any]] = {}
    for window in windows:
        for host, value in getattr(window, field).items():
            grouped.setdefault(host, []).append(value)
    return grouped


def _summarize(parts: Sequence[Mapping[str, T]], statistic: Callable[[list[T]], T]) -> dict[str, T]:
    """Return a statistic of each name over the parts that have it."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: statistic([part[name] for part in parts if name in part]) for name in names}


def _name_peers(links: Sequence[Link], hosts: Sequence[Window]) -> list[Link]:
    """Return all links; a peer is a host by name if exactly one host has its address."""
    owners: dict[str, list[str]] = {}
    for window in hosts:
        for address in window.addresses:
            owners.setdefault(address, []).extend(window.hosts)
    names = {address: hosts[0] for address, hosts in owners.items() if len(hosts) == 1}
    return [structs.replace(link, peer=names.get(link.peer, link.peer)) for link in links]
