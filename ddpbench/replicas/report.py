"""What a verification says: frozen data, the same in every rank, and its text."""

from __future__ import annotations

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
        if len(self.values) > 1 and len(self.values[0]) == len(self.values[1]):
            return ()
        return tuple(sorted(rank for ranks in self.values[1:] for rank in ranks))


@dataclass(frozen=True)
class Mismatch:
    """A name that is not there in all ranks, or as something else."""

    kind: str
    name: str
    forms: tuple[tuple[str, tuple[int, ...]], ...]  # "float32 (3, 2) cpu" or "absent": its ranks


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
    skipped: dict[str, str] = field(default_factory=dict)  # in the lowest rank: name → reason
    findings: tuple[Finding, ...] = ()  # all of the above in words, the worst first

    @property
    def equal(self) -> bool:
        """Whether all ranks have the same bits in all but buffers that DDP re-broadcasts."""
        bad = [f for f in self.findings if f.severity == "error" and f.code != "non-finite"]
        return not bad

    @property
    def ok(self) -> bool:
        """Equal, and all parameters and optimizer state finite."""
        return not any(f.severity == "error" for f in self.findings)

    @property
    def cause(self) -> Finding | None:
        """The likely cause of a difference, where its pattern tells one."""
        return next((f for f in self.findings if f.place.get("cause")), None)

    def __str__(self) -> str:
        when = "" if self.step is None else f"step {self.step}: "
        counts = [f"{n} {plural(kind, n)}" for kind, n in self.compared.items() if n]
        what = ", ".join(counts) or "nothing"
        verdict = "equal" if self.equal else "DIFFERENT"
        lines = [f"{when}replicas {verdict} in {ranks_text(self.ranks)}: {what}"]
        for finding in self.findings:
            lines.append(f"{finding.severity}: {finding.sentence}")
            if finding.next_step:
                lines.append(f"    next: {finding.next_step}")
        return "\n".join(lines)


def plural(kind: str, count: int) -> str:
    """A kind's name behind a number."""
    if kind == "optimizer":
        return "of the optimizer's state"
    return kind if count == 1 else f"{kind}s"


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
