"""Match the calls of ranks, and of hosts: who came last, and how long others waited. Pure.

Calls are matched by their group and their number in it. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpbench.watch.gather.offsets import UNKNOWN_NS
from ddpbench.watch.window import CALLS, HostWindow, JoinedCall, RankWindow

ROOTED = ("broadcast", "scatter", "reduce", "gather")
Table = npt.NDArray[Any]  # of a structured dtype
Columns = dict[str, npt.NDArray[np.int64]]  # such a table by columns
Indices = npt.NDArray[np.intp]

# A rank's arrivals. room_ns: the longest that it can have been blocked.
_COLUMNS = "group number operation nbytes step phase entered_ns room_ns wire_ns rank"
ARRIVAL = np.dtype([(name, "i8") for name in _COLUMNS.split()])
# As JoinedCall. room_ns: how long after last_ns each of the host's ranks can have been blocked.
CALL = np.dtype(
    [
        ("group", "u2"),
        ("operation", "u2"),
        ("phase", "i1"),
        ("ranks", "u4"),
        ("last_rank", "u4"),
        ("step", "i8"),
        ("number", "i8"),
        ("nbytes", "i8"),
        ("first_ns", "i8"),
        ("second_ns", "i8"),
        ("last_ns", "i8"),
        ("room_ns", "i8"),
        ("wire_ns", "i8"),
    ]
)


def tabulate(windows: Sequence[RankWindow]) -> tuple[Table, list[str], list[str]]:
    """All arrivals as a table of ARRIVAL, the names of groups and those of operations."""
    groups: dict[str, int] = {}
    operations: dict[str, int] = {}
    rows = [
        (
            groups.setdefault(call.group, len(groups)),
            call.number,
            operations.setdefault(call.operation, len(operations)),
            call.nbytes,
            call.step,
            call.phase,
            call.entered_ns,
            call.room_ns,
            call.wire_ns,
            i,
        )
        for i, window in enumerate(windows)
        for call in window.calls
    ]
    return np.array(rows, dtype=ARRIVAL), list(groups), list(operations)


def _find_starts(groups: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> Indices:
    """Where another call begins among arrivals that are sorted by group and number."""
    changed = np.ones(len(groups), dtype=bool)
    changed[1:] = (np.diff(groups) != 0) | (np.diff(numbers) != 0)
    return np.flatnonzero(changed)


def match_ranks(
    arrivals: Table, numbers: npt.NDArray[np.int64]
) -> tuple[Table, npt.NDArray[np.int64]]:
    """The calls of a host, and how long each arrival waited for the last one, in ns.

    numbers: of the ranks, by their positions.
    """
    order = np.lexsort((arrivals["entered_ns"], arrivals["number"], arrivals["group"]))
    table = arrivals[order]
    starts = _find_starts(table["group"], table["number"])
    sizes = np.diff([*starts, len(table)])
    lasts = starts + sizes - 1
    missed = np.repeat(table["entered_ns"][lasts], sizes) - table["entered_ns"]
    room = np.maximum(table["room_ns"] - missed, 0)
    waits = np.empty(len(table), np.int64)
    waits[order] = np.minimum(missed, np.maximum(table["room_ns"], 0))
    calls = np.zeros(len(starts), CALL)
    if len(starts):
        for name in ("group", "operation", "number", "nbytes"):
            calls[name] = table[name][lasts]
        for name in ("step", "phase"):
            calls[name] = np.maximum.reduceat(table[name], starts)
        calls["first_ns"] = table["entered_ns"][starts]
        calls["second_ns"] = table["entered_ns"][np.maximum(lasts - 1, starts)]
        calls["last_ns"] = table["entered_ns"][lasts]
        calls["last_rank"], calls["ranks"] = numbers[table["rank"][lasts]], sizes
        calls["room_ns"] = np.minimum.reduceat(room, starts)
        calls["wire_ns"] = _reduce_wire(table["wire_ns"], starts)
    return calls, waits


def _reduce_wire(wire_ns: npt.NDArray[np.int64], starts: Indices) -> npt.NDArray[np.int64]:
    """The shortest known transfer of each call: only the last rank to arrive waits for nobody."""
    unknown = np.iinfo(np.int64).max
    least = np.minimum.reduceat(np.where(wire_ns < 0, unknown, wire_ns), starts)
    return np.where(least == unknown, -1, least)


def find_unmatched(hosts: Sequence[HostWindow]) -> list[bool]:
    """Whether each host's ranks may have waited for other hosts, and nobody knows how long.

    That is so if its clock is unknown and a call with another host blocks outside backward.
    """
    shared = Counter(group for host in hosts for group in host.groups)
    unmatched = []
    for host in hosts:
        table = np.frombuffer(host.calls if host.bound_ns >= UNKNOWN_NS else b"", CALL)
        blocking = np.unique(table["group"][table["phase"] >= 0])
        unmatched.append(any(shared[host.groups[group]] > 1 for group in blocking))
    return unmatched


def match_hosts(
    hosts: Sequence[HostWindow],
) -> tuple[list[JoinedCall], Indices, Columns, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The newest calls of all hosts; then of each host's calls the host, the call, how long this
    host's ranks then waited for other hosts, in ns, and whether the operation is rooted.

    Leaves out the hosts whose clocks are unknown, and of the calls those of such hosts' groups.
    """
    all_groups: dict[str, int] = {}
    all_operations: dict[str, int] = {}
    tables, groups, operations = [], [], []
    for host in hosts:
        table = np.frombuffer(host.calls if host.bound_ns < UNKNOWN_NS else b"", CALL)
        tables.append(table)
        groups.append(_renumber(all_groups, host.groups)[table["group"]])
        operations.append(_renumber(all_operations, host.operations)[table["operation"]])
    owners = np.repeat(np.arange(len(hosts)), [len(table) for table in tables])
    # One column at a time: a single copy of all would hold the interpreter for long.
    columns = {name: np.concatenate([table[name] for table in tables]) for name in CALL.names or ()}
    columns |= {"group": np.concatenate(groups), "operation": np.concatenate(operations)}
    last_ns = columns["last_ns"]
    order = np.lexsort((last_ns, columns["number"], columns["group"]))
    starts = _find_starts(columns["group"][order], columns["number"][order])
    if not len(starts):
        return [], owners, columns, np.zeros(0, np.int64), np.zeros(0, np.bool_)
    sizes = np.diff(starts, append=len(order))
    final = last_ns[order][starts + sizes - 1]
    waits = np.empty(len(order), np.int64)
    waits[order] = np.repeat(final, sizes) - last_ns[order]
    unknown = [g for host in hosts if host.bound_ns >= UNKNOWN_NS for g in host.groups]
    newest = np.argsort(final, kind="stable")
    known = ~np.isin(columns["group"][order[starts]], _renumber(all_groups, unknown))
    chosen = newest[known[newest]][-CALLS:]
    calls = _join_calls(columns, order, starts, chosen, (list(all_groups), list(all_operations)))
    waits = np.minimum(waits, columns["room_ns"])
    return calls, owners, columns, waits, find_rooted(columns["operation"], list(all_operations))


def _renumber(known: dict[str, int], names: Sequence[str]) -> npt.NDArray[np.int64]:
    """The number of each name among all that are known, to which it is added."""
    return np.array([known.setdefault(name, len(known)) for name in names], np.int64)


def _join_calls(
    columns: Columns,
    order: Indices,
    starts: Indices,
    chosen: Indices,
    names: tuple[Sequence[str], Sequence[str]],
) -> list[JoinedCall]:
    """The chosen calls as all hosts saw them.

    order: of all hosts' calls, by call and last arrival; starts: where in it another call begins;
    names: of groups, and of operations.
    """
    lasts = np.append(starts[1:], len(order)) - 1
    last = {name: column[order[lasts]] for name, column in columns.items()}
    before = columns["last_ns"][order[np.maximum(lasts - 1, starts)]]  # of the last host but one
    second = np.where(last["ranks"] > 1, np.maximum(before, last["second_ns"]), before)
    joined = [
        *(last["group"], last["number"], last["operation"], last["nbytes"]),
        *(np.maximum.reduceat(columns[name][order], starts) for name in ("step", "phase")),
        np.minimum.reduceat(columns["first_ns"][order], starts),
        np.where(lasts > starts, second, last["second_ns"]),
        *(last["last_ns"], last["last_rank"]),
        np.add.reduceat(columns["ranks"][order], starts),
        _reduce_wire(columns["wire_ns"][order], starts),
    ]
    groups, operations = names
    return [
        JoinedCall(groups[group], number, operations[operation], *rest)
        for group, number, operation, *rest in zip(
            *(column[chosen].tolist() for column in joined), strict=True
        )
    ]


def find_rooted(numbers: npt.NDArray[Any], operations: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Whether each of these numbers of operations is that of a rooted one."""
    return np.isin(numbers, [i for i, name in enumerate(operations) if name in ROOTED])
