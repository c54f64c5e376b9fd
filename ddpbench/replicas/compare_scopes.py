"""Compare each tensor among the ranks of its scope, which must hold equal bits of it.

Without a mesh, the scope is all ranks. On a mesh, healthy replicas cost one more all_reduce of
fixed size, whatever the mesh and the model are: each rank multiplies its digests by its weights
within their scopes, and the sums must be 0 (scopes.py). Where one is not, the ranks exchange
digests per tensor and then compare the tensors in full.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ddpbench.replicas import locate
from ddpbench.replicas.channel import Channel, Int64
from ddpbench.replicas.compare import (
    Comparison,
    Contents,
    Extremes,
    Key,
    Options,
    count_nbytes,
    gather_common,
)
from ddpbench.replicas.digest import as_tensor, of_bytes
from ddpbench.replicas.report import Detail, Difference, NonFinite
from ddpbench.replicas.scopes import (
    PRIME,
    Base,
    Grid,
    find_offsets,
    find_scope,
    find_stage,
    name_stages,
)
from ddpbench.replicas.state import Entry, State

Item = tuple[str, int | None]  # name, and place among this rank's entries if it holds a part
_NUMBERS = 7  # per kind: structure and contents (two each), compared, held once, bytes


def keep_shared(state: State, base: Base) -> State:
    """Return the state without the tensors that this rank alone holds."""
    return replace(
        state,
        entries={
            kind: [e for e in entries if len(find_scope(base, e.layout).ranks) > 1]
            for kind, entries in state.entries.items()
        },
    )


def gather_wrong(
    channel: Channel,
    contents: Sequence[Contents],
    extremes: Extremes,
    options: Options,
    comparison: Comparison,
) -> None:
    """Add to `comparison` what was compared, and what differs between ranks that must be equal.

    Without a mesh, all ranks must hold the same. Where they do, nothing more is sent.
    """
    if not extremes.meshed and extremes.same[:, :3].all() and not any(extremes.nonfinite):
        for each in contents:
            comparison.compared[each.kind] = len(each.entries)
            comparison.nbytes += sum(map(count_nbytes, each.entries))
        return
    base = comparison.base
    if not extremes.same[:, :2].all():
        base = _gather_base(channel, base, contents, options)
        comparison.base = base
    numbers = [n for each in contents for n in _sum_up(base, each, range(len(each.entries)))]
    sums = channel.gather_sums(np.array(numbers, np.int64)).reshape(-1, _NUMBERS)
    for i, each in enumerate(contents):
        alike, equal = _totals(sums[i, :4]) == 0
        items: list[Item] = [(entry.name, place) for place, entry in enumerate(each.entries)]
        if not alike or (base.stages and not (equal and not extremes.nonfinite[i])):
            items = gather_common(channel, each, comparison, name_stages(channel.ranks, base))
        if not alike:
            held = [place for _, place in items if place is not None]
            sums[i] = channel.gather_sums(np.array(_sum_up(base, each, held), np.int64))
        compared, once, nbytes = sums[i, 4:].tolist()
        comparison.compared[each.kind] = compared
        comparison.held_once[each.kind] = once + comparison.held_once.get(each.kind, 0)
        comparison.nbytes += nbytes // len(channel.ranks)
        if not (alike and equal):
            comparison.differences += _gather_differences(channel, base, each, items, options)
        if extremes.nonfinite[i]:
            comparison.nonfinite += _gather_nonfinite(channel, base, each, items)


# --- the healthy path


def _sum_up(base: Base, contents: Contents, places: Sequence[int]) -> list[int]:
    stage = find_stage(base)
    layouts: dict[int, list[int]] = {}  # entries with the same layout share one object
    for place in places:
        layouts.setdefault(id(contents.entries[place].layout), []).append(place)
    whole, counted, nbytes = 0, {False: 0, True: 0}, 0
    for members in layouts.values():
        scope = find_scope(base, contents.entries[members[0]].layout)
        whole += scope.weight * of_bytes(contents.digests[members].tobytes())
        once = len(scope.ranks) == 1 < len(base.ranks)
        counted[once] += len(members)
        nbytes += 0 if once else sum(count_nbytes(contents.entries[place]) for place in members)
    form = of_bytes(repr((len(contents.entries), contents.structure)).encode())
    speaks = base.rank == stage.ranks[0]  # one rank counts the tensors of a stage
    return [
        *_halves(stage.weight * form),
        *_halves(whole),
        counted[False] * speaks,
        counted[True] * speaks,
        nbytes,
    ]


def _halves(value: int) -> tuple[int, int]:
    """Return a number modulo PRIME as two of 32 bits: sums over 2^31 ranks do not overflow."""
    value %= PRIME
    return value >> 32, value & 0xFFFFFFFF


def _totals(sums: Int64) -> Int64:
    """Return the numbers modulo PRIME of sums of halves: int64[n, 2] or int64[2 n] to int64[n]."""
    pairs = sums.reshape(-1, 2).tolist()
    return np.array([((high << 32) + low) % PRIME for high, low in pairs], np.int64)


# --- pipeline stages


def _gather_base(
    channel: Channel, base: Base, contents: Sequence[Contents], options: Options
) -> Base:
    grid = base.grid
    own = [of_bytes(repr((grid.shape, grid.names, grid.ranks)).encode()) >> 1]
    rows = channel.gather_rows(np.array([*own, contents[0].structure], np.int64))
    if len(set(rows[:, 0].tolist())) > 1:
        known = channel.gather_objects([grid.shape, grid.names, grid.ranks])
        grid = max((Grid(*map(tuple, each)) for each in known), key=lambda each: len(each.shape))
        base = replace(base, grid=grid)
    if contents[0].kind != "parameter" or len(grid.shape) < 2:
        return base
    key = rows.tobytes()
    if key not in options.stages:
        names = channel.gather_objects([entry.name for entry in contents[0].entries])
        options.stages[key] = _find_stages(channel, grid, names)
    return replace(base, stages=options.stages[key])


def _find_stages(channel: Channel, grid: Grid, names: list[list[str]]) -> tuple[int, ...]:
    stages = []
    for d in range(len(grid.shape)):
        parts: dict[int, set[str]] = {}
        for rank, own in zip(channel.ranks, names, strict=True):
            parts.setdefault(grid.coordinates[rank][d], set()).update(own)
        if len(parts) > 1 and all(parts.values()):
            distinct = set().union(*parts.values())
            if len(distinct) == sum(map(len, parts.values())):
                stages.append(d)
    return tuple(stages)


# --- the failing path


@dataclass(frozen=True)
class _Label:
    """A rank's part of a tensor, as all ranks must know it."""

    ranks: tuple[int, ...]  # the scope
    shard: str
    shards: int  # number of shards of the tensor
    form: locate.Form
    whole: tuple[int, ...]  # shape


def _label(base: Base, entry: Entry) -> list[object]:
    scope, layout = find_scope(base, entry.layout), entry.layout
    tensor = as_tensor(entry.value) if entry.value is not None else torch.empty(0)
    offsets: Sequence[int] | None = [0] * tensor.dim()
    shard, shards = "", 1
    if layout is not None:
        part = find_offsets(layout, base.rank, entry.shape)
        offsets = part[1] if part and part[0] == tuple(tensor.shape) else None
        shard, shards = layout.name_shard(base.rank), layout.count_shards()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [scope.ranks, shard, shards, dtype, tuple(tensor.shape), offsets, tuple(entry.shape)]


def _gather_labels(
    channel: Channel, base: Base, contents: Contents, items: Sequence[Item]
) -> list[dict[tuple[int, ...], list[tuple[int, _Label]]]]:
    own = [None if p is None else _label(base, contents.entries[p]) for _, p in items]
    scopes: list[dict[tuple[int, ...], list[tuple[int, _Label]]]] = [{} for _ in items]
    for place, row in enumerate(channel.gather_objects(own)):
        for found, each in zip(scopes, row, strict=True):
            if each is not None:
                ranks, shard, shards, dtype, shape, offsets, whole = each
                form = locate.Form(
                    getattr(torch, dtype),
                    tuple(shape),
                    None if offsets is None else tuple(offsets),
                )
                label = _Label(tuple(ranks), shard, shards, form, tuple(whole))
                found.setdefault(label.ranks, []).append((place, label))
    return scopes


def _gather_differences(
    channel: Channel, base: Base, contents: Contents, items: list[Item], options: Options
) -> list[Difference]:
    entries, kind = contents.entries, contents.kind
    terms = [
        (0, 0)
        if place is None
        else _halves(find_scope(base, entries[place].layout).weight * int(contents.digests[place]))
        for _, place in items
    ]
    sums = channel.gather_sums(np.array(terms, np.int64).reshape(-1))
    bad = [items[i] for i in np.flatnonzero(_totals(sums)).tolist()]
    if not bad:
        return []
    own = [0 if place is None else contents.digests[place] for _, place in bad]
    rows = channel.gather_rows(np.array(own, np.uint64).view(np.int64))
    scopes = _gather_labels(channel, base, contents, bad)
    differences: list[Difference] = []
    for column, (name, place) in enumerate(bad):
        tensor = None if place is None else as_tensor(entries[place].value)
        for parts in _merge(scopes[column], rows[:, column]):
            fresh = len([d for d in differences if d.details]) < options.locate
            known = options.known if fresh else None
            differences.append(
                _gather_difference(channel, (kind, name), tensor, parts, known=known)
            )
    return differences


@dataclass(frozen=True)
class _Differing:
    """A shard of a tensor that is not equal in its scope."""

    sides: list[list[int]]  # places of equal ranks, the largest set first
    label: _Label


def _merge(
    scopes: dict[tuple[int, ...], list[tuple[int, _Label]]], digests: Int64
) -> list[list[_Differing]]:
    """Return the differing shards of a tensor; those that differ alike are together.

    They differ alike if the same members of their scopes are equal, as when one replica is wrong.
    """
    merged: dict[object, list[_Differing]] = {}
    for members in scopes.values():
        places = [place for place, _ in members]
        sides = locate.by_value(digests[places])
        if len(sides) > 1:
            pattern = tuple(map(tuple, sides))
            named = [[places[member] for member in side] for side in sides]
            merged.setdefault(pattern, []).append(_Differing(named, members[0][1]))
    return list(merged.values())


def _gather_difference(
    channel: Channel,
    key: tuple[str, str],
    tensor: Tensor | None,
    parts: list[_Differing],
    *,
    known: Collection[Key] | None,
) -> Difference:
    """Return the difference of shards that differ alike; compare the first unless it is known."""
    first, form = parts[0], parts[0].label.form
    merged = [[place for part in parts for place in part.sides[i]] for i in range(len(first.sides))]
    sides = tuple(tuple(sorted(channel.ranks[place] for place in side)) for side in merged)
    details: tuple[Detail, ...] = ()
    if known is not None and (*key, sides) not in known:
        holds = any(channel.rank in side for side in first.sides)
        if tensor is None or not holds:  # this rank takes part in the broadcasts only
            tensor = torch.zeros((), dtype=form.dtype).expand(form.shape)
        details = locate.gather_details(channel, tensor, form, first.sides)
    return Difference(
        *key,
        dtype=str(form.dtype).removeprefix("torch."),
        shape=first.label.whole,
        values=sides,
        details=details,
        shard=_name_shards([part.label for part in parts]),
    )


def _name_shards(labels: Sequence[_Label]) -> str:
    """Return "shard 2 of 4", "shards 1, 3 of 4" or "all 4 shards"; "" for a whole tensor."""
    total, names = labels[0].shards, {label.shard for label in labels}
    if len(names) == 1:
        return labels[0].shard
    if len(names) == total:
        return f"all {total} shards"
    numbers = sorted(int(name.split()[1]) for name in names if name)
    return f"shards {', '.join(map(str, numbers))} of {total}"


def _gather_nonfinite(
    channel: Channel, base: Base, contents: Contents, items: list[Item]
) -> list[NonFinite]:
    counts = [0 if place is None else int(contents.counts[place]) for _, place in items]
    some = np.flatnonzero(channel.gather_extremes(np.array(counts, np.int64))[1] > 0).tolist()
    if not some:
        return []
    bad = [items[i] for i in some]
    rows = channel.gather_rows(np.array([counts[i] for i in some], np.int64))
    scopes = _gather_labels(channel, base, contents, bad)
    nonfinite = []
    for column, (name, _) in enumerate(bad):
        pairs = zip(channel.ranks, rows[:, column].tolist(), strict=True)
        found = tuple((rank, count) for rank, count in pairs if count)
        affected = {rank for rank, _ in found}
        labels = [members[0][1] for ranks, members in scopes[column].items() if affected & {*ranks}]
        nonfinite.append(NonFinite(contents.kind, name, found, _name_shards(labels)))
    return nonfinite
