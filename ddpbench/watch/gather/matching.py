"""Match the calls of ranks, and of hosts: when the first and the last rank came. Pure.

Calls are matched by their group and their number in it. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpbench.watch.gather.offsets import UNKNOWN_NS
from ddpbench.watch.window import CALLS, HostWindow, JoinedCall, RankWindow

Table = npt.NDArray[Any]  # of a structured dtype
Columns = dict[str, npt.NDArray[np.int64]]  # such a table by columns
Indices = npt.NDArray[np.intp]

_COLUMNS = "group number operation nbytes step entered_ns wire_ns rank"
ARRIVAL = np.dtype([(name, "i8") for name in _COLUMNS.split()])
CALL = np.dtype(  # as JoinedCall
    [
        ("group", "u2"),
        ("operation", "u2"),
        ("ranks", "u4"),
        ("last_rank", "u4"),
        ("step", "i8"),
        ("number", "i8"),
        ("nbytes", "i8"),
        ("first_ns", "i8"),
        ("second_ns", "i8"),
        ("last_ns", "i8"),
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
            call.entered_ns,
            call.wire_ns,
            window.rank,
        )
        for window in windows
        for call in window.calls
    ]
    return np.array(rows, dtype=ARRIVAL), list(groups), list(operations)


def _find_starts(groups: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> Indices:
    """Where another call begins among arrivals that are sorted by group and number."""
    changed = np.ones(len(groups), dtype=bool)
    changed[1:] = (np.diff(groups) != 0) | (np.diff(numbers) != 0)
    return np.flatnonzero(changed)


def match_ranks(arrivals: Table) -> Table:
    """The calls of a host, in no order."""
    order = np.lexsort((arrivals["entered_ns"], arrivals["number"], arrivals["group"]))
    table = arrivals[order]
    starts = _find_starts(table["group"], table["number"])
    sizes = np.diff([*starts, len(table)])
    lasts = starts + sizes - 1
    calls = np.zeros(len(starts), CALL)
    if len(starts):
        for name in ("group", "operation", "number", "nbytes"):
            calls[name] = table[name][lasts]
        calls["step"] = np.maximum.reduceat(table["step"], starts)
        calls["first_ns"] = table["entered_ns"][starts]
        calls["second_ns"] = table["entered_ns"][np.maximum(lasts - 1, starts)]
        calls["last_ns"] = table["entered_ns"][lasts]
        calls["last_rank"], calls["ranks"] = table["rank"][lasts], sizes
        calls["wire_ns"] = _reduce_wire(table["wire_ns"], starts)
    return calls


def _reduce_wire(wire_ns: npt.NDArray[np.int64], starts: Indices) -> npt.NDArray[np.int64]:
    """The shortest known transfer of each call: only the last rank to arrive waits for nobody."""
    unknown = np.iinfo(np.int64).max
    least = np.minimum.reduceat(np.where(wire_ns < 0, unknown, wire_ns), starts)
    return np.where(least == unknown, -1, least)


def match_hosts(hosts: Sequence[HostWindow]) -> list[JoinedCall]:
    """The newest calls of all hosts, without those of groups of a host whose clock is unknown."""
    all_groups: dict[str, int] = {}
    all_operations: dict[str, int] = {}
    tables, groups, operations = [], [], []
    for host in hosts:
        table = np.frombuffer(host.calls if host.bound_ns < UNKNOWN_NS else b"", CALL)
        tables.append(table)
        groups.append(_renumber(all_groups, host.groups)[table["group"]])
        operations.append(_renumber(all_operations, host.operations)[table["operation"]])
    # One column at a time: a single copy of all would hold the interpreter for long.
    columns = {name: np.concatenate([table[name] for table in tables]) for name in CALL.names or ()}
    columns |= {"group": np.concatenate(groups), "operation": np.concatenate(operations)}
    last_ns = columns["last_ns"]
    order = np.lexsort((last_ns, columns["number"], columns["group"]))
    starts = _find_starts(columns["group"][order], columns["number"][order])
    if not len(starts):
        return []
    final = last_ns[order][np.append(starts[1:], len(order)) - 1]
    unknown = [g for host in hosts if host.bound_ns >= UNKNOWN_NS for g in host.groups]
    newest = np.argsort(final, kind="stable")
    known = ~np.isin(columns["group"][order[starts]], _renumber(all_groups, unknown))
    chosen = newest[known[newest]][-CALLS:]
    return _join_calls(columns, order, starts, chosen, (list(all_groups), list(all_operations)))


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
        np.maximum.reduceat(columns["step"][order], starts),
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
