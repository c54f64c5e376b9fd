"""What a verification says: frozen data, the same in every rank, and its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpbench.records.schema import Finding


@dataclass(frozen=True)
class Detail:
    """How the tensor of some ranks, equal among these, differs from the reference's."""

    ranks: tuple[int, ...]
    reference: int  # the rank it was compared with
    elements: int  # of the tensor
    differing: int  # of these, how many have other bits
    index: tuple[int, ...]  # of the first that has
    value: str  # there
    reference_value: str
    max_delta: float | None  # over elements finite in both; None where there is none
    bit: int | None  # the one bit of the one element that differs, 0 the least significant
    permuted: bool  # the same elements in another order


@dataclass(frozen=True)
class Difference:
    """A tensor, or a number, whose bits are not the same in all ranks."""

    kind: str  # "parameter", "gradient", "optimizer" or "buffer"
    name: str
    dtype: str
    shape: tuple[int, ...]
    values: tuple[tuple[int, ...], ...]  # the ranks that share a value, the most first
    details: tuple[Detail, ...] = ()  # empty beyond the first `locate` tensors of a kind

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks beside the one largest set of equal ones; empty where there is a tie."""
        return _minority(self.values)


@dataclass(frozen=True)
class Mismatch:
    """A name that is not there in all ranks, or as something else."""

    kind: str
    name: str
    forms: tuple[tuple[str, tuple[int, ...]], ...]  # "float32 (3, 2) cpu" or "absent": its ranks

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks beside the one largest set that has it alike; empty where there is a tie."""
        return _minority([ranks for _, ranks in self.forms])


@dataclass(frozen=True)
class NonFinite:
    """A tensor with NaN or infinite elements."""

    kind: str
    name: str
    counts: tuple[tuple[int, int], ...]  # (rank, elements), of the ranks that have some


@dataclass(frozen=True)
class Report:
    """What one verification found. Ranks are global ranks."""

    ranks: tuple[int, ...]  # that were compared
    step: int | None
    compared: dict[str, int]  # kind → how many tensors and numbers
    nbytes: int  # of them, in one rank
    differences: tuple[Difference, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    nonfinite: tuple[NonFinite, ...] = ()
    rng_equal: bool = True
    skipped: dict[str, str] = field(default_factory=dict)  # in this rank: "kind name" → reason
    findings: tuple[Finding, ...] = ()  # all of the above in words, the worst first
    equal_until: int | None = None  # the last step after which a Verifier had found all equal

    @property
    def equal(self) -> bool:
        """Whether all ranks have the same bits in all that was compared, but for buffers, which
        are a note or a warning."""
        return not self.faults

    @property
    def ok(self) -> bool:
        """Equal, with some parameters compared if there are any, and these and the optimizer's
        state finite."""
        return not any(f.severity == "error" for f in self.findings)

    @property
    def faults(self) -> tuple[str, ...]:
        """ "kind name" of all that makes the replicas different."""
        return tuple(f"{each.kind} {each.name}" for each in self._faulty)

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks that are in the minority in any of `faults`; empty where all of it is a tie."""
        return tuple(sorted({rank for each in self._faulty for rank in each.minority}))

    @property
    def _faulty(self) -> list[Difference | Mismatch]:
        return [d for d in self.differences if d.kind != "buffer"] + list(self.mismatches)

    @property
    def cause(self) -> Finding | None:
        """The likely cause of a difference, where its pattern tells one."""
        return next((f for f in self.findings if f.place.get("cause")), None)

    @property
    def headline(self) -> str:
        """The verdict in one line, and what it is on."""
        when = "" if self.step is None else f"step {self.step}: "
        who = ranks_text(self.ranks)
        bad = Counter(f.code for f in self.findings if f.severity == "error")
        differing = Counter(each.kind for each in self.differences)
        some = [f"{n} of {counted(kind, self.compared[kind])}" for kind, n in differing.items()]
        if not self.equal:
            until = "" if self.equal_until is None else f" (equal after step {self.equal_until})"
            unlike = Counter(each.kind for each in self.mismatches)
            some += [f"{counted(kind, n)} not in all ranks alike" for kind, n in unlike.items()]
            same = {kind: n for kind, n in self.compared.items() if n and kind not in differing}
            equal = f"; equal: {_listed(same)}" if same else ""
            return f"{when}replicas DIFFERENT in {who}{until}: {', '.join(some)}{equal}"
        if bad["nothing-compared"] or not any(self.compared.values()):
            verdict = "replicas NOT COMPARED"
        elif len(self.ranks) == 1:
            verdict = "one replica, equal to itself"
        else:
            verdict = f"replicas equal{' but for ' if some else ''}{', '.join(some)}"
        if bad["non-finite"]:
            verdict += ", but NOT FINITE,"
        return f"{when}{verdict} in {who}; compared: {_listed(self.compared)}"

    def __str__(self) -> str:
        lines = [self.headline]
        for finding in self.findings:
            lines.append(f"{finding.severity}: {finding.sentence}")
            if finding.next_step:
                lines.append(f"    next: {finding.next_step}")
        return "\n".join(lines)


def _minority(sides: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    first, *others = sorted(sides, key=len, reverse=True)
    if others and len(first) == len(others[0]):
        return ()
    return tuple(sorted(rank for ranks in others for rank in ranks))


def counted(kind: str, count: int) -> str:
    """ "1 parameter", "3 buffers", "24 values of the optimizer's options and state"."""
    one, of = (
        ("value", " of the optimizer's options and state") if kind == "optimizer" else (kind, "")
    )
    return f"{count} {one}{'' if count == 1 else 's'}{of}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(counted(kind, n) for kind, n in counts.items() if n) or "nothing"


def few(names: Sequence[str]) -> str:
    """The first of the names."""
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def ranks_text(ranks: tuple[int, ...]) -> str:
    """ "rank 3", or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(a) if a == b else f"{a}{'-' if b > a + 1 else ', '}{b}" for a, b in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
