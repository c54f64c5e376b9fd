"""The verdict on each operation, reduce op and dtype, and which verdicts are findings.

A refusal of the backend is information. A crash, a hang or a wrong result is a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddpbench.records.schema import Finding

OK, UNSUPPORTED, WRONG, CRASH, HANG = "ok", "unsupported", "wrong", "crash", "hang"
PARALLEL = "parallel"  # the form of a combination that is a way of parallel training


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


FEW = 3  # combinations that a finding names besides the first
Tried = Sequence[tuple[Combination, Verdict]]


def agreed(everyones: Sequence[Verdict]) -> tuple[Verdict, bool]:
    """Combine the ranks' own verdicts; return whether only some ranks refused.

    After that the group may be out of step. everyones: in order of rank.
    """
    refused = [rank for rank, each in enumerate(everyones) if each.outcome == UNSUPPORTED]
    if refused:
        why = everyones[refused[0]].why
        apart = len(refused) < len(everyones)
        return Verdict(UNSUPPORTED, refused_by(refused, why) if apart else why), apart
    wrong = (each for each in everyones if each.outcome == WRONG)
    return next(wrong, Verdict(OK)), False


def refused_by(ranks: Sequence[int], why: str) -> str:
    """Return the reason if only some ranks refuse."""
    return f"in rank {', '.join(map(str, ranks))} only: {why}"


def breaking(verdict: Verdict) -> Verdict:
    """Return the same verdict, with the remark that nothing works in the group afterwards."""
    return replace(verdict, why=f"{verdict.why}; then its group is unusable")


def rows(tried: Tried) -> list[dict[str, Any]]:
    """Return a record for each combination: operation, form, reduce_op, dtype, outcome, why."""
    return [{**asdict(each), "outcome": v.outcome, "why": v.why} for each, v in tried]


def counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Count each outcome, the good ones first."""
    found = [verdict.outcome for verdict in verdicts]
    return {name: found.count(name) for name in (OK, UNSUPPORTED, WRONG, CRASH, HANG)}


# outcome → severity, code, predicate, next step
BAD = {
    WRONG: (
        "error",
        "wrong-result",
        "gives a wrong result",
        "do not call it on this set-up, because no error is raised; report it to the backend",
    ),
    CRASH: (
        "warning",
        "operation-crashes",
        "crashes instead of raising an error",
        "never call it on this set-up: it ends the whole job",
    ),
    HANG: (
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
    alike: dict[tuple[str, str], list[tuple[Combination, Verdict]]] = {}
    for each, verdict in tried:
        if verdict.outcome in BAD:
            alike.setdefault((verdict.outcome, each.called), []).append((each, verdict))
    found = []
    for outcome in BAD:
        found += [_finding(backend, same) for (kind, _), same in alike.items() if kind == outcome]
    return tuple(found)


def _finding(backend: str, same: Tried) -> Finding:
    (first, verdict), *others = same
    severity, code, said, next_step = BAD[verdict.outcome]
    names = [" ".join(filter(None, (c.reduce_op, c.dtype))) for c, _ in others]
    more = f"; likewise {', '.join(names[:FEW])}" if names else ""
    more += f" and {len(names) - FEW} more of its combinations" if len(names) > FEW else ""
    return Finding(
        severity,
        code,
        f"{first.name} on {backend} {said} ({verdict.why}){more}",
        next_step,
        {"backend": backend, **asdict(first), **verdict.wrong},
    )
