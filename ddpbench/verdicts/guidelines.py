"""Self-consistent performance: an operation should not be slower than others that do its work.

The guidelines are those of Träff, Gropp and Thakur, "Self-Consistent MPI Performance Guidelines"
(IEEE TPDS 21, 2010), tested as in PGMPI by Hunold and Carpen-Amarie ("Automatic Verification of
Self-Consistent MPI Performance Guidelines", Euro-Par 2016, with Träff). A violation accuses the
library: its user could call the others instead.

Both sides have the same message size S, the total buffer, in the conventions of nccl-tests: then
they move the same data. Of a vector of S bytes, reduce_scatter leaves a block of S/n on each rank,
which all_gather of S collects; all_to_all of S can send the same block to all ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ddpbench.analysis.flags import UNUSABLE
from ddpbench.analysis.lines import Line
from ddpbench.records.schema import Case
from ddpbench.verdicts.many_pairs import Pair, judge_pairs
from ddpbench.verdicts.verdict import INCONCLUSIVE, MARGIN, SLOWER, Shift

VIOLATED, HOLDS = "VIOLATED", "HOLDS"
# operation → what does its work, one after the other
GUIDELINES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("all_reduce", ("reduce", "broadcast")),
    ("all_reduce", ("reduce_scatter", "all_gather")),
    ("all_gather", ("all_to_all",)),
    ("broadcast", ("scatter", "all_gather")),
    ("barrier", ("all_reduce",)),
)
SAME_SIZE = 0.01  # sizes rounded to whole elements on every rank may differ by this share


@dataclass(frozen=True)
class Check:
    """One guideline at one size: `line` should take no longer than `others` together."""

    line: Line
    others: tuple[Line, ...]  # of the same operation: the next larger size
    verdict: str = INCONCLUSIVE
    shift: Shift | None = None  # log(time / time of the others), over the launches of both
    needed: int | None = None  # launches, about, that would settle INCONCLUSIVE

    @property
    def monotone(self) -> bool:
        """Whether this compares two sizes of one operation."""
        return self.others[0].case.operation == self.line.case.operation

    @property
    def label(self) -> str:
        """The guideline: "all_reduce ≤ reduce + broadcast"."""
        if self.monotone:
            return f"{self.line.case.called} ≤ the next larger size"
        one = " of 1 element" if not self.line.case.nbytes else ""
        return f"{self.line.case.called} ≤ {self.instead}{one}"

    @property
    def instead(self) -> str:
        """The operations that do the same: "reduce + broadcast"."""
        return " + ".join(other.case.operation for other in self.others)

    @property
    def seconds(self) -> float:
        """Median time of the operation."""
        return self.line.seconds or 0.0

    @property
    def bound(self) -> float:
        """Median times of the others in seconds, added up."""
        return sum(other.seconds or 0.0 for other in self.others)


def check(lines: Sequence[Line]) -> list[Check]:
    """Return all guidelines that these lines can test, each with its verdict, by backend.

    VIOLATED: the interval of the change lies above verdict.MARGIN, also corrected for the number of
    sizes of this guideline and backend (of the growth with size: of all its operations). HOLDS: the
    interval lies below. It is that of verdict.paired_shift on the medians of the same launches, of
    which there must be six.
    """
    usable = [line for line in lines if line.seconds and not UNUSABLE & set(line.flags)]
    families = defaultdict(list)
    for found in (*_compositions(usable), *_neighbours(usable)):
        families["" if found.monotone else found.label, found.line.case.backend].append(found)
    return [judged for group in families.values() for judged in _judge(group)]


def merge(checks: Sequence[Check]) -> list[list[Check]]:
    """Return the sizes of one guideline and verdict together, but each violation alone."""
    merged: dict[object, list[Check]] = {}
    for one in checks:
        case = one.line.case
        alone = case.nbytes if one.verdict == VIOLATED else None
        key = one.label, case.backend, _conditions(case), one.verdict, alone
        merged.setdefault(key, []).append(one)
    return list(merged.values())


def _compositions(lines: Sequence[Line]) -> Iterator[Check]:
    alike: defaultdict[tuple[str, Case], list[Line]] = defaultdict(list)
    for line in lines:
        name, conditions = line.case.operation, _conditions(line.case)
        alike[name, conditions].append(line)
        if line.case.count == 1:  # also beside a barrier, which has no data
            alike[name, replace(conditions, dtype="")].append(line)
    for operation, others in GUIDELINES:
        for line in lines:
            if line.case.operation != operation:
                continue
            conditions = _conditions(line.case)
            candidates = [
                [other for other in alike[name, conditions] if _does(other.case, line.case)]
                for name in others
            ]
            if all(candidates):
                fastest = (min(some, key=lambda o: o.seconds or 0.0) for some in candidates)
                yield Check(line, tuple(fastest))


def _neighbours(lines: Sequence[Line]) -> Iterator[Check]:
    series: dict[Case, list[Line]] = {}
    for line in lines:
        key = replace(line.case, nbytes=0, count=0, depth=0)
        series.setdefault(key, []).append(line)
    for group in series.values():
        for small, large in pairwise(sorted(group, key=lambda line: line.case.nbytes)):
            yield Check(small, (large,))


def _conditions(case: Case) -> Case:
    """Return the case without what differs between the operations of a guideline."""
    dtype = case.dtype if case.nbytes else ""
    one = replace(case, operation="", form="", reduce_op=None, root=None, in_place=False)
    return replace(one, nbytes=0, count=0, depth=0, dtype=dtype)


def _does(other: Case, case: Case) -> bool:
    """Return whether the other operation does this case's work, or a part of it."""
    return not case.nbytes or (
        abs(other.nbytes - case.nbytes) <= SAME_SIZE * case.nbytes
        and (other.reduce_op is None or other.reduce_op == case.reduce_op)
        and (other.root is None or case.root is None or other.root == case.root)
    )


def _judge(checks: Sequence[Check]) -> list[Check]:
    pairs = []
    for found in checks:
        times = [
            {
                r.launch: r.summary.median_seconds
                for r in line.results
                if r.summary and r.summary.median_seconds > 0
            }
            for line in (found.line, *found.others)
        ]
        launches = sorted(set.intersection(*map(set, times)))
        new, *parts = (np.array([each[launch] for launch in launches]) for each in times)
        pairs.append(Pair(np.sum(parts, axis=0), new, MARGIN))
    judged = []
    for found, judgement in zip(checks, judge_pairs(pairs, paired=True), strict=True):
        shift, verdict = judgement.shift, INCONCLUSIVE
        if judgement.verdict == SLOWER:
            verdict = VIOLATED
        elif shift is not None and shift.high <= math.log1p(MARGIN):
            verdict = HOLDS
        judged.append(replace(found, verdict=verdict, shift=shift, needed=judgement.needed))
    return judged
