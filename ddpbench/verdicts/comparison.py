"""The verdict on two sets of runs, case by case, with notes on their reliability."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

import numpy as np

from ddpbench.analysis.stats import Floats
from ddpbench.records.schema import LEFT_OUT, Run
from ddpbench.records.wording import counted
from ddpbench.verdicts import matching, verdict
from ddpbench.verdicts.environments import Difference, compare_environments
from ddpbench.verdicts.matching import AnyCase, Side, SideCase, Source
from ddpbench.verdicts.verdict import (
    FASTER,
    INCOMPARABLE,
    INCONCLUSIVE,
    INVALID,
    MOST,
    SAME,
    SLOWER,
    Chance,
    Shift,
)

ONLY_BASE, ONLY_NEW = "ONLY BASE", "ONLY NEW"
# In order of importance.
COMPARED = (SLOWER, INCONCLUSIVE, FASTER, SAME)
ORDER = (SLOWER, INVALID, INCOMPARABLE, INCONCLUSIVE, FASTER, SAME, ONLY_BASE, ONLY_NEW)
DRIFTS = (
    "a machine changes over time, so a change counts only if its whole range is beyond the column "
    "drift; `ddpbench ab` measures in turns, without drift"
)

ASSUMED = 0.35  # drift, while there are too few runs to measure it
FEWEST_RUNS = 5  # earlier runs that measure it
# A run that differs only in these counts for the drift. All other differences may change times.
HARMLESS = ("git", "commit", "plan: ")


@dataclass(frozen=True)
class Row:
    """One case on two sides."""

    case: AnyCase  # BASE's if it has one
    base: Side | None
    new: Side | None
    margin: float  # the smallest change that counts
    verdict: str = ""  # "" until it is judged
    why: str = ""
    shift: Shift | None = None  # None: not comparable, or too few launches
    # Launches per side, about, to settle INCONCLUSIVE; None if launches do not help.
    needed: int | None = None
    drift: float = 0.0  # by which the sides may differ because they are apart in time
    earlier: int = 0  # runs that show the drift
    noticeable: float | None = None  # the change that such a comparison notices; None: none


RowT = TypeVar("RowT", bound=Row)


def count_verdicts(rows: Iterable[Row]) -> dict[str, int]:
    """Return the number of rows of each verdict that occurs, in order of importance."""
    counts = Counter(row.verdict for row in rows)
    return {name: counts[name] for name in ORDER if counts[name]}


def judge_rows(
    rows: Sequence[RowT],
    list_logs: Callable[[RowT], Sequence[float]] | None = None,
    paired: bool = False,
    confidence: float = verdict.CONFIDENCE,
) -> tuple[RowT, ...]:
    """Judge the rows without verdict, and return all rows in order of importance.

    One of several must also pass the test for their number. list_logs: log times of earlier runs,
    which show the drift; None: the sides are not apart in time. paired: launches of the same number
    ran one after the other, and are judged as pairs. confidence: of the intervals.
    """
    todo = [row for row in rows if not row.verdict]
    if list_logs is not None:
        known = [(row, list_logs(row)) for row in todo]
        todo = [
            replace(row, drift=drift_margin(logs, len(todo)), earlier=len(logs))
            for row, logs in known
        ]
    judged = [*(row for row in rows if row.verdict), *_judge(todo, paired, confidence)]

    def order(row: RowT) -> tuple[int, float, str, int]:
        change = abs(row.shift.estimate) if row.shift else 0.0
        return ORDER.index(row.verdict), -change, *matching.row_of(row.case)

    return tuple(sorted(judged, key=order))


def _judge(rows: Sequence[RowT], paired: bool, confidence: float) -> list[RowT]:
    shift, chance, false_share = verdict.shift, verdict.chance, 1 - confidence
    if paired:
        shift, chance = verdict.paired_shift, verdict.paired_chance
    times = [_list_times(row, paired) for row in rows]
    shifts = [shift(*sides, confidence) for sides in times]
    tested = [i for i, found in enumerate(shifts) if found is not None]
    chances: dict[int, Chance] = {}
    if len(tested) > 1:
        alone = [chance(*times[i], rows[i].margin) for i in tested]
        chances = dict(zip(tested, verdict.adjust_chances(alone), strict=True))
    judged = []
    for i, (row, sides, found) in enumerate(zip(rows, times, shifts, strict=True)):
        judge = partial(verdict.judge, found, row.margin, chances.get(i), false_share)
        row = _explain(replace(row, shift=found, verdict=judge(row.drift)), judge())
        if (strict := shift(*sides, 1 - false_share / len(rows))) is not None:
            row = replace(row, noticeable=verdict.noticeable(strict, row.margin, row.drift))
        judged.append(row)
    return judged


def _list_times(row: Row, paired: bool) -> tuple[Floats, Floats]:
    """Return float64[launch] in seconds of both sides; in pairs, of the launches that both have."""
    assert row.base is not None
    assert row.new is not None
    base, new = np.array(row.base.times), np.array(row.new.times)
    if not paired:
        return base, new
    _, left, right = np.intersect1d(row.base.launches, row.new.launches, return_indices=True)
    return base[left], new[right]


def _explain(row: RowT, without_drift: str) -> RowT:
    """Return the row with the reason for INCONCLUSIVE. without_drift: the verdict without it."""
    if row.verdict != INCONCLUSIVE:
        return row
    shift, needed = row.shift, None
    if without_drift != INCONCLUSIVE:
        why = f"two runs of identical code may differ by ±{row.drift * 100:.1f} %"
        if row.earlier < FEWEST_RUNS:
            why += f" (assumed: {row.earlier} of {FEWEST_RUNS} earlier runs are stored)"
    else:
        needed = verdict.launches_needed(shift, row.margin)
        if shift is None:
            why = f"too few launches: needs {needed} per side"
        else:
            is_beyond = verdict.beyond(shift, row.margin)
            width = f"±{math.expm1(shift.half_width) * 100:.1f} %"
            launches = f"about {needed}" if needed <= MOST else f"more than {MOST}"
            why = "may be chance among so many cases" if is_beyond else width
            why += f": needs {launches} launches per side"
    return replace(row, needed=needed, why="; ".join(filter(None, [row.why, why])))


@dataclass(frozen=True)
class Drift:
    """How far apart in time two sides are, and log times of earlier runs like them.

    Runs of identical code differ by more than the interval of each shows.
    """

    apart: timedelta  # from the end of the earlier side to the beginning of the later one
    # case → log times of stored runs in BASE's environment, one per run
    known: Mapping[AnyCase, tuple[float, ...]]


def drift_margin(logs: Sequence[float], cases: int) -> float:
    """Return the change, a fraction, that two runs of identical code seldom exceed.

    It is the 95th percentile of the changes among earlier runs. If these are few, or if the
    comparison has many cases, the quantile of Student's t is larger: at most 5 % of comparisons
    then show a larger change in any case (Bonferroni).
    """
    if len(logs) < FEWEST_RUNS:
        return ASSUMED
    from scipy.stats import t

    first, second = np.triu_indices(len(logs), 1)
    changes = np.abs(np.take(logs, first) - np.take(logs, second))
    quantile = t.ppf(1 - verdict.FALSE_SHARE / cases, len(logs) - 1)
    reach = quantile * np.std(logs, ddof=1) * math.sqrt(2)
    return math.expm1(max(float(np.percentile(changes, 95)), float(reach)))


def estimate_drift(base: Source, new: Source, stored: Iterable[Run]) -> Drift | None:
    """Estimate the drift between two sides; None if launches took turns or have no time stamps.

    stored: runs to learn from; runs in another environment than BASE, and NEW's own, are left out.
    """
    spans = [_find_span(source) for source in (base, new)]
    if None in spans:
        return None
    first, second = sorted(filter(None, spans))
    if second[0] < first[1] or first[0] == second[0]:
        return None
    others = {run.id: run for run in (*stored, *base.runs)}
    for run in new.runs:
        others.pop(run.id, None)
    known: dict[AnyCase, tuple[float, ...]] = {}
    for run in others.values():
        changed = [each.name for each in compare_environments(base.runs, [run])]
        if run.state != "complete" or not all(name.startswith(HARMLESS) for name in changed):
            continue
        for case, found in matching.find_cases(Source(run.id, (run,))).items():
            if found.side is not None:
                known[case] = (*known.get(case, ()), math.log(found.side.seconds))
    return Drift(second[0] - first[1], known)


def _find_span(source: Source) -> tuple[datetime, datetime] | None:
    """Return when the launches of a side began and ended; None without stamps."""
    launches = [launch for run in source.runs for launch in run.launches]
    if not launches or not all(launch.started for launch in launches):
        return None
    first = min(launch.started for launch in launches)
    last = max(launch.ended or launch.started for launch in launches)
    utc = (stamp.replace("Z", "+00:00") for stamp in (first, last))  # Python 3.10 does not read Z
    begin, end = map(datetime.fromisoformat, utc)
    return begin, end


@dataclass(frozen=True)
class Rule:
    """The rules for verdicts."""

    margin: float = verdict.MARGIN  # the smallest change that counts
    drift: Drift | None = None  # between two sides that are apart in time
    paired: bool = False  # launches of the same number ran one after the other: judge them in pairs
    confidence: float = verdict.CONFIDENCE  # of the intervals
    varied: tuple[str, ...] = ()  # identity fields that the user varies on purpose
    allow_missing: bool = False  # accept cases that only one side measured


@dataclass(frozen=True)
class Comparison:
    """All rows in order of importance, differences of the environments, and notes."""

    base: Source
    new: Source
    rule: Rule
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of rows of each verdict that occurs, in order of importance."""
        return count_verdicts(self.rows)


def compare(
    base: Source, new: Source, rule: Rule, wanted: Callable[[AnyCase], bool] = lambda case: True
) -> Comparison:
    """Compare the wanted cases of two sides.

    Raises ValueError if the runs of a side measured different cases and so are not replicates.
    """
    sides = matching.find_cases(base, wanted), matching.find_cases(new, wanted)
    rows = [row for pair in matching.pair_cases(*sides) if (row := _match(*pair, rule))]
    drift = rule.drift
    list_logs = None if drift is None else lambda row: drift.known.get(row.case, ())
    judged = judge_rows(rows, list_logs, rule.paired, rule.confidence)
    differences = compare_environments(base.runs, new.runs)
    named = [("BASE", run) for run in base.runs] + [("NEW", run) for run in new.runs]
    notes = []
    for name, run in named:
        if run.state != "complete":
            notes.append(f"{name} is PARTIAL: {run.id} is {run.state}")
        parts = [finding.sentence for finding in run.findings if finding.code == LEFT_OUT]
        notes += [f"{name} is only a part of {run.id}: {sentence}" for sentence in parts]
    if drift is not None:
        apart = timedelta(seconds=round(drift.apart.total_seconds()))
        notes.append(f"the two sides are {apart} apart: {DRIFTS}")
    return Comparison(base, new, rule, judged, differences, tuple(notes))


def exit_code(comparison: Comparison, strict: bool) -> int:
    """Return 1 if a row is SLOWER, else 3 if something is not compared.

    Else return 2 if `strict` and a row is INCONCLUSIVE; else 0.
    """
    if SLOWER in comparison.counts:
        return 1
    if explain_shortfall(comparison):
        return 3
    return 2 if strict and INCONCLUSIVE in comparison.counts else 0


def explain_shortfall(comparison: Comparison) -> str:
    """Return which requested cases were not compared; "" if none, or if the user allows it."""
    counts = comparison.counts
    some = bool(counts.keys() & set(COMPARED))
    missing = () if comparison.rule.allow_missing and some else (ONLY_BASE, ONLY_NEW)
    left = [
        f"{counts[name]} {name}" for name in (INVALID, INCOMPARABLE, *missing) if name in counts
    ]
    if not left:
        return ""
    accept = some and counts.keys() & set(missing)
    advice = "; --allow-missing accepts cases that only one side measured" if accept else ""
    return f"not compared: {', '.join(left)} of {counted(len(comparison.rows), 'case')}{advice}"


def _match(base: SideCase, new: SideCase, rule: Rule) -> Row | None:
    """Return the row of a matched pair, without verdict if it can be judged; None: unmeasured."""
    row = Row(base.case, base.side, new.side, rule.margin)
    sides = (("BASE", base), ("NEW", new))
    if faults := [f"{name}: {found.fault}" for name, found in sides if found.fault is not None]:
        return replace(row, verdict=INVALID, why="; ".join(faults))
    if base.side is None and new.side is None:
        return None
    if new.side is None:
        return replace(row, verdict=ONLY_BASE, why=new.reason)
    if base.side is None:
        return replace(row, verdict=ONLY_NEW, case=new.case, why=base.reason)
    row = replace(row, why=matching.differing(base.case, new.case))
    may_differ = set(matching.fields_differing(base.case, new.case)) <= set(rule.varied)
    return row if may_differ else replace(row, verdict=INCOMPARABLE)
