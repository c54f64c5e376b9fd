"""The time of a step: its timeline by rank, its budget, and its buckets or layer groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpbench.analysis import step_lines
from ddpbench.analysis.step_lines import StepLine
from ddpbench.present.columns import choose_columns, explain
from ddpbench.present.document import Chart, ReportRun, Section, plain_name, show_rows, side_by_side
from ddpbench.present.steps import budget as step_budget
from ddpbench.present.steps import parts as step_parts
from ddpbench.present.steps import tables as step_tables
from ddpbench.present.steps.columns import STEP_COLUMNS
from ddpbench.present.steps.timeline import timeline
from ddpbench.records.schema import StepCase

PARTS = {
    "budget": step_parts.budget,
    "buckets": step_parts.buckets,
    "layers": step_parts.layer_groups,
}


def section(runs: Sequence[ReportRun]) -> Section | None:
    rows = side_by_side(runs, _charts)
    if not rows:
        return None
    notes = dict.fromkeys(note for run in runs for group in _groups(run) for note in _notes(group))
    return Section("step", "DDP step", lines=tuple(notes), rows=rows)


def _groups(run: ReportRun) -> list[list[StepLine]]:
    """Return the measured steps by workload; those of a watched job have a section of their own."""
    groups: dict[StepCase, list[StepLine]] = {}
    for line in step_lines.lines(run.run):
        if line.summary is not None and not any(result.watched for result in line.results):
            groups.setdefault(step_lines.same_but_backend(line.case), []).append(line)
    return list(groups.values())


def _charts(run: ReportRun) -> Iterator[Chart]:
    for number, group in enumerate(_groups(run)):
        workload = group[0].case.workload
        name = f"step-{plain_name(workload)}" + (f"-{number + 1}" if number else "")
        yield _steps(group, name)
        for line in group:
            case, twins = line.case, [x for x in group if x.case.backend == line.case.backend]
            by = "" if len(twins) == 1 else f" by {case.provider}"  # of a backend with two
            title = f"A step of {workload} on {case.backend}{by}"
            if chart := timeline(run, line, f"{name}-{plain_name(case.backend + by)}", title):
                yield chart
        for part, draw in PARTS.items():
            if chart := draw(group, f"{name}-{part}"):
                yield chart


def _steps(group: Sequence[StepLine], name: str) -> Chart:
    """Return the terminal's table of a workload's steps."""
    columns = choose_columns(None, STEP_COLUMNS, group)
    table = show_rows("steps", columns, group, explain(group, columns, step_lines.FLAGS))
    return Chart(name, group[0].case.workload, step_tables.title(group[0].case), None, table)


def _notes(group: Sequence[StepLine]) -> Iterator[str]:
    """Yield what could be gained, and what was not measured."""
    known = [line for line in group if line.summary and line.summary.budget]
    notes = [note for line in group for result in line.results for note in result.notes]
    for note in (*step_budget.gain(known), *notes):
        yield f"{group[0].case.workload}: {note}."
