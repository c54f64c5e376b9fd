"""The first lines of a page: what was measured, where and when, the result, and the findings."""

from __future__ import annotations

from collections.abc import Sequence

from ddpbench.records.schema import SEVERITIES, Finding
from ddpbench.records.table import Table, TableColumn
from ddpbench.render import header
from ddpbench.report.chart import Chart, ReportRun, Section, join_findings, side_by_side
from ddpbench.report.summary import summarise

NAME_WIDTH = 10  # of the facts in the lines of `header`


def section(runs: Sequence[ReportRun]) -> Section | None:
    """Return the summary of each run, its findings, and how it was measured; None without runs."""
    if not runs:
        return None
    several = len(runs) > 1
    summaries = [f"{r.label}: {summarise(r)}" if several else summarise(r) for r in runs]
    return Section(
        "overview",
        "Summary",
        "" if several else summaries[0],
        tuple(summaries) if several else (),
        tuple(_findings(runs)),
        side_by_side(runs, _facts),
    )


def _missing(run: ReportRun) -> list[Finding]:
    """Return findings on what is missing: a part of the run, or samples that cannot be read."""
    lines = header.partial(run.run)
    if run.damage:
        lines = [*lines, f"DAMAGED: {run.damage}. Repetitions and skew are missing."]
    return [Finding("warning", "missing", line) for line in lines]


def _findings(runs: Sequence[ReportRun]) -> list[Finding]:
    """Return the findings of all runs, the worst first; of several runs each names its run."""
    findings = join_findings(runs, lambda run: (*_missing(run), *run.run.findings))
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _facts(run: ReportRun) -> list[Chart]:
    """Return the lines that a terminal shows above the tables."""
    facts = [(line[:NAME_WIDTH].strip(), line[NAME_WIDTH:]) for line in header.header(run.run)[1:]]
    columns = (TableColumn("", "left"), TableColumn("", "left"))
    table = Table("How it was measured", columns, tuple(facts))
    return [Chart("facts", table.title, "", None, table)] if facts else []
