"""What became of each operation, reduce op and dtype that was tried, and what of it is a finding.

That a backend refuses something is information; that it crashes, hangs or answers wrongly is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddpbench.records.schema import Finding

OK, UNSUPPORTED, WRONG, CRASH, HANG = "ok", "unsupported", "wrong", "crash", "hang"


@dataclass(frozen=True)
class Combination:
    """What is tried with one call; of an operation that moves no data there is no dtype."""

    operation: str
    form: str  # "tensor" or "list", as `Case` has it
    reduce_op: str | None
    dtype: str | None

    @property
    def called(self) -> str:
        """The operation in words: "all_gather (list)"."""
        return self.operation + (" (list)" if self.form == "list" else "")

    @property
    def name(self) -> str:
        """All of it in words: "all_reduce max of int8"."""
        words = [self.called, self.reduce_op, self.dtype and f"of {self.dtype}"]
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Verdict:
    """What became of it, in one rank or in all."""

    outcome: str  # OK, UNSUPPORTED, …
    why: str = ""  # one line; of all but OK
    wrong: dict[str, Any] = field(default_factory=dict)  # rank, index, elements, expected, got


FEW = 3  # combinations that a finding names besides the first
Tried = Sequence[tuple[Combination, Verdict]]


def agreed(everyones: Sequence[Verdict]) -> tuple[Verdict, bool]:
    """The verdict of all ranks' own, in order of rank; and whether some refused and some did not,
    after which the group may be out of step."""
    refused = [rank for rank, each in enumerate(everyones) if each.outcome == UNSUPPORTED]
    if refused:
        why = everyones[refused[0]].why
        apart = len(refused) < len(everyones)
        return Verdict(UNSUPPORTED, refused_by(refused, why) if apart else why), apart
    wrong = (each for each in everyones if each.outcome == WRONG)
    return next(wrong, Verdict(OK)), False


def refused_by(ranks: Sequence[int], why: str) -> str:
    """Why, where not all refuse."""
    return f"in rank {', '.join(map(str, ranks))} only: {why}"


def breaking(verdict: Verdict) -> Verdict:
    """The same, where nothing works in the group afterwards."""
    return replace(verdict, why=f"{verdict.why}; then its group is unusable")


def rows(tried: Tried) -> list[dict[str, Any]]:
    """For the file, one a combination: operation, form, reduce_op, dtype, outcome, why."""
    return [{**asdict(each), "outcome": v.outcome, "why": v.why} for each, v in tried]


def counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """outcome → how many, all outcomes, the good ones first."""
    found = [verdict.outcome for verdict in verdicts]
    return {name: found.count(name) for name in (OK, UNSUPPORTED, WRONG, CRASH, HANG)}


# outcome → severity, code, what is said, what to do
BAD = {
    WRONG: (
        "error", "wrong-result", "gives a wrong result",
        "do not call it on this set-up, as no error will tell; report it to the backend",
    ),
    CRASH: (
        "warning", "operation-crashes", "crashes instead of raising an error",
        "never call it on this set-up: it takes the whole job along",
    ),
    HANG: (
        "warning", "operation-hangs", "hangs instead of raising an error",
        "never call it on this set-up: the job would wait until its time-out",
    ),
}  # fmt: skip


def findings(backend: str, tried: Tried) -> tuple[Finding, ...]:
    """One for each operation and form that gives a wrong result, crashes or hangs: the first such
    combination in full, the others by name."""
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
