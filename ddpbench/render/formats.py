"""From a run to text, for people and machines: one entry of FORMATS adds an output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ddpbench.records import codec
from ddpbench.records.schema import Run
from ddpbench.render import rows

if TYPE_CHECKING:
    from ddpbench.analysis.lines import Line

Columns = tuple[str, ...] | None


def table(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """Header, one table an operation, legends: what rank 0 prints."""
    return _tables(run, columns, quiet, "simple", "")


def markdown(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """The same for a pull request or a README."""
    return _tables(run, columns, quiet, "github", "### ")


def csv(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """One row a case, every column by default, numbers unrounded; empty where there is none."""
    import pandas as pd

    from ddpbench.analysis import lines as analysis

    names = list(columns or rows.COLUMNS)
    shown = [line for line in analysis.lines(run) if line.seconds is not None]
    data = [[rows.COLUMNS[name].value(line) for name in names] for line in shown]
    return str(pd.DataFrame(data, columns=names).to_csv(index=False))


def json(run: Run, columns: Columns = None, quiet: bool = False) -> str:
    """The whole run as stored, or only the chosen columns of its rows."""
    from json import dumps

    from ddpbench.analysis import lines as analysis

    if columns is None:
        return codec.encode(run).decode() + "\n"
    shown = [
        {name: rows.COLUMNS[name].value(line) for name in columns}
        for line in analysis.lines(run)
        if line.seconds is not None
    ]
    return dumps(shown, indent=1, ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Run, Columns, bool], str]] = {
    "table": table,
    "csv": csv,
    "json": json,
    "markdown": markdown,
}


def _tables(run: Run, columns: Columns, quiet: bool, style: str, mark: str) -> str:
    from tabulate import tabulate

    from ddpbench.analysis import lines as analysis
    from ddpbench.render import header

    everything = analysis.lines(run)
    shown = [line for line in everything if line.seconds is not None]
    names = rows.chosen(columns)
    gap = "\n\n" if mark else "\n"
    blocks = [] if quiet else [gap.join(header.header(run))]
    notes = header.partial(run) + ([] if quiet else header.warnings(run))
    if notes:
        blocks.append(gap.join(notes))
    starred = False
    for title, group in _grouped(shown).items():
        cells = _cells(group, names)
        starred |= any(cell.endswith(" *") for row in cells for cell in row)
        heads = [rows.COLUMNS[name].head for name in names]
        align = ["left" if name in ("backend", "flags", "check") else "right" for name in names]
        body = tabulate(cells, heads, tablefmt=style, colalign=align, disable_numparse=True)
        blocks.append(f"{mark}{title}\n{gap[1:]}{body}")
    if not quiet:
        if left_out := header.skipped(everything):
            blocks.append(gap.join(left_out))
        blocks.append(gap.join(header.legend(shown, names, starred)))
    return "\n\n".join(blocks) + "\n"


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
            f"{case.world_size} rank{'s' if case.world_size > 1 else ''}",
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
