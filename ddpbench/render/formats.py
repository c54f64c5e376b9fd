"""From a run to text, for people and machines: one entry of FORMATS adds an output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddpbench.records.schema import Finding, Run
from ddpbench.records.visible import escaped
from ddpbench.render import collective_columns as rows
from ddpbench.render import prometheus, pyperf
from ddpbench.render.doctor import FINDING_COLUMNS
from ddpbench.render.step_columns import STEP_COLUMNS
from ddpbench.render.style import MARKDOWN, TERMINAL, Style

if TYPE_CHECKING:
    from ddpbench.analysis.lines import Line
    from ddpbench.analysis.step_lines import StepLine

Columns = tuple[str, ...] | None


def table(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """Header, tables, legends: what rank 0 prints."""
    return _text(run, columns, quiet, TERMINAL)


def markdown(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """The same for a pull request or a README."""
    return _text(run, columns, quiet, MARKDOWN)


def csv(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """One row a case, every column by default, numbers unrounded; empty where there is none."""
    import pandas as pd

    names, rows_of_values = _values(run, columns)
    return str(pd.DataFrame(rows_of_values, columns=names, dtype=object).to_csv(index=False))


def json(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """The whole run as stored, or only the chosen columns of its rows."""
    from json import dumps

    if columns is None:
        return dumps(asdict(run), indent=1, allow_nan=False) + "\n"
    names, rows_of_values = _values(run, columns)
    shown = [dict(zip(names, values, strict=True)) for values in rows_of_values]
    return dumps(shown, indent=1) + "\n"


FORMATS: dict[str, Callable[[Run, Columns, bool], str]] = {
    "table": escaped(table),
    "csv": escaped(csv),
    "json": json,
    "markdown": escaped(markdown),
    "pyperf": pyperf.suite,
    "prometheus": escaped(prometheus.exposition),
}
WITHOUT_COLUMNS = ("pyperf", "prometheus")


def _values(run: Run, columns: Columns) -> tuple[list[str], list[list[Any]]]:
    """The columns chosen, by default all, and a row of their values for each case.

    A case that was not measured has a row where the columns tell why.
    """
    from ddpbench.analysis import lines, step_lines
    from ddpbench.render import header

    known: Mapping[str, rows.Column[Any]] = rows.COLUMNS
    shown: Sequence[Line | StepLine | Finding]
    if header.of_doctor(run):
        known, shown = FINDING_COLUMNS, run.findings
    elif header.of_steps(run):
        known, shown = STEP_COLUMNS, step_lines.lines(run)
    else:
        shown = lines.lines(run)
    names = rows.chosen(columns, known, every=True)
    if "reason" not in names:
        shown = [line for line in shown if isinstance(line, Finding) or line.results]
    return names, [[known[name].value(line) for name in names] for line in shown]


def _text(run: Run, columns: Columns, quiet: bool, style: Style) -> str:
    from ddpbench.render import doctor, header, step_tables

    blocks = [] if quiet else [style.gap.join(header.header(run))]
    if header.of_doctor(run):
        return "\n\n".join([*blocks, *doctor.blocks(run, columns, quiet, style)]) + "\n"
    notes = header.partial(run) + ([] if quiet else header.warnings(run))
    if notes:
        blocks.append(style.gap.join(notes))
    make = step_tables.blocks if header.of_steps(run) else _collectives
    return "\n\n".join([*blocks, *make(run, columns, quiet, style)]) + "\n"


def _collectives(run: Run, columns: Columns, quiet: bool, style: Style) -> list[str]:
    """One table an operation, then what was skipped and what the columns mean."""
    from ddpbench.analysis import lines as analysis
    from ddpbench.render import header

    everything = analysis.lines(run)
    shown = [line for line in everything if line.seconds is not None]
    names = rows.chosen(columns)
    heads = [rows.COLUMNS[name].head for name in names]
    blocks, starred = [], False
    for title, group in _grouped(shown).items():
        cells = _cells(group, names)
        starred |= any(cell.endswith(" *") for row in cells for cell in row)
        blocks.append(style.block(title, style.table(cells, heads)))
    if not quiet:
        if left_out := header.skipped(everything):
            blocks.append(style.gap.join(left_out))
        blocks.append(style.gap.join(header.legend(shown, names, starred)))
    return blocks


def _grouped(shown: list[Line]) -> dict[str, list[Line]]:
    """The lines under the title of their table: what all rows of it have in common."""
    groups: dict[str, list[Line]] = {}
    for line in shown:
        case = line.case
        parts = [
            case.operation,
            "" if case.form == "tensor" else "(list of tensors)",
            case.dtype if case.nbytes else "",
            case.reduce_op or "",
            "" if case.root is None else f"root {case.root}",
            ("in place" if case.in_place else "out of place") if case.nbytes else "",
            "async" if case.async_op else "",
            rows.ranks(case),
            rows.at_once(case),
            case.device,
        ]
        groups.setdefault("  ".join(part for part in parts if part), []).append(line)
    return groups


def _cells(group: list[Line], names: list[str]) -> list[list[str]]:
    """The rows; where several backends stand under one size, the faster one is marked."""
    from ddpbench.analysis import lines as analysis

    by_size: dict[int, list[Line]] = {}
    for line in group:
        by_size.setdefault(line.case.nbytes, []).append(line)
    cells = []
    for same in by_size.values():
        best = analysis.faster(same)
        for line in same:
            row = {name: rows.text(line, name) for name in names}
            if "backend" in row and line is best:
                row["backend"] += " *"
            if line is not same[0]:
                row.update({name: "" for name in ("size", "count") if name in row})
            cells.append([row[name] for name in names])
    return cells
