"""Compare each tensor among the ranks of its scope, which must hold equal bits of it.

Without a mesh, the scope is all ranks. Healthy replicas cost one all_reduce of fixed size, whatever
the mesh and the model are: each rank multiplies its digests by its weights within their scopes, and
the sums must be 0 (scopes.py). Where one is not, the ranks compare more: structures by name,
contents by one digest per tensor, then the elements of the differing tensors (locate.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpbench.records.wording import list_all
from ddpbench.replicas.channel import Channel
from ddpbench.replicas.digest import Counts, Digests, as_tensor, of_bytes, read
from ddpbench.replicas.locate import Part, by_value, gather_details
from ddpbench.replicas.report import Difference, Key, Mismatch, NonFinite, Report, ranks_text
from ddpbench.replicas.scopes import Base, Grid, find_offsets, find_scope, weigh_scope
from ddpbench.replicas.state import KINDS, Entry, State, digest_structure, row

# A shard that is not equal in its scope: places of equal ranks, the largest set first, and a part.
Shard = tuple[list[list[int]], Part]
Forms = dict[str, list[int]]  # form → ranks that have it


@dataclass(frozen=True)
class Options:
    """Settings of a verification, the same in all ranks."""

    gradients: bool | None
    finite: bool
    locate: int
    step: int | None
    equal_until: int | None = None  # the step of the last verification that found all equal
    # What was wrong at the last check: step and cause of the report that explained it.
    history: Mapping[Key, tuple[int, str]] = field(default_factory=dict)
    trace_nonfinite: bool = False  # whether each rank watches where a NaN comes from
    # Dimensions of a mesh along which ranks hold other layers, by what the ranks hold.
    stages: dict[bytes, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """This rank's entries of a kind, and what was read of each."""

    kind: str
    entries: list[Entry]
    structure: int  # digest of names, dtypes, shapes, devices and placements
    digests: Digests  # uint64[n], salted by the structure
    counts: Counts  # int64[n] of elements that are not finite, 0 where this rank has not looked

    def select(self, names: Collection[str]) -> Contents:
        """Return the contents of the entries with these names."""
        places = [place for place, entry in enumerate(self.entries) if entry.name in names]
        entries = [self.entries[place] for place in places]
        return replace(
            self, entries=entries, digests=self.digests[places], counts=self.counts[places]
        )


@dataclass(frozen=True)
class Sums:
    """A kind in all ranks: whether structure and contents are equal, and sums over the ranks."""

    alike: bool
    equal: bool
    compared: int = 0
    held_once: int = 0
    nbytes: int = 0
    nonfinite: int = 0


class Comparison:
    """The comparison of one verification, and its results, which are the same in every rank."""

    def __init__(
        self, channel: Channel, base: Base, state: State, options: Options, *, meshed: bool
    ) -> None:
        self.base, self.meshed = base, meshed  # whether a mesh names the ranks
        self.differences: list[Difference] = []
        self.mismatches: list[Mismatch] = []
        self.nonfinite: list[NonFinite] = []
        self.compared: dict[str, int] = {}
        self.held_once = Counter(state.held_once)
        self.nbytes = 0  # in one rank
        self.channel, self.state, self._options = channel, state, options

    def gather(
        self, kinds: Sequence[str], facts: Sequence[int] = (), counts: Sequence[int] = ()
    ) -> tuple[list[bool], list[int]]:
        """Compare some kinds, and return which facts all ranks have alike, and sums of counts.

        facts: digests. Healthy replicas end after one all_reduce, unless a mesh has pipeline
        stages.
        """
        channel, finite = self.channel, self._options.finite
        settings = {**vars(self._options), "history": sorted(self._options.history)}
        del settings["stages"]  # each rank finds them itself
        everyone = weigh_scope(tuple(sorted(channel.ranks)), self.base.rank).weight
        digests = [of_bytes(repr(settings).encode()), *facts]
        # Where the ranks hold the same bits, one of them looks for NaN; on a mesh they hold others.
        share = (0, 1) if self.meshed else (channel.rank, len(channel.ranks))
        contents = [self._read(kind, share if finite else None) for kind in kinds]
        same, (meshed, *totals), sums = self._gather_sums(
            contents, [everyone * digest for digest in digests], [int(self.meshed), *counts]
        )
        if not same[0]:
            forms = self.gather_forms({name: repr(value) for name, value in settings.items()})
            raise ValueError(_explain_settings(forms))
        self.meshed = meshed > 0
        if not all(sums[kind].alike for kind in kinds):
            self._gather_base(contents[0])
            sums = self._gather_sums(contents)[2]
        for each in contents:
            found = sums[each.kind]
            wrong = found.nonfinite > 0 or self.meshed or not (found.alike and found.equal)
            if finite and wrong and meshed < len(channel.ranks):  # some ranks read only a share
                self._gather_kind(self._read(each.kind, (0, 1)), replace(found, nonfinite=1))
            else:
                self._gather_kind(each, found)
        return same[1:], totals

    def make_report(self, frozen: Collection[str], **rest: Any) -> Report:
        """Return the results as a report, with these other fields of it.

        frozen: names of parameters with requires_grad=False.
        """
        ranks = tuple(self.channel.ranks)
        describe = self.base.grid.describe
        return Report(
            ranks=ranks,
            step=self._options.step,
            compared=self.compared,
            nbytes=self.nbytes,
            differences=tuple(self.differences),
            mismatches=tuple(self.mismatches),
            nonfinite=tuple(
                replace(each, frozen=each.kind == "parameter" and each.name in frozen)
                for each in self.nonfinite
            ),
            equal_until=self._options.equal_until,
            held_once={kind: n for kind, n in self.held_once.items() if n},
            coordinates=tuple((rank, describe(rank)) for rank in ranks) if self.meshed else (),
            **rest,
        )

    def _read(self, kind: str, share: tuple[int, int] | None) -> Contents:
        entries = self.state.entries[kind]
        structure, salts = digest_structure(kind, entries)
        digests, counts = read([entry.value for entry in entries], share)
        return Contents(kind, entries, structure, digests + salts, counts)

    def _sum_up(self, contents: Contents) -> list[int]:
        """Return this rank's terms of the structure and contents, and counts, as in Sums."""
        stage = find_scope(self.base, None)
        layouts: dict[int, list[int]] = {}  # entries with the same layout share one object
        for place, entry in enumerate(contents.entries):
            layouts.setdefault(id(entry.layout), []).append(place)
        whole, nbytes, counted = 0, 0, {False: 0, True: 0}
        for places in layouts.values():
            scope = find_scope(self.base, contents.entries[places[0]].layout)
            whole += scope.weight * of_bytes(contents.digests[places].tobytes())
            once = len(scope.ranks) == 1 < len(self.base.ranks)
            counted[once] += len(places)
            if not once:
                nbytes += sum(_count_nbytes(contents.entries[place]) for place in places)
        speaks = self.base.rank == stage.ranks[0]  # one rank counts the tensors of a stage
        numbers = counted[False] * speaks, counted[True] * speaks, nbytes
        return [stage.weight * contents.structure, whole, *numbers, int(contents.counts.sum())]

    def _gather_sums(
        self, contents: Sequence[Contents], terms: Sequence[int] = (), counts: Sequence[int] = ()
    ) -> tuple[list[bool], list[int], dict[str, Sums]]:
        rows = {each.kind: self._sum_up(each) for each in contents}
        # Kinds that this rank does not compare count too: all ranks must send as many numbers.
        numbers = [rows.get(kind, [0] * 6) for kind in KINDS]
        zeros, sums = self.channel.gather_sums(
            [*terms, *(term for row in numbers for term in row[:2])],
            [*counts, *(count for row in numbers for count in row[2:])],
        )
        found = {}
        for i, kind in enumerate(KINDS):
            alike, equal = zeros[len(terms) + 2 * i :][:2]
            found[kind] = Sums(alike, equal, *sums[len(counts) + 4 * i :][:4])
        return zeros[: len(terms)], sums[: len(counts)], found

    def _gather_kind(self, contents: Contents, sums: Sums) -> None:
        """Add to the results what was compared of a kind, and what is wrong."""
        kind, wrong = contents.kind, not sums.equal or sums.nonfinite > 0
        names = [entry.name for entry in contents.entries]
        if not sums.alike or (self.base.stages and wrong):
            names = self._gather_common(contents)
        if not sums.alike:
            contents, wrong = contents.select({*names}), True
            _, totals = self.channel.gather_sums([], self._sum_up(contents)[2:])
            sums = Sums(False, False, *totals)
        self.compared[kind] = sums.compared
        self.held_once[kind] += sums.held_once
        self.nbytes += sums.nbytes // len(self.channel.ranks)
        if wrong:
            self._gather_wrong(contents, names)

    # --- pipeline stages

    def _gather_base(self, contents: Contents) -> None:
        """Agree on the mesh that names the ranks, and find its dimensions of pipeline stages."""
        channel, grid = self.channel, self.base.grid
        own = of_bytes(repr((grid.shape, grid.names, grid.ranks)).encode()) >> 1
        rows = channel.gather_rows(np.array([own, contents.structure >> 1], np.int64))
        if len(set(rows[:, 0].tolist())) > 1:
            known = channel.gather_objects([grid.shape, grid.names, grid.ranks])
            grid = max(
                (Grid(*map(tuple, each)) for each in known), key=lambda each: len(each.shape)
            )
            self.base = replace(self.base, grid=grid)
        if contents.kind == "parameter" and len(grid.shape) > 1:
            key, stages = rows.tobytes(), self._options.stages
            if key not in stages:
                names = channel.gather_objects([entry.name for entry in contents.entries])
                stages[key] = _find_stages(channel.ranks, grid, names)
            self.base = replace(self.base, stages=stages[key])

    # --- what is wrong

    def gather_forms(self, own: Mapping[str, str]) -> dict[str, Forms]:
        """Return the ranks that have each form of a name, for the names and forms of this rank.

        Only ranks of the same pipeline stage must have the same names. The form of a missing name
        is "absent".
        """
        stages = list(map(self.base.locate_stage, self.channel.ranks))
        tables: list[dict[str, str]] = self.channel.gather_objects(own)
        names: dict[str, Forms] = {}
        for name in dict.fromkeys(name for table in tables for name in table):
            holders = {stage for stage, table in zip(stages, tables, strict=True) if name in table}
            forms = names.setdefault(name, {})
            for rank, stage, table in zip(self.channel.ranks, stages, tables, strict=True):
                if stage in holders:
                    forms.setdefault(table.get(name, "absent"), []).append(rank)
        return names

    def _gather_common(self, contents: Contents) -> list[str]:
        """Return the names of entries that all ranks have alike, in the same order.

        Add the other entries as mismatches.
        """
        forms = self.gather_forms({entry.name: row(entry) for entry in contents.entries})
        for name, sides in forms.items():
            if len(sides) > 1:
                self.add_mismatch(contents.kind, name, sides)
        if not self.mismatches:
            self._gather_order(contents)
        return [name for name, sides in forms.items() if len(sides) == 1]

    def _gather_order(self, contents: Contents) -> None:
        """Add the first place at which the ranks of a stage have entries of other names."""
        stage = f" of stage {self.base.locate_stage(self.base.rank)}" if self.base.stages else ""
        names = [entry.name for entry in contents.entries]
        orders = self.gather_forms({f"number {i}{stage}": name for i, name in enumerate(names)})
        for number in [number for number, forms in orders.items() if len(forms) > 1][:1]:
            self.add_mismatch(contents.kind, number, orders[number])

    def add_mismatch(self, kind: str, name: str, forms: Forms) -> None:
        """Add a tensor of which the ranks have several forms."""
        sides = tuple((form, tuple(ranks)) for form, ranks in forms.items())
        self.mismatches.append(Mismatch(kind, name, sides))

    def _gather_wrong(self, contents: Contents, names: Sequence[str]) -> None:
        """Add the tensors that differ, and those that are not finite."""
        own_rows = zip(contents.entries, contents.digests, contents.counts, strict=True)
        held = {e.name: self._describe_part(e, int(d), int(n)) for e, d, n in own_rows}
        own = [held.get(name) for name in names]  # None: of another pipeline stage
        equal, counts = self.channel.gather_sums(
            [self._weigh(part) if part else 0 for part in own],
            [part.nonfinite if part else 0 for part in own],
        )
        bad = [i for i, same in enumerate(equal) if counts[i] or not same]
        rows = self.channel.gather_objects([own[i] for i in bad]) if bad else []
        values = {entry.name: entry.value for entry in contents.entries}
        located = 0
        for number, name in enumerate(names[i] for i in bad):
            parts = {at: Part(*row[number]) for at, row in enumerate(rows) if row[number]}
            self._add_nonfinite((contents.kind, name), parts)
            for shards in _merge(parts):
                fresh = located < self._options.locate
                tensor = as_tensor(values[name]) if name in values else None
                key = contents.kind, name
                difference = self._gather_difference(key, tensor, shards, fresh)
                self.differences.append(difference)
                located += bool(difference.details)

    def _weigh(self, part: Part) -> int:
        return part.digest * weigh_scope(tuple(part.ranks), self.base.rank).weight

    def _describe_part(self, entry: Entry, digest: int, nonfinite: int) -> Part:
        tensor = as_tensor(entry.value) if entry.value is not None else torch.empty(0)
        part = Part(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offsets=[0] * tensor.dim(),
            whole=tuple(entry.shape),
            ranks=find_scope(self.base, entry.layout).ranks,
            digest=digest,
            nonfinite=nonfinite,
        )
        if entry.layout is None:
            return part
        cut = find_offsets(entry.layout, self.base.rank, entry.shape)
        return part._replace(
            offsets=cut[1] if cut and cut[0] == part.shape else None,
            shard=entry.layout.name_shard(self.base.rank),
            shards=entry.layout.count_shards(),
        )

    def _add_nonfinite(self, key: tuple[str, str], parts: Mapping[int, Part]) -> None:
        counts = {at: part.nonfinite for at, part in parts.items() if part.nonfinite}
        if counts:
            found = tuple((self.channel.ranks[at], count) for at, count in counts.items())
            shard = _name_shards([parts[at] for at in counts])
            self.nonfinite.append(NonFinite(*key, found, shard))

    def _gather_difference(
        self, key: tuple[str, str], tensor: Tensor | None, shards: list[Shard], fresh: bool
    ) -> Difference:
        """Return the difference of shards that differ alike.

        The first is compared element by element if it is `fresh` and was not located before.
        """
        channel, (first, part) = self.channel, shards[0]
        sides = [
            [channel.ranks[place] for shard, _ in shards for place in shard[number]]
            for number in range(len(first))
        ]
        difference = Difference(
            *key,
            dtype=part.dtype,
            shape=tuple(part.whole),
            values=tuple(tuple(sorted(side)) for side in sides),
            shard=_name_shards([part for _, part in shards]),
        )
        if not fresh or difference.key in self._options.history:
            return difference
        if tensor is None or not any(channel.rank in side for side in first):
            # This rank takes part in the broadcasts only.
            tensor = torch.zeros((), dtype=getattr(torch, part.dtype)).expand(*part.shape)
        details = gather_details(channel, tensor, part, first)
        return replace(difference, details=details)


def _merge(parts: Mapping[int, Part]) -> list[list[Shard]]:
    """Return the differing shards of a tensor; those that differ alike are together.

    They differ alike if the same members of their scopes are equal, as when one replica is wrong.
    parts: by place of the rank.
    """
    scopes: dict[tuple[int, ...], list[int]] = {}
    for place, part in parts.items():
        scopes.setdefault(tuple(part.ranks), []).append(place)
    merged: dict[object, list[Shard]] = {}
    for places in scopes.values():
        members = by_value([parts[place].digest for place in places])
        if len(members) > 1:
            sides = [[places[member] for member in side] for side in members]
            merged.setdefault(tuple(map(tuple, members)), []).append((sides, parts[places[0]]))
    return list(merged.values())


def _name_shards(parts: Sequence[Part]) -> str:
    """Return "shard 2 of 4", "shards 1, 3 of 4" or "all 4 shards"; "" for a whole tensor."""
    total, names = parts[0].shards, {part.shard for part in parts}
    if len(names) == 1:
        return parts[0].shard
    if len(names) == total:
        return f"all {total} shards"
    numbers = sorted(int(name.split()[1]) for name in names if name)
    return f"shards {', '.join(map(str, numbers))} of {total}"


def _find_stages(ranks: Sequence[int], grid: Grid, names: list[list[str]]) -> tuple[int, ...]:
    """Return the dimensions of a mesh along which no two coordinates have a name in common."""
    stages = []
    for d in range(len(grid.shape)):
        parts: dict[int, set[str]] = {}
        for rank, own in zip(ranks, names, strict=True):
            parts.setdefault(grid.coordinates[rank][d], set()).update(own)
        distinct, total = set().union(*parts.values()), sum(map(len, parts.values()))
        if len(parts) > 1 and all(parts.values()) and len(distinct) == total:
            stages.append(d)
    return tuple(stages)


def _explain_settings(settings: Mapping[str, Forms]) -> str:
    parts = []
    for name, forms in settings.items():
        if len(forms) > 1:
            values = [f"{value} in {ranks_text(ranks)}" for value, ranks in forms.items()]
            parts.append(f"{name} is {list_all(values)}")
    return f"the ranks verify with different arguments: {'; '.join(parts)}"


def _count_nbytes(entry: Entry) -> int:
    """Return the size of this rank's part of an entry; 8 for a number."""
    return entry.value.nbytes if isinstance(entry.value, Tensor) else 8
