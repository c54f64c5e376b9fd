"""Match the calls of ranks, and of hosts: when the first and the last rank came. Pure.

Calls are matched by their group and their number in it. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ddpbench.watch.gather.offsets import UNKNOWN_NS
from ddpbench.watch.window import CALL, JoinedCall, Table, Window

Integers = npt.NDArray[np.int64]


def join_calls(windows: Sequence[Window], most: int) -> tuple[Table, list[str], list[str]]:
    """Return the newest calls of all windows, the names of groups and those of operations.

    Groups with ranks of a host whose clock is unknown are left out.
    """
    groups: dict[str, int] = {}
    operations: dict[str, int] = {}
    tables = [window.calls for window in windows]
    # One column at a time: a single copy of all would hold the interpreter for long.
    columns = {name: np.concatenate([table[name] for table in tables]) for name in CALL.names or ()}
    for name, names in (("group", groups), ("operation", operations)):
        parts = [_renumber(names, getattr(w, f"{name}s"))[w.calls[name]] for w in windows]
        columns[name] = np.concatenate(parts)
    order = np.lexsort((columns["last_ns"], columns["number"], columns["group"]))
    joined = _join({name: column[order] for name, column in columns.items()})
    unknown = [name for w in windows if w.bound_ns >= UNKNOWN_NS for name in w.groups]
    joined = joined[~np.isin(joined["group"], _renumber(groups, unknown))]
    newest = np.argsort(joined["last_ns"], kind="stable")[-most:]
    return joined[newest], list(groups), list(operations)


def _renumber(known: dict[str, int], names: Sequence[str]) -> Integers:
    """Return the number of each name among all that are known, to which it is added."""
    return np.array([known.setdefault(name, len(known)) for name in names], np.int64)


def _join(columns: dict[str, Integers]) -> Table:
    """Join what several ranks or hosts report. columns: sorted by call, then by last arrival."""
    groups, numbers, last_ns = columns["group"], columns["number"], columns["last_ns"]
    changed = np.ones(len(groups), dtype=bool)
    changed[1:] = (np.diff(groups) != 0) | (np.diff(numbers) != 0)
    starts = np.flatnonzero(changed)
    lasts = np.append(starts[1:], len(groups)) - 1
    joined = np.zeros(len(starts), CALL)
    if not len(starts):
        return joined
    for name in ("group", "operation", "number", "nbytes", "last_ns", "last_rank"):
        joined[name] = columns[name][lasts]
    joined["ranks"] = np.add.reduceat(columns["ranks"], starts)
    joined["step"] = np.maximum.reduceat(columns["step"], starts)
    joined["first_ns"] = np.minimum.reduceat(columns["first_ns"], starts)
    # The last arrival but one is of the same host as the last, or the last of another host.
    second, ranks = columns["second_ns"][lasts], columns["ranks"][lasts]
    before = last_ns[np.maximum(lasts - 1, starts)]
    several = np.where(ranks > 1, np.maximum(before, second), before)
    joined["second_ns"] = np.where(lasts > starts, several, second)
    # The shortest known transfer: only the last rank to arrive waits for nobody.
    unknown = np.iinfo(np.int64).max
    wire_ns = np.where(columns["wire_ns"] < 0, unknown, columns["wire_ns"])
    least = np.minimum.reduceat(wire_ns, starts)
    joined["wire_ns"] = np.where(least == unknown, -1, least)
    return joined


def list_calls(window: Window) -> list[JoinedCall]:
    """Return the calls of a window, the newest last."""
    columns = {name: window.calls[name].tolist() for name in CALL.names or ()}
    columns["group"] = [window.groups[number] for number in columns["group"]]
    columns["operation"] = [window.operations[number] for number in columns["operation"]]
    fields = [columns[name] for name in JoinedCall.__struct_fields__]
    return [JoinedCall(*values) for values in zip(*fields, strict=True)]
