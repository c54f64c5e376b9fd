"""Join the windows of all ranks. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

import numpy as np
import numpy.ma  # np.median imports it when first called, which would be in a watched step
from msgspec import structs

from ddpbench.watch.window import JoinedCall, Window, add_links, join_long_steps


def shift(window: Window, ahead_ns: int) -> Window:
    """Return a window whose times are by rank 0's clock, which is so far ahead of this one."""
    calls = [
        structs.replace(call, first_ns=call.first_ns + ahead_ns, last_ns=call.last_ns + ahead_ns)
        for call in window.calls
    ]
    return structs.replace(window, calls=calls, ended_ns=window.ended_ns + ahead_ns)


def join(windows: Sequence[Window]) -> Window:
    """Join the windows of ranks, at least one, over the steps that they have in common."""
    windows = sorted(windows, key=lambda window: window.ranks)
    members, first, end = _find_common(windows)
    hosts: dict[str, list[int]] = {}
    owners: dict[str, set[str]] = {}
    for window in windows:
        for host, ranks in window.hosts.items():
            hosts.setdefault(host, []).extend(ranks)
            for address in window.addresses:
                owners.setdefault(address, set()).add(host)
    # A link's peer is a host by name if exactly one host has its address.
    names = {address: min(hosts) for address, hosts in owners.items() if len(hosts) == 1}
    links = chain(*(window.links for window in windows))
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
        calls=_join_calls(chain(*(window.calls for window in windows))),
        facts={rank: facts for window in windows for rank, facts in window.facts.items()},
        links=add_links(structs.replace(k, peer=names.get(k.peer, k.peer)) for k in links),
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
    """Join what ranks report of the same calls: those of a group with the same number.

    Returns the newest call last.
    """
    reports: dict[tuple[str, int], list[JoinedCall]] = {}
    for call in sorted(calls, key=attrgetter("last_ns")):
        reports.setdefault((call.group, call.number), []).append(call)
    joined = [
        structs.replace(
            same[-1],
            step=max(call.step for call in same),
            first_ns=same[0].first_ns,
            second_ns=same[-2].last_ns if len(same) > 1 else 0,
            ranks=len(same),
        )
        for same in reports.values()
    ]
    return sorted(joined, key=attrgetter("last_ns"))
