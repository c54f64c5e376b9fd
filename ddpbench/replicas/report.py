"""The report of a verification: data that is the same in every rank, and its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ddpbench.records.schema import Finding
from ddpbench.records.wording import list_kinds, name_ranks
from ddpbench.replicas.state import KINDS, NotCompared

Sides = tuple[tuple[int, ...], ...]  # sets of ranks that agree with each other
Key = tuple[str, str, str, Sides]  # what is wrong, kind, name and sides


@dataclass(frozen=True)
class Detail:
    """Comparison of a tensor, equal in some ranks, with the tensor of a reference rank."""

    ranks: tuple[int, ...]  # ranks that share this tensor
    reference: int  # the reference rank
    elements: int  # number of elements
    differing: int  # number of elements with different bits
    index: tuple[int, ...]  # of the first differing element, in the whole tensor if it is sharded
    value: str  # of that element
    reference_value: str  # of that element in the reference rank
    max_delta: float | None  # over elements that are finite in both; None if there are none
    bit: int | None  # the differing bit, 0 the least significant; None unless only one differs
    permuted: bool  # the same elements in another order


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A tensor or number that is not as it should be, from its digests to its sentence."""

    kind: str  # one of KINDS
    name: str
    sides: Sides = ()  # empty if all ranks agree
    shard: str = ""  # "shard 2 of 4" of a sharded tensor: `sides` are ranks that hold this shard

    @property
    def key(self) -> Key:
        """Equal in two reports of the same fault."""
        return type(self).__name__, self.kind, self.name, self.sides

    @property
    def minority(self) -> tuple[int, ...]:
        """Ranks outside the largest set of equal ranks; empty if there is a tie."""
        first, *others = sorted(self.sides, key=len, reverse=True) or [()]
        if others and len(first) == len(others[0]):
            return ()
        return tuple(sorted(rank for ranks in others for rank in ranks))


@dataclass(frozen=True, kw_only=True)
class Difference(Fault):
    """A tensor or a number whose bits are not the same in all ranks, the largest side first."""

    dtype: str
    shape: tuple[int, ...]
    details: tuple[Detail, ...] = ()  # empty beyond the first 16 tensors of a kind


@dataclass(frozen=True, kw_only=True)
class Mismatch(Fault):
    """A tensor or value that is missing in some ranks, or has another shape, dtype or device."""

    forms: tuple[str, ...]  # of each side: "float32 (3, 2) cpu" or "absent"


@dataclass(frozen=True, kw_only=True)
class NonFinite(Fault):
    """A tensor with NaN or infinite elements."""

    counts: tuple[tuple[int, int], ...]  # (rank, number of elements), only ranks with any


@dataclass(frozen=True)
class Origin:
    """The first NaN or infinity of a rank before gradients were reduced."""

    rank: int
    steps_ago: int  # optimizer steps from then to the verification
    place: str  # "the output of forward", or "the gradient of fc.weight"


@dataclass
class Report:
    """The result of one verification, the same in every rank. Ranks are global ranks.

    There are three answers. `ok`: everything that exists more than once was compared, is equal and
    finite. `failed`: something differs or is not finite. Neither: `not_compared` lists tensors that
    could not be compared, or there is `nothing_to_compare`, as under fully_shard, where each
    element of each parameter is in one rank only. Stop a loop on `failed`. Use `ok` if you need a
    proof.
    """

    ranks: tuple[int, ...]  # ranks that were compared
    step: int | None
    equal_until: int | None = None  # last step after which a Verifier found everything equal
    compared: dict[str, int] = field(default_factory=dict)  # kind → number of tensors and numbers
    # kind → number of tensors of which each element is in one rank only; not part of `compared`
    held_once: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0  # size of the compared values in one rank
    differences: list[Difference] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    nonfinite: list[NonFinite] = field(default_factory=list)
    origins: tuple[Origin, ...] = ()  # of `nonfinite`, if a Verifier traces it
    not_compared: tuple[NotCompared, ...] = ()
    # {"dp_replicate": 1, "dp_shard": 0} of each rank, if tensors are on a DeviceMesh; else empty
    coordinates: dict[int, dict[str, int]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()  # sentences on all of the above, the worst first
    since: int | None = None  # step of the Verifier's first report of this fault
    repeated: bool = False  # an earlier report of the same Verifier has explained everything

    @property
    def ok(self) -> bool:
        """Whether everything that exists more than once was compared, is equal and finite.

        Buffers may differ. Only parameters and the optimizer's state must be finite.
        """
        return not self.failed and self.equal

    @property
    def failed(self) -> bool:
        """Whether something but a buffer differs, or parameters or state are not finite."""
        return any(f.severity == "error" for f in self.findings)

    @property
    def equal(self) -> bool:
        """Whether everything that exists more than once was compared and has the same bits.

        Buffers may differ.
        """
        return not (self.differs or self.not_compared or self.nothing_to_compare)

    @property
    def differs(self) -> bool:
        """Whether something differs between ranks; buffers, a note or a warning, do not count."""
        return bool(self._differing)

    @property
    def nothing_to_compare(self) -> bool:
        """Whether each element of each parameter is in one rank only."""
        return self.held_once.get("parameter", 0) > 0 and not self.compared["parameter"]

    @property
    def faults(self) -> tuple[str, ...]:
        """ "kind name" of every tensor that makes the replicas different."""
        return tuple(dict.fromkeys(f"{tensor.kind} {tensor.name}" for tensor in self._differing))

    @property
    def minority(self) -> tuple[int, ...]:
        """Ranks that are in the minority in any of `faults`; empty if all are ties."""
        return tuple(sorted({rank for tensor in self._differing for rank in tensor.minority}))

    @property
    def wrong(self) -> set[Key]:
        """A key for each difference, mismatch or NaN that makes a verification fail."""
        nonfinite = [n for n in self.nonfinite if KINDS[n.kind].if_nonfinite == "error"]
        return {tensor.key for tensor in [*self._differing, *nonfinite]}

    @property
    def _differing(self) -> list[Difference | Mismatch]:
        main = (d for d in self.differences if KINDS[d.kind].if_differs == "error")
        return [*main, *self.mismatches]

    @property
    def cause(self) -> Finding | None:
        """The finding with the likely cause of a difference; None if no cause is known."""
        return next((f for f in self.findings if f.place.get("cause")), None)

    @property
    def headline(self) -> str:
        """The verdict, the ranks and what was compared, in one line."""
        when = "" if self.step is None else f"step {self.step}: "
        parts = {
            "differing": count_by_kind(self.differences),
            "not matching": count_by_kind(self.mismatches),
            "compared": self.compared,
            "not compared": count_by_kind(self.not_compared),
            "held once": self.held_once,
        }
        counts = [f"; {title}: {list_kinds(n)}" for title, n in parts.items() if any(n.values())]
        return f"{when}{self._verdict} in {ranks_text(self.ranks)}{''.join(counts)}"

    @property
    def _verdict(self) -> str:
        if self.differs and self.repeated:
            return f"replicas still DIFFERENT, as in step {self.since},"
        if self.differs:
            until = "" if self.equal_until is None else f" (equal after step {self.equal_until})"
            return f"replicas DIFFERENT{until}"
        verdict = "replicas equal"
        if self.not_compared:
            verdict = "replicas NOT ALL COMPARED"
        elif self.nothing_to_compare:
            verdict = "NOTHING TO COMPARE: each element of each parameter is in one rank only,"
        return f"{verdict.rstrip(',')}, but NOT FINITE," if self.failed else verdict

    def __str__(self) -> str:
        lines = [self.headline]
        for finding in self.findings:
            lines.append(f"{finding.severity}: {finding.sentence}")
            if finding.next_step:
                lines.append(f"    Next: {finding.next_step}")
        return "\n".join(lines)


def count_by_kind(tensors: Iterable[Fault | NotCompared]) -> Counter[str]:
    """Return the number of tensors of each kind; one that differs in several shards counts once."""
    return Counter(kind for kind, _ in dict.fromkeys((t.kind, t.name) for t in tensors))


def few(names: Sequence[str]) -> str:
    """Return up to three names, else the first two and the number of the others."""
    if len(names) > 3:
        return f"{', '.join(names[:2])} and {len(names) - 2} more"
    return ", ".join(names)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"; two neighbours as "ranks 0, 1"."""
    return name_ranks(ranks, shortest=3)
