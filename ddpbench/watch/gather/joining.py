"""Join the windows of a host's ranks, and those of all hosts. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.ma  # np.median imports it when first called, which would be in a watched step
from msgspec import structs

from ddpbench.watch.window import (
    CALLS,
    LINKS,
    JoinedCall,
    Window,
    add_links,
    join_long_steps,
)


def join_ranks(windows: Sequence[Window], addresses: Sequence[str], ahead_ns: int) -> Window:
    """Join the windows of a host's ranks, at least one.

    addresses: of the host; ahead_ns: how far rank 0's clock is ahead of the host's. All times of
    the joined window are by rank 0's clock.
    """
    joined = join(windows)
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
        links=add_links(joined.links)[:LINKS],
        addresses={host: list(addresses)[:LINKS] for host in joined.hosts},
    )


def join_hosts(hosts: Sequence[Window]) -> Window:
    """Join the windows of all hosts, at least one; a link's peer is a host by name if known."""
    joined = join(hosts)
    owners: dict[str, list[str]] = {}
    for host, addresses in joined.addresses.items():
        for address in addresses:
            owners.setdefault(address, []).append(host)
    names = {address: hosts[0] for address, hosts in owners.items() if len(hosts) == 1}
    links = [structs.replace(link, peer=names.get(link.peer, link.peer)) for link in joined.links]
    return structs.replace(joined, links=links)


def join(windows: Sequence[Window]) -> Window:
    """Join windows over the steps that they have in common."""
    windows = sorted(windows, key=lambda window: window.ranks)
    members, first, end = _find_common(windows)
    hosts: dict[str, list[int]] = {}
    for window in windows:
        for host, ranks in window.hosts.items():
            hosts.setdefault(host, []).extend(ranks)
    return Window(
        number=windows[0].number,
        hosts=hosts,
        ended_ns=int(np.median([window.ended_ns for window in members or windows])),
        first_step=first,
        rows={
            rank: rows[first - window.first_step : end - window.first_step]
            for window in members
            for rank, rows in window.rows.items()
        },
        calls=_join_calls(chain(*(window.calls for window in windows)))[-CALLS:],
        facts={rank: facts for window in windows for rank, facts in window.facts.items()},
        links=[*chain(*(window.links for window in windows))],
        addresses={host: known for window in windows for host, known in window.addresses.items()},
        findings={rank: own for window in windows for rank, own in window.findings.items()},
        long_steps=join_long_steps(chain(*(window.long_steps for window in windows))),
        lines={rank: lines for window in windows for rank, lines in window.lines.items()},
        last=all(window.last for window in windows),
    )


def _find_common(windows: Sequence[Window]) -> tuple[list[Window], int, int]:
    """Return the windows with common steps, the first of these, and the one behind the last.

    Windows that have few of the usual steps are left out: a rank that is stopped sends no new
    steps, and must not hide those of the others.
    """
    windows = [window for window in windows if window.steps]
    if not windows:
        return [], 0, 0
    first = np.array([window.first_step for window in windows])
    end = first + [window.steps for window in windows]
    usual_first, usual_end = np.median(first), np.median(end)
    shared = np.minimum(end, usual_end) - np.maximum(first, usual_first)
    is_member = 2 * shared >= usual_end - usual_first
    members = [window for window, chosen in zip(windows, is_member, strict=True) if chosen]
    if not members or first[is_member].max() >= end[is_member].min():
        return [], 0, 0
    return members, int(first[is_member].max()), int(end[is_member].min())


def _join_calls(calls: Iterable[JoinedCall]) -> list[JoinedCall]:
    """Join what ranks or hosts report of the same calls: those of a group with the same number.

    Returns the newest call last.
    """
    reports: dict[tuple[str, int], list[JoinedCall]] = {}
    for call in calls:
        reports.setdefault((call.group, call.number), []).append(call)
    return sorted(map(_join_reports, reports.values()), key=_find_last_ns)


def _join_reports(same: Sequence[JoinedCall]) -> JoinedCall:
    last = max(same, key=_find_last_ns)
    others_ns = [call.last_ns for call in same if call is not last]
    return structs.replace(
        last,
        step=max(call.step for call in same),
        first_ns=min(call.first_ns for call in same),
        second_ns=max([last.second_ns, *others_ns]),
        ranks=sum(call.ranks for call in same),
    )


def _find_last_ns(call: JoinedCall) -> int:
    return call.last_ns
