"""Build the document of a run for a terminal, in a format of WRITERS, or for a page with charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ddpbench.present import examinations
from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.present.columns import Column, choose_columns
from ddpbench.present.document import (
    NO_VALUES,
    Chart,
    Document,
    ReportRun,
    Section,
    build_for_each,
    make_table,
)
from ddpbench.present.examinations import FINDING_COLUMNS
from ddpbench.present.steps.columns import STEP_COLUMNS
from ddpbench.present.writers import WRITERS
from ddpbench.records.schema import Finding, Run
from ddpbench.records.table import Table

if TYPE_CHECKING:
    from ddpbench.analysis.lines import Line
    from ddpbench.analysis.step_lines import StepLine

Columns = tuple[str, ...] | None


def show(form: str, run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """Return a run as text in a format of WRITERS.

    columns: None: the default ones; all of them in CSV, and the run as stored in JSON.
    quiet: leave out header, findings and legends.
    """
    if form == "csv":
        document = Document("", (), list_values(run, columns))
    elif form == "json" and columns is None:
        document = Document("", (), data=asdict(run))
    elif form == "json":
        values = list_values(run, columns)
        names = [column.heading for column in values.columns]
        rows = [dict(zip(names, row, strict=True)) for row in values.rows]
        document = Document("", (), data=rows)
    else:
        document = _build_document(run, columns, quiet)
    return WRITERS[form](document)


def list_values(run: Run, columns: Columns = None) -> Table:
    """Return a row per case or finding with the chosen columns, by default all: unrounded.

    A case that was not measured has a row only if there is the column `reason`.
    """
    from ddpbench.analysis import lines, step_lines
    from ddpbench.present import header

    known: Mapping[str, Column[Any]] = COLUMNS
    shown: Sequence[Line | StepLine | Finding]
    if header.of_doctor(run):
        known, shown = FINDING_COLUMNS, run.findings
    elif header.of_steps(run):
        known, shown = STEP_COLUMNS, step_lines.lines(run)
    else:
        shown = lines.lines(run)
    chosen = choose_columns(columns or ("all",), known)
    names = [column.name for column in chosen]
    if "reason" not in names:
        shown = [line for line in shown if isinstance(line, Finding) or line.results]
    return make_table("", names, [[column.value(line) for column in chosen] for line in shown])


def _build_document(run: Run, columns: Columns, quiet: bool) -> Document:
    """Return the document of a terminal: no charts, and the most important facts at the end."""
    from ddpbench.present import header, watch
    from ddpbench.present.collectives import sections as collectives
    from ddpbench.present.steps import sections as steps

    if header.of_doctor(run):
        return examinations.build_document(run, columns, quiet)
    reported = ReportRun(run.id, run)
    if header.of_watch(run) and columns is None:
        known = [*watch.build_sections(reported)]
    elif header.of_steps(run):
        known = [*steps.build_sections(reported, columns)]
    else:
        known = [*collectives.build_sections([reported], columns, fitted=not quiet)]
    sections = [_without_charts(each) for each in known]
    result = Section("result", "", lines=tuple(header.explain_partial(run)))
    if quiet:
        return Document("", (*(replace(each, lines=()) for each in sections), result))
    legend = Section("legend", "", legend=tuple(line for each in known for line in each.legend))
    result = replace(result, findings=run.findings)
    return Document(
        header.format_title(run), (header.build_setup(run, ""), *sections, legend, result)
    )


def _without_charts(section: Section) -> Section:
    """Return the section with its tables only, and without title and legend."""
    tables = [chart.text_table for chart in section.charts if chart.table != NO_VALUES]
    rows = tuple((Chart("", table.title, "", table),) for table in tables)
    return replace(section, title="", legend=(), rows=rows)


def build_page(runs: Sequence[ReportRun], verdicts: Iterable[Section] = ()) -> Document:
    """Return the document of these runs with all charts.

    verdicts: sections on a comparison of the runs, shown after their summary.
    """
    from ddpbench.present import header, summary, watch
    from ddpbench.present.collectives import sections as collectives
    from ddpbench.present.steps import sections as steps

    sections = [summary.build_section(runs), *verdicts]
    for build in (
        partial(build_for_each, build=partial(examinations.build_sections, drawn=True)),
        partial(collectives.build_sections, drawn=True),
        partial(build_for_each, build=watch.build_sections),
        partial(build_for_each, build=partial(steps.build_sections, drawn=True)),
        partial(build_for_each, build=header.build_environment),
    ):
        sections += build(runs)
    label = " and ".join(run.label for run in runs)
    return Document(label, tuple(sections), runs=tuple(run.run for run in runs))
