"""Compare a replica over all ranks, everything at once, and the names of what it holds."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ddpbench.records.wording import list_all
from ddpbench.replicas.channel import Channel
from ddpbench.replicas.digest import Counts, Digests, of_bytes, read
from ddpbench.replicas.report import Difference, Mismatch, NonFinite, ranks_text
from ddpbench.replicas.scopes import Base
from ddpbench.replicas.state import KINDS, Entry, State, row, structure

# Kind and name of a tensor, and the sets of ranks that share a value.
Key = tuple[str, str, tuple[tuple[int, ...], ...]]
_MESHED = 1 << 62  # a bit of the first count: this rank has tensors on a mesh


@dataclass(frozen=True)
class Options:
    """Settings of a verification, the same in all ranks."""

    gradients: bool | None
    finite: bool
    locate: int
    step: int | None
    equal_until: int | None = None  # the step of the last verification that found all equal
    known: Collection[Key] = ()  # differences located before
    traced: bool = False  # whether each rank watches where a NaN comes from
    # Dimensions of a mesh along which ranks hold other layers, by what the ranks hold.
    stages: dict[bytes, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class Comparison:
    """The result of comparing some kinds."""

    base: Base
    meshed: bool  # whether some rank has tensors on a mesh
    differences: list[Difference] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    nonfinite: list[NonFinite] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    held_once: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """This rank's entries of a kind, and what was read of each."""

    kind: str
    entries: list[Entry]
    digests: Digests  # uint64[n], salted by the structure
    counts: Counts  # int64[n] of elements that are not finite, 0 where this rank has not looked
    structure: int  # digest of names, dtypes, shapes, devices and placements

    def row(self, meshed: bool) -> list[int]:
        """Return count, structure, contents and elements that are not finite, as four numbers.

        Contents on a mesh are not equal in all ranks, so they are left out.
        """
        whole = 0 if meshed else int(np.uint64(of_bytes(self.digests.tobytes())).astype(np.int64))
        return [len(self.entries), self.structure, whole, int(self.counts.sum())]


@dataclass(frozen=True)
class Extremes:
    """The least and the greatest of each rank's numbers of some kinds."""

    same: npt.NDArray[np.bool_]  # bool[kinds, 4], as in Contents.row
    nonfinite: list[bool]  # of each kind, whether some rank has elements that are not finite
    meshed: bool  # whether some rank has tensors on a mesh
    plain: bool  # whether some rank has none
    extras: list[tuple[int, int]]


def gather_contents(
    channel: Channel,
    contents: Sequence[Contents],
    options: Options,
    *,
    extras: Sequence[int],
    meshed: bool,
) -> Extremes:
    """Compare structure, contents and extras with one all_reduce of fixed size."""
    settings = {
        "gradients": options.gradients,
        "finite": options.finite,
        "locate": options.locate,
        "step": options.step,
        "trace_nonfinite": options.traced,
        "equal_until": options.equal_until,
        "earlier differences": sorted(options.known),
    }
    # A kind that this rank does not compare counts too: all ranks must send the same number.
    rows = {each.kind: each.row(meshed) for each in contents}
    numbers = [n for kind in KINDS for n in rows.get(kind, [0] * 4)]
    numbers[0] |= _MESHED if meshed else 0
    head = [of_bytes(repr(settings).encode()) >> 1, *numbers]
    least, most = channel.gather_extremes(np.array([*head, *extras], np.int64))
    if least[0] != most[0]:
        raise ValueError(_explain_settings(channel.ranks, channel.gather_objects(settings)))
    tail, chosen = 1 + 4 * len(KINDS), [KINDS.index(each.kind) for each in contents]
    return Extremes(
        (least == most)[1:tail].reshape(-1, 4)[chosen],
        (most[1:tail].reshape(-1, 4)[chosen, 3] > 0).tolist(),
        bool(most[1] & _MESHED),
        not least[1] & _MESHED,
        list(zip(least[tail:].tolist(), most[tail:].tolist(), strict=True)),
    )


def _explain_settings(ranks: Sequence[int], settings: list[dict[str, object]]) -> str:
    parts = []
    for name in settings[0]:
        sides: dict[str, list[int]] = {}
        for rank, each in zip(ranks, settings, strict=True):
            sides.setdefault(repr(each[name]), []).append(rank)
        if len(sides) > 1:
            values = [f"{value} in {ranks_text(side)}" for value, side in sides.items()]
            parts.append(f"{name} is {list_all(values)}")
    return f"the ranks verify with different arguments: {'; '.join(parts)}"


def read_contents(state: State, kind: str, share: tuple[int, int] | None) -> Contents:
    """Return the entries of a kind with their digests, and counts in a share of them (`read`)."""
    entries = state.entries[kind]
    form = structure(kind, entries)
    digests, counts = read([entry.value for entry in entries], share)
    digests += form.salts  # modulo 2^64
    return Contents(kind, entries, digests, counts, form.digest)


def count_nbytes(entry: Entry) -> int:
    """Return the size of this rank's part of an entry; 8 for a number."""
    return entry.value.nbytes if isinstance(entry.value, torch.Tensor) else 8


def gather_common(
    channel: Channel,
    contents: Contents,
    comparison: Comparison,
    stages: Sequence[Hashable],
) -> list[tuple[str, int | None]]:
    """Return the names that all ranks have alike, and this rank's places, in the same order.

    Add the other entries to `comparison` as mismatches. Only ranks of the same stage must have the
    same entries; of those of other stages, the place is None.
    """
    kind, entries = contents.kind, contents.entries
    everyone = channel.gather_objects([[entry.name, row(entry)] for entry in entries])
    tables: list[dict[str, str]] = [dict(rows) for rows in everyone]
    places = {entry.name: place for place, entry in enumerate(entries)}
    common: list[tuple[str, int | None]] = []
    for name in dict.fromkeys(name for table in tables for name in table):
        holders = {stage for stage, table in zip(stages, tables, strict=True) if name in table}
        forms: dict[str, list[int]] = {}
        for rank, stage, table in zip(channel.ranks, stages, tables, strict=True):
            if stage in holders:
                forms.setdefault(table.get(name, "absent"), []).append(rank)
        if len(forms) == 1:
            common.append((name, places.get(name)))
        else:
            comparison.mismatches.append(_mismatch(kind, name, forms))
    if not comparison.mismatches:
        comparison.mismatches += _order(channel, kind, tables, stages)
    return common


def _order(
    channel: Channel, kind: str, tables: list[dict[str, str]], stages: Sequence[Hashable]
) -> list[Mismatch]:
    mismatches = []
    for stage in dict.fromkeys(stages):
        members = [place for place, each in enumerate(stages) if each == stage]
        names = [list(tables[place]) for place in members]
        for number, order in enumerate(zip(*names, strict=True)):
            if len(set(order)) > 1:
                forms: dict[str, list[int]] = {}
                for place, name in zip(members, order, strict=True):
                    forms.setdefault(name, []).append(channel.ranks[place])
                mismatches.append(_mismatch(kind, f"number {number}", forms))
                break
    return mismatches


def _mismatch(kind: str, name: str, forms: dict[str, list[int]]) -> Mismatch:
    return Mismatch(kind, name, tuple((form, tuple(ranks)) for form, ranks in forms.items()))
