"""Build a run from another tool's log: each start of the tool is a launch.

The cases carry the tool's own identity (its definition of a time, its statistic, its reduction over
ranks), so that its figures are compared only with figures of the same tool.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpbench.catalog.operations import OPERATIONS
from ddpbench.records.launched import Launch
from ddpbench.records.schema import LEFT_OUT, Case, Finding, Plan, Result, Run, Summary, Wrong

INSTANT = "the log says 0: less than it can print"


@dataclass(frozen=True)
class Hints:
    """Facts from the user for logs that do not contain them."""

    operation: str | None = None
    ranks: int | None = None


NO_HINTS = Hints()


@dataclass(frozen=True)
class Row:
    """One case as the tool printed it; seconds of one call."""

    case: Case
    seconds: float  # the tool's mean; 0: shorter than the tool can print
    calls: int  # number of calls in the mean; 0: unknown
    rank_min_seconds: float | None = None
    checked: bool = False
    wrong: str | None = None  # the tool's words if its check failed


@dataclass(frozen=True)
class Section:
    """What one start of the tool printed."""

    library: str
    rows: tuple[Row, ...]
    ranks: tuple[dict[str, Any], ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    started: str = ""
    notes: tuple[str, ...] = ()  # what had to be assumed or converted
    left_out: tuple[str, ...] = ()  # parts of the log that are missing or were not read


def build_run(
    name: str, tool: str, sections: Sequence[Section], left_out: Sequence[str] = ()
) -> Run:
    """Build the run of a log. Sections with the same case are different launches; sections with
    different cases may be one launch.

    left_out: parts of the log that are in no section.
    """
    numbers = _number_launches(sections)
    firsts = dict(reversed([*zip(numbers, sections, strict=True)]))
    results = [
        result
        for number, section in zip(numbers, sections, strict=True)
        for result in _results(section, number)
    ]
    first = results[0].case
    notes = dict.fromkeys(note for section in sections for note in section.notes)
    left_out = [*left_out, *(text for section in sections for text in section.left_out)]
    return Run(
        id=name,
        command=tool,
        command_line=(),
        plan=Plan(
            issue=first.issue,
            start=first.start,
            depth=first.depth,
            check=any(result.checks for result in results),
        ),
        started=min(section.started for section in sections),
        state="complete",
        operations=tuple(dict.fromkeys(result.case.operation for result in results)),
        backends=(first.backend,),
        launches=tuple(_launch(number, firsts[number]) for number in sorted(firsts)),
        results=tuple(results),
        findings=(
            *_find_wrong(results),
            *(Finding("note", LEFT_OUT, text) for text in dict.fromkeys(left_out)),
            *(Finding("note", "another-tool", note) for note in notes),
        ),
    )


def _number_launches(sections: Sequence[Section]) -> list[int]:
    """Return each section's launch: how many earlier sections measured one of its cases."""
    seen: dict[Case, int] = {}
    numbers = []
    for section in sections:
        cases = {row.case for row in section.rows}
        numbers.append(max(seen.get(case, 0) for case in cases))
        seen.update(dict.fromkeys(cases, numbers[-1] + 1))
    return numbers


def _launch(number: int, section: Section) -> Launch:
    case = section.rows[0].case
    return Launch(
        index=number,
        backend=case.backend,
        provider=case.provider,
        library=section.library,
        launcher="not told",
        world_size=case.world_size,
        facts=section.facts,
        ranks=section.ranks,
        started=section.started,
    )


def _results(section: Section, launch: int) -> Iterator[Result]:
    """Build one result per case; a tool that repeats all sizes gives one result per size."""
    by_case: dict[Case, list[Row]] = {}
    for row in section.rows:
        by_case.setdefault(row.case, []).append(row)
    for case, rows in by_case.items():
        seconds = statistics.fmean(row.seconds for row in rows)
        operation = OPERATIONS.get(case.operation)
        complaint = next((row.wrong for row in rows if row.wrong is not None), None)
        yield Result(
            case=case,
            launch=launch,
            bus_factor=operation.bus_factor(case.world_size) if operation else 1.0,
            least_nbytes=operation.least_nbytes(case) if operation else float(case.nbytes),
            requested_nbytes=case.nbytes,
            reason=None if seconds else INSTANT,
            summary=_summary(rows, seconds) if seconds else None,
            checks=sum(row.checked for row in rows),
            wrong=() if complaint is None else (Wrong(-1, -1, -1, "right elements", complaint),),
        )


def _summary(rows: Sequence[Row], seconds: float) -> Summary:
    """Build a summary with the tool's mean as the time; figures that it lacks are None."""
    fastest = [row.rank_min_seconds for row in rows if row.rank_min_seconds is not None]
    return Summary(
        repetitions=sum(row.calls for row in rows),
        median_seconds=seconds,
        interval=None,
        mean_seconds=seconds,
        min_seconds=None,
        max_seconds=None,
        percentiles_seconds={},
        rank_mean_seconds=None,  # a median
        rank_min_seconds=statistics.fmean(fastest) if fastest else None,
        skew_seconds=None,
        last_in_seconds=None,
        global_seconds=None,
        outliers=None,
        far_outliers=None,
        lag1=None,
        overall_mean_seconds=seconds if rows[0].case.rank_reduction == "mean" else None,
    )


def _find_wrong(results: Sequence[Result]) -> Iterator[Finding]:
    for result in results:
        for wrong in result.wrong:
            case = result.case
            yield Finding(
                "error",
                "wrong-result",
                f"{case.operation} on {case.backend}, {case.nbytes} bytes of {case.dtype}, "
                f"{'in' if case.in_place else 'out of'} place: the log reports {wrong.got}",
                "do not train on this set-up; run the tool again to see whether it stays",
                {"operation": case.operation, "nbytes": case.nbytes},
            )
