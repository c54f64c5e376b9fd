"""Compare each tensor among the ranks of its scope, which must hold equal bits of it.

Without a mesh, the scope is all ranks. Healthy replicas cost one all_reduce of fixed size, whatever
the mesh and the model are: each rank multiplies its digests by its weights within their scopes, and
the sums must be 0 (scopes.py). Where one is not, the ranks compare more: structures by name,
contents by one digest per tensor, then the elements of the differing tensors (locate.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from ddpbench.replicas.channel import Channel
from ddpbench.replicas.digest import of_bytes, read
from ddpbench.replicas.locate import Part, gather_details
from ddpbench.replicas.report import Difference, Key, Mismatch, NonFinite, Report, ranks_text
from ddpbench.replicas.scopes import LINE, Base, find_scope, name_shards, weigh
from ddpbench.replicas.state import (
    KINDS,
    Entry,
    NotCompared,
    State,
    digest_structure,
    find_offsets,
)

LOCATED = 16  # differing tensors of a kind that are compared element by element
# A shard that is not equal in its scope: places of equal ranks, the largest set first, and a part.
Shard = tuple[list[list[int]], Part]
Forms = dict[str, list[int]]  # form → ranks that have it


@dataclass(frozen=True)
class Options:
    """Settings of a verification, the same in all ranks."""

    gradients: bool = False  # compare them although all parameters are equal
    step: int | None = None
    equal_until: int | None = None  # the step of the last verification that found all equal
    # What was wrong at the last check, with the step of the report that explained it.
    history: Mapping[Key, int] = field(default_factory=dict)
    trace_nonfinite: bool = False  # whether each rank watches where a NaN comes from


class Sums(NamedTuple):
    """A kind in all ranks: whether structure and contents are equal, and sums over the ranks."""

    alike: bool
    equal: bool
    compared: int
    held_once: int
    nbytes: int
    nonfinite: int


class Comparison:
    """The comparison of one verification. What it finds is added to `report`."""

    def __init__(self, channel: Channel, base: Base, state: State, options: Options) -> None:
        self.channel, self.base, self.state, self._options = channel, base, state, options
        self.report = Report(tuple(channel.ranks), options.step, options.equal_until)
        if base.grid.names != LINE:
            self.report.coordinates = {rank: base.grid.locate(rank) for rank in channel.ranks}

    def gather(self, kinds: Sequence[str]) -> None:
        """Compare some kinds. Healthy replicas end after one all_reduce.

        Raises ValueError if the ranks have other options.
        """
        options = self._options
        settings = f"step={options.step}, gradients={options.gradients}, "
        settings += f"trace_nonfinite={options.trace_nonfinite}"
        for kind in kinds:
            self._read(self.state.entries[kind], kind)
        everyone = weigh(tuple(sorted(self.channel.ranks)), self.base.rank)
        skipped = [astuple(each) for each in self.state.not_compared]
        digests = [of_bytes(text.encode()) for text in (settings, json.dumps(skipped))]
        (same, same_skipped), sums = self._gather_sums(kinds, [everyone * d for d in digests])
        if not same:
            pairs = self._gather_forms({"settings": settings})["settings"].items()
            forms = "; ".join(f"{form} in {ranks_text(ranks)}" for form, ranks in pairs)
            raise ValueError(f"the ranks verify with different arguments: {forms}")
        for kind in kinds:
            self._gather_kind(kind, sums[kind])
        tables = [skipped] if same_skipped else self.channel.gather_objects(skipped)
        rows = dict.fromkeys(tuple(row) for table in tables for row in table)
        known = self.report.compared
        self.report.not_compared = tuple(NotCompared(*row) for row in rows if row[0] in known)

    def _read(self, entries: Sequence[Entry], kind: str, everything: bool = False) -> None:
        """Digest this rank's entries, and look for NaN in this rank's share or in everything."""
        searched: list[int] = []
        for scope, places in self._group_by_scope(entries).items():
            # Of ranks that must hold the same tensors, each looks at about as many bytes.
            ordered = sorted(places, key=lambda place: entries[place].nbytes)
            share = ordered[scope.index(self.base.rank) :: len(scope)]
            searched += ordered if everything else share
        digests, nonfinite = read([entry.tensor for entry in entries], searched)
        _, salts = digest_structure(kind, entries)
        rows = zip(entries, (digests + salts).tolist(), nonfinite.tolist(), strict=True)
        for entry, digest, count in rows:
            entry.digest, entry.nonfinite = digest, count

    def _group_by_scope(self, entries: Sequence[Entry]) -> dict[tuple[int, ...], list[int]]:
        """Return the places of the entries by the ranks that must hold the same bits."""
        groups: dict[tuple[int, ...], list[int]] = {}
        layouts: dict[int, list[int]] = {}  # entries with the same layout share one object
        for place, entry in enumerate(entries):
            if id(entry.layout) not in layouts:
                scope = find_scope(self.base, entry.layout)
                layouts[id(entry.layout)] = groups.setdefault(scope, [])
            layouts[id(entry.layout)].append(place)
        return groups

    def _sum_up(self, kind: str, entries: Sequence[Entry]) -> list[int]:
        """Return this rank's terms and counts of a kind, in the order of Sums."""
        everyone, rank = tuple(sorted(self.base.ranks)), self.base.rank
        contents, nbytes, counts = 0, 0, [0, 0]
        for scope, places in self._group_by_scope(entries).items():
            digests = np.array([entries[place].digest for place in places], np.uint64)
            contents += weigh(scope, rank) * of_bytes(digests.tobytes())
            once = len(scope) == 1 < len(everyone)
            if rank == everyone[0]:  # one rank counts for all
                counts[once] += len(places)
            nbytes += 0 if once else sum(entries[place].nbytes for place in places)
        structure, _ = digest_structure(kind, entries)
        nonfinite = sum(entry.nonfinite for entry in entries)
        return [weigh(everyone, rank) * structure, contents, *counts, nbytes, nonfinite]

    def _gather_sums(
        self, kinds: Sequence[str], terms: Sequence[int]
    ) -> tuple[list[bool], dict[str, Sums]]:
        # Kinds that this rank does not compare count too: all ranks must send as many numbers.
        entries = self.state.entries
        rows = [self._sum_up(kind, entries[kind]) if kind in kinds else [0] * 6 for kind in KINDS]
        zeros, sums = self.channel.gather_sums(
            [*terms, *(term for row in rows for term in row[:2])],
            [count for row in rows for count in row[2:]],
        )
        n, found = len(terms), {}
        for i, kind in enumerate(KINDS):
            found[kind] = Sums(*zeros[n + 2 * i :][:2], *sums[4 * i :][:4])
        return zeros[:n], found

    def _gather_kind(self, kind: str, sums: Sums) -> None:
        """Add to the report what was compared of a kind, and what is wrong."""
        entries, report = self.state.entries[kind], self.report
        names = [entry.name for entry in entries]
        wrong = not (sums.alike and sums.equal) or sums.nonfinite > 0
        if wrong:
            self._read(entries, kind, everything=True)
        if not sums.alike:
            names = self._gather_common(kind, entries)
            common = {*names}
            entries = [entry for entry in entries if entry.name in common]
            _, totals = self.channel.gather_sums([], self._sum_up(kind, entries)[2:])
            sums = Sums(False, False, *totals)
        report.compared[kind] = sums.compared
        held_once = sums.held_once + self.state.held_once.get(kind, 0)
        report.held_once |= {kind: held_once} if held_once else {}
        report.nbytes += sums.nbytes // len(report.ranks)
        if wrong:
            self._gather_wrong(kind, entries, names)

    # --- tensors that some ranks lack

    def _gather_forms(self, own: Mapping[str, str]) -> dict[str, Forms]:
        """Return the ranks that have each form of a name, for the names and forms of this rank.

        The form of a missing name is "absent".
        """
        tables: list[dict[str, str]] = self.channel.gather_objects(own)
        names: dict[str, Forms] = {}
        for name in dict.fromkeys(name for table in tables for name in table):
            forms = names.setdefault(name, {})
            for rank, table in zip(self.channel.ranks, tables, strict=True):
                forms.setdefault(table.get(name, "absent"), []).append(rank)
        return names

    def _gather_common(self, kind: str, entries: Sequence[Entry]) -> list[str]:
        """Return the names of entries that all ranks have alike, in the same order.

        Add the other entries as mismatches.
        """
        names = self._gather_forms({entry.name: entry.describe() for entry in entries})
        for name, forms in names.items():
            if len(forms) > 1:
                sides = tuple(map(tuple, forms.values()))
                mismatch = Mismatch(kind=kind, name=name, sides=sides, forms=tuple(forms))
                self.report.mismatches.append(mismatch)
        return [name for name, forms in names.items() if len(forms) == 1]

    # --- tensors that differ or are not finite

    def _gather_wrong(self, kind: str, entries: Sequence[Entry], names: Sequence[str]) -> None:
        """Add the tensors that differ, and those that are not finite."""
        held = {entry.name: entry for entry in entries}
        own = [self._describe_part(held[name]) for name in names]
        equal, counts = self.channel.gather_sums(
            [part.digest * weigh(tuple(part.ranks), self.base.rank) for part in own],
            [part.nonfinite for part in own],
        )
        bad = [i for i, same in enumerate(equal) if counts[i] or not same]
        rows = self.channel.gather_objects([own[i] for i in bad]) if bad else []
        located = 0
        for number, name in enumerate(names[i] for i in bad):
            parts = {at: Part(*row[number]) for at, row in enumerate(rows)}
            self._add_nonfinite(kind, name, parts)
            for shards in merge_shards(parts):
                difference = self._describe_difference(kind, name, shards)
                if located < LOCATED and difference.key not in self._options.history:
                    sides, part = shards[0]
                    takes_part = any(self.channel.rank in side for side in sides)
                    tensor = held[name].tensor if takes_part else None
                    details = gather_details(self.channel, tensor, part, sides)
                    difference = replace(difference, details=details)
                    located += 1
                self.report.differences.append(difference)

    def _describe_part(self, entry: Entry) -> Part:
        tensor = torch.empty(0) if entry.tensor is None else entry.tensor
        layout = entry.layout
        return Part(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offsets=find_offsets(entry) if layout else [0] * tensor.dim(),
            whole=tuple(entry.shape),
            shard=layout.number_shard(self.base.rank) if layout else 1,
            shards=layout.count_shards() if layout else 1,
            ranks=find_scope(self.base, layout),
            digest=entry.digest,
            nonfinite=entry.nonfinite,
        )

    def _add_nonfinite(self, kind: str, name: str, parts: Mapping[int, Part]) -> None:
        affected = {at: part for at, part in parts.items() if part.nonfinite}
        if affected:
            nonfinite = NonFinite(
                kind=kind,
                name=name,
                shard=_name_parts(affected.values()),
                counts=tuple((self.channel.ranks[at], p.nonfinite) for at, p in affected.items()),
            )
            self.report.nonfinite.append(nonfinite)

    def _describe_difference(self, kind: str, name: str, shards: Sequence[Shard]) -> Difference:
        """Return the difference, still without details, of shards that differ alike."""
        first, part = shards[0]
        sides = [
            sorted(self.channel.ranks[place] for shard, _ in shards for place in shard[number])
            for number in range(len(first))
        ]
        return Difference(
            kind=kind,
            name=name,
            sides=tuple(map(tuple, sides)),
            shard=_name_parts(part for _, part in shards),
            dtype=part.dtype,
            shape=tuple(part.whole),
        )


def merge_shards(parts: Mapping[int, Part]) -> list[list[Shard]]:
    """Return the differing shards of a tensor; those that differ alike are together.

    They differ alike if the same members of their scopes are equal, as when one replica is wrong.
    parts: by place of the rank.
    """
    scopes: dict[tuple[int, ...], dict[int, list[int]]] = {}  # places by scope and digest
    for place, part in parts.items():
        scopes.setdefault(tuple(part.ranks), {}).setdefault(part.digest, []).append(place)
    merged: dict[object, list[Shard]] = {}
    for digests in scopes.values():
        sides = sorted(digests.values(), key=lambda side: (-len(side), side[0]))
        if len(sides) > 1:
            members = sorted(place for side in sides for place in side)
            pattern = tuple(tuple(members.index(place) for place in side) for side in sides)
            merged.setdefault(pattern, []).append((sides, parts[members[0]]))
    return list(merged.values())


def _name_parts(parts: Iterable[Part]) -> str:
    shards = {part.shard: part.shards for part in parts if part.shard}
    return name_shards(shards, max(shards.values(), default=1))
