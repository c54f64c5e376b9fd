"""The verdict on each operation, reduce operation and dtype, and which verdicts are findings.

A refusal of the backend is information. A crash, a hang or a wrong result is a finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from ddpbench.records.schema import Finding

OK, UNSUPPORTED, WRONG, CRASH, HANG = "ok", "unsupported", "wrong", "crash", "hang"
PARALLEL = "parallel"  # the form of a combination that is a way of parallel training
FEW = 3  # combinations that a finding names besides the first


@dataclass(frozen=True)
class Combination:
    """What one call tries; an operation that moves no data has no dtype."""

    operation: str
    form: str  # "tensor" or "list", as `Case` has it; PARALLEL
    reduce_op: str | None
    dtype: str | None

    @property
    def called(self) -> str:
        """Return the operation in words: "all_gather (list)"."""
        return self.operation + (" (list)" if self.form == "list" else "")

    @property
    def name(self) -> str:
        """Return the combination in words: "all_reduce max of int8"."""
        words = [self.called, self.reduce_op, self.dtype and f"of {self.dtype}"]
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a combination, on one rank or on all."""

    outcome: str  # OK, UNSUPPORTED, …
    why: str = ""  # one line; of all but OK
    wrong: dict[str, Any] = field(default_factory=dict)  # rank, index, elements, expected, got

    def breaking(self) -> Verdict:
        """Return the same verdict, with the remark that nothing works in the group afterwards."""
        return replace(self, why=f"{self.why}; then its group is unusable")


Tried = Sequence[tuple[Combination, Verdict]]


def agreed(verdicts: Sequence[Verdict]) -> tuple[Verdict, bool]:
    """Combine the ranks' own verdicts; return whether only some ranks refused.

    After that the group may be out of step. verdicts: in order of rank.
    """
    refused = [rank for rank, verdict in enumerate(verdicts) if verdict.outcome == UNSUPPORTED]
    if len(refused) == len(verdicts):
        return verdicts[0], False
    if refused:
        return refused_by(refused, verdicts[refused[0]].why), True
    return next((each for each in verdicts if each.outcome == WRONG), Verdict(OK)), False


def refused_by(ranks: Sequence[int], why: str) -> Verdict:
    """Return the verdict if only these ranks refuse."""
    return Verdict(UNSUPPORTED, f"in rank {', '.join(map(str, ranks))} only: {why}")


def rows(tried: Tried) -> list[dict[str, Any]]:
    """Return a record for each combination: operation, form, reduce_op, dtype, outcome, why."""
    return [{**asdict(each), "outcome": v.outcome, "why": v.why} for each, v in tried]


class Bad(NamedTuple):
    """How an outcome is reported."""

    severity: str
    code: str
    predicate: str
    next_step: str


BAD = {
    WRONG: Bad(
        "error",
        "wrong-result",
        "gives a wrong result",
        "do not call it on this set-up, because no error is raised; report it to the backend",
    ),
    CRASH: Bad(
        "warning",
        "operation-crashes",
        "crashes instead of raising an error",
        "never call it on this set-up: it ends the whole job",
    ),
    HANG: Bad(
        "warning",
        "operation-hangs",
        "hangs instead of raising an error",
        "never call it on this set-up: the job would wait until its timeout",
    ),
}


def findings(backend: str, tried: Tried) -> tuple[Finding, ...]:
    """Return a finding for each operation and form that gives a wrong result, crashes or hangs.

    It describes the first such combination in full and names the others.
    """
    found = []
    for outcome, bad in BAD.items():
        groups: dict[str, list[tuple[Combination, Verdict]]] = {}
        for combination, verdict in tried:
            if verdict.outcome == outcome:
                groups.setdefault(combination.called, []).append((combination, verdict))
        for (first, verdict), *others in groups.values():
            names = [" ".join(filter(None, (c.reduce_op, c.dtype))) for c, _ in others]
            more = f"; likewise {', '.join(names[:FEW])}" if names else ""
            more += f" and {len(names) - FEW} more of its combinations" if names[FEW:] else ""
            sentence = f"{first.name} on {backend} {bad.predicate} ({verdict.why}){more}"
            place = {"backend": backend, **asdict(first), **verdict.wrong}
            found.append(Finding(bad.severity, bad.code, sentence, bad.next_step, place))
    return tuple(found)
