"""What a verification says: frozen data, the same in every rank, and its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
class NotCompared:
    """A tensor or value that could not be compared."""

    kind: str
    name: str
    reason: str  # "sharded: each rank holds a part of its own"


@dataclass(frozen=True)
class WithoutGradient:
    """A trained parameter whose gradient is None in some ranks, while others have theirs."""

    name: str
    ranks: tuple[int, ...]
    zeros: bool = False  # it is not None but zero throughout, unlike other ranks'


@dataclass(frozen=True)
class Origin:
    """Where a rank first saw a NaN or an infinity of its own, before gradients were reduced."""

    rank: int
    steps_ago: int  # optimizer steps between that and the verification
    place: str  # "the output of forward", or "the gradient of fc.weight"


@dataclass(frozen=True)
class Report:
    """The result of one verification, the same in every rank. Ranks are global ranks.

    There are three answers. `ok`: everything was compared, is equal and finite. `failed`: something
    differs or is not finite. Neither: what was compared is equal, and `not_compared` has the rest.
    A loop that stops on a fault asks for `failed`; one that wants a proof asks for `ok`.
    """

    ranks: tuple[int, ...]  # that were compared
    step: int | None
    compared: dict[str, int]  # kind → how many tensors and numbers
    nbytes: int  # of them, in one rank
    differences: tuple[Difference, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    nonfinite: tuple[NonFinite, ...] = ()
    without_gradient: tuple[WithoutGradient, ...] = ()
    origins: tuple[Origin, ...] = ()  # of `nonfinite`, where a Verifier traces it
    not_compared: tuple[NotCompared, ...] = ()
    rng_equal: bool = True
    findings: tuple[Finding, ...] = ()  # all of the above in words, the worst first
    equal_until: int | None = None  # the last step after which a Verifier had found all equal
    since: int | None = None  # the step of the Verifier's first report of what is wrong
    repeated: bool = False  # a report before this one, of the same Verifier, has all that is wrong

    @property
    def ok(self) -> bool:
        """Whether everything was compared, is equal in all ranks (but for buffers), and the
        parameters and the optimizer's state are finite."""
        return not (self.failed or self.not_compared)

    @property
    def failed(self) -> bool:
        """Whether something that was compared differs (but for buffers), or a parameter or the
        optimizer's state is not finite."""
        return any(f.severity == "error" for f in self.findings)

    @property
    def differs(self) -> bool:
        """Whether something that was compared differs between ranks, but for buffers, which are a
        note or a warning."""
        return bool(self._faulty)

    @property
    def equal(self) -> bool:
        """Whether everything was compared and has the same bits in all ranks, but for buffers."""
        return not (self.differs or self.not_compared)

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
        if self.differs:
            return f"{when}replicas {self._different(who)}"
        differing = Counter(each.kind for each in self.differences)
        some = [f"{n} of {counted(kind, self.compared[kind])}" for kind, n in differing.items()]
        verdict = f"replicas equal{' but for ' if some else ''}{', '.join(some)}"
        if self.not_compared:
            model = self.compared["parameter"] > 0 or all(
                each.kind != "parameter" for each in self.not_compared
            )
            verdict = f"replicas NOT {'ALL ' if model else ''}COMPARED"
        elif len(self.ranks) == 1:
            verdict = "one replica, equal to itself"
        if self.failed:
            verdict += ", but NOT FINITE,"
        text = f"{when}{verdict} in {who}; compared: {listed_kinds(self.compared)}"
        if self.not_compared:
            absent = Counter(each.kind for each in self.not_compared)
            text += f"; not compared: {listed_kinds(absent)}"
        return text

    def _different(self, who: str) -> str:
        if self.repeated:
            return f"still DIFFERENT in {who}, as in step {self.since}"
        differing = Counter(each.kind for each in self.differences)
        some = [f"{n} of {counted(kind, self.compared[kind])}" for kind, n in differing.items()]
        unlike = Counter(each.kind for each in self.mismatches)
        some += [f"{counted(kind, n)} not in all ranks alike" for kind, n in unlike.items()]
        until = "" if self.equal_until is None else f" (equal after step {self.equal_until})"
        same = {kind: n for kind, n in self.compared.items() if n and kind not in differing}
        equal = f"; equal: {listed_kinds(same)}" if same else ""
        absent = Counter(each.kind for each in self.not_compared)
        rest = f"; not compared: {listed_kinds(absent)}" if absent else ""
        minorities = {difference.minority for difference in self.differences}
        odd = minorities.pop() if len(minorities) == 1 else ()
        where = f": {ranks_text(odd)} of {who}" if odd else f" in {who}"
        return f"DIFFERENT{where}{until}: {', '.join(some)}{equal}{rest}"

    def __str__(self) -> str:
        lines = [self.headline]
        for finding in self.findings:
            lines.append(f"{finding.severity}: {finding.sentence}")
            if finding.next_step:
                lines.append(f"    Next: {finding.next_step}")
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


def listed_kinds(counts: Mapping[str, int]) -> str:
    return ", ".join(counted(kind, n) for kind, n in counts.items() if n) or "nothing"


def few(names: Sequence[str]) -> str:
    """All of up to three names, or the first two and how many more there are."""
    if len(names) > 3:
        return f"{', '.join(names[:2])} and {len(names) - 2} more"
    return ", ".join(names)


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
