"""Compare a replica over all ranks: first everything at once, then only what differs."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ddpbench.replicas import locate
from ddpbench.replicas.channel import Channel, Int64
from ddpbench.replicas.digest import Counts, Digests, of_bytes, read
from ddpbench.replicas.report import Difference, Mismatch, NonFinite
from ddpbench.replicas.state import Entry, State, row, structure


@dataclass(frozen=True)
class Options:
    """Settings of a verification, the same in all ranks."""

    gradients: bool | None
    finite: bool
    locate: int
    step: int | None
    equal_until: int | None = None  # the step of the last verification that found all equal
    known: Container[tuple[str, str]] = ()  # (kind, name) of differences located before
    traced: bool = False  # whether each rank watches where a NaN comes from


@dataclass
class Comparison:
    """The result of comparing some kinds."""

    differences: list[Difference] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    nonfinite: list[NonFinite] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0


def gather_comparison(
    channel: Channel,
    state: State,
    kinds: Sequence[str],
    options: Options,
    comparison: Comparison,
    *,
    extras: Sequence[int] = (),
) -> list[tuple[int, int]]:
    """Add differences to `comparison`; return the least and the greatest of each extra."""
    settings: list[object] = [options.gradients, options.finite, options.locate, options.step]
    settings += [options.equal_until, options.traced, list(kinds)]
    contents = [_read_contents(state, kind, options.finite) for kind in kinds]
    head = [of_bytes(repr(settings).encode()) >> 1, *(n for _, _, row in contents for n in row)]
    least, most = channel.gather_extremes(np.array([*head, *extras], np.int64))
    if least[0] != most[0]:
        raise ValueError(
            "the ranks verify with different arguments: gradients, finite, locate and step must be "
            f"the same in all; here gradients={options.gradients}, finite={options.finite}, "
            f"locate={options.locate}, step={options.step}"
        )
    same = (least == most)[1 : 1 + 4 * len(kinds)].reshape(-1, 4)
    some_nonfinite = most[1 : 1 + 4 * len(kinds)].reshape(-1, 4)[:, 3] > 0
    for i, kind in enumerate(kinds):
        entries, (digests, counts, _) = state.entries[kind], contents[i]
        if not same[i, :2].all():
            chosen = _gather_common(channel, kind, entries, comparison)
            entries = [entries[place] for place in chosen]
            digests, counts = digests[chosen], counts[chosen]
        comparison.compared[kind] = len(entries)
        comparison.nbytes += sum(
            e.value.nbytes if isinstance(e.value, torch.Tensor) else 8 for e in entries
        )
        if not same[i, :3].all():
            comparison.differences += _gather_differences(channel, kind, entries, digests, options)
        if some_nonfinite[i]:
            comparison.nonfinite += _gather_nonfinite(channel, kind, entries, counts)
    tail = 1 + 4 * len(kinds)
    return list(zip(least[tail:].tolist(), most[tail:].tolist(), strict=True))


def _read_contents(state: State, kind: str, finite: bool) -> tuple[Digests, Counts, list[int]]:
    """Return digests and non-finite counts of a kind's entries, and four numbers for all."""
    form = structure(kind, state.entries[kind])
    digests, counts = read([entry.value for entry in state.entries[kind]], finite)
    digests += form.salts  # modulo 2^64
    whole = int(np.uint64(of_bytes(digests.tobytes())).astype(np.int64))
    return digests, counts, [len(digests), form.digest, whole, int(counts.sum())]


def _gather_common(
    channel: Channel, kind: str, entries: list[Entry], comparison: Comparison
) -> list[int]:
    """Return the places of the entries that all ranks have alike, in the same order in all ranks.

    Add the other entries to `comparison` as mismatches.
    """
    everyone = channel.gather_objects([[entry.name, row(entry)] for entry in entries])
    tables = [dict(rows) for rows in everyone]
    places = {entry.name: place for place, entry in enumerate(entries)}
    common = []
    for name in dict.fromkeys(name for table in tables for name in table):
        forms: dict[str, list[int]] = {}
        for rank, table in zip(channel.ranks, tables, strict=True):
            forms.setdefault(table.get(name, "absent"), []).append(rank)
        if len(forms) == 1:
            common.append(places[name])
        else:
            rows = tuple((form, tuple(ranks)) for form, ranks in forms.items())
            comparison.mismatches.append(Mismatch(kind, name, rows))
    orders = {tuple(name for name in table) for table in tables}
    if len(orders) > 1 and len(common) == len(entries) and not comparison.mismatches:
        comparison.mismatches.append(_order(channel, kind, tables))
    return common


def _order(channel: Channel, kind: str, tables: list[dict[str, str]]) -> Mismatch:
    """Return the first place at which the order of the names differs."""
    names = [list(table) for table in tables]
    first = next(i for i, row in enumerate(zip(*names, strict=True)) if len(set(row)) > 1)
    forms: dict[str, list[int]] = {}
    for rank, order in zip(channel.ranks, names, strict=True):
        forms.setdefault(order[first], []).append(rank)
    return Mismatch(
        kind, f"number {first}", tuple((form, tuple(ranks)) for form, ranks in forms.items())
    )


def _gather_differences(
    channel: Channel, kind: str, entries: list[Entry], digests: Digests, options: Options
) -> list[Difference]:
    """Return the entries whose digests differ; compare the first `locate` in full."""
    least, most = channel.gather_extremes(digests.view(np.int64))
    bad = np.flatnonzero(least != most)
    if bad.size == 0:
        return []
    everyones: Int64 = channel.gather_rows(digests.view(np.int64)[bad])
    differences, located = [], 0
    for column, place in enumerate(bad.tolist()):
        entry = entries[place]
        fresh = located < options.locate and (kind, entry.name) not in options.known
        located += fresh
        values = locate.by_value(everyones[:, column])
        differences.append(locate.gather_difference(channel, kind, entry, values, fresh))
    return differences


def _gather_nonfinite(
    channel: Channel, kind: str, entries: list[Entry], counts: Counts
) -> list[NonFinite]:
    """Return the entries with elements that are not finite in some rank."""
    bad = np.flatnonzero(channel.gather_extremes(counts)[1] > 0)
    if bad.size == 0:
        return []
    everyones = channel.gather_rows(counts[bad])
    nonfinite = []
    for column, place in enumerate(bad.tolist()):
        pairs = zip(channel.ranks, everyones[:, column].tolist(), strict=True)
        some = tuple((rank, count) for rank, count in pairs if count)
        nonfinite.append(NonFinite(kind, entries[place].name, some))
    return nonfinite
