"""The first lines of a page: what was measured, where and when, the result, and the findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from ddpbench.analysis import flags, step_lines
from ddpbench.analysis.lines import Line, lines
from ddpbench.catalog.sizes import readable
from ddpbench.records.schema import SEVERITIES, Finding, Run
from ddpbench.records.table import Table, TableColumn
from ddpbench.records.wording import counted
from ddpbench.render import doctor, header
from ddpbench.report.chart import Chart, ReportRun, Section, side_by_side

NAME_WIDTH = 10  # of the facts in the lines of `header`


def section(runs: Sequence[ReportRun]) -> Section | None:
    """Return the summary of every run, its findings, and how it was measured; None without runs."""
    if not runs:
        return None
    several = len(runs) > 1
    sentences = [" ".join(sentences_of(run.run)) for run in runs]
    if several:
        sentences = [f"{run.label}: {text}" for run, text in zip(runs, sentences, strict=True)]
    return Section(
        "overview",
        "Summary",
        "" if several else sentences[0],
        (
            *(sentences if several else ()),
            *(line for run in runs for line in header.partial(run.run)),
        ),
        tuple(_findings(runs)),
        side_by_side(runs, _facts),
    )


def sentences_of(run: Run) -> Iterator[str]:
    """State the result of a run, the best known first."""
    yield from _fastest(run)
    yield from _steps(run)
    if run.examinations:
        yield f"{doctor.verdict(run)}."
    counts = [counted(n, s) for s in SEVERITIES if (n := _count(run.findings, s))]
    if not run.examinations:
        yield f"{', '.join(counts) or 'No findings'}."


def _count(findings: Sequence[Finding], severity: str) -> int:
    return sum(finding.severity == severity for finding in findings)


def _fastest(run: Run) -> Iterator[str]:
    """State for every operation which backend is the fastest, and at which sizes."""
    by_operation = {
        name: list(group) for name, group in groupby(lines(run), key=lambda line: line.case.called)
    }
    for name, measured in by_operation.items():
        sizes = [list(group) for _, group in groupby(measured, key=lambda line: line.case.nbytes)]
        yield _fastest_of(name, sizes)


def _fastest_of(name: str, sizes: Sequence[Sequence[Line]]) -> str:
    fastest = [best.case.backend if (best := flags.find_fastest(s)) else None for s in sizes]
    shown = [
        f"{backend} from {readable(sizes[0][0].case.nbytes)}"
        for backend in dict.fromkeys(filter(None, fastest))
    ]
    return f"{name}: {', '.join(shown)}."


def _steps(run: Run) -> Iterator[str]:
    for line in step_lines.lines(run):
        if line.seconds is not None:
            milliseconds = f"{line.seconds * 1e3:.1f} ms"
            yield f"A step of {line.case.workload} takes {milliseconds} on {line.case.backend}."


def _findings(runs: Sequence[ReportRun]) -> list[Finding]:
    """Return the findings of all runs, the worst first; of several runs each names its run."""
    findings = [
        replace(f, sentence=f"{run.label}: {f.sentence}") if len(runs) > 1 else f
        for run in runs
        for f in run.run.findings
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _facts(run: ReportRun) -> list[Chart]:
    facts = [(line[:NAME_WIDTH].strip(), line[NAME_WIDTH:]) for line in header.header(run.run)[1:]]
    columns = (TableColumn("", "left"), TableColumn("", "left"))
    table = Table("How it was measured", columns, tuple(facts))
    return [Chart("facts", table.title, "", None, table)] if facts else []
