"""Documents: the output of a command in sections, for any writer."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpbench.present.columns import Column, RowT, format_number
from ddpbench.records.schema import Finding, Run
from ddpbench.records.table import Table, TableColumn

if TYPE_CHECKING:
    import pandas as pd

    from ddpbench.analysis.lines import Line
    from ddpbench.present.charts.kinds import Drawing

NO_VALUES = Table("", (), ())
Kind = tuple[str, ...]  # kind of a case: columns.title_parts


@dataclass(frozen=True)
class ReportRun:
    """A run of a page. A log of another tool has no folder."""

    label: str  # its id; unique on a page
    run: Run
    folder: Path | None = None

    @cached_property
    def lines(self) -> list[Line]:
        """Return the lines of the run's collectives."""
        from ddpbench.analysis.lines import lines  # loads numpy

        return lines(self.run)

    @cached_property
    def samples(self) -> pd.DataFrame | None:
        """Return the raw samples (store.SAMPLE_COLUMNS); None if none are stored."""
        from ddpbench.records import store  # loads msgspec

        return None if self.folder is None else store.read_samples(self.folder)


@dataclass(frozen=True)
class Chart:
    """A table, and a drawing of its values."""

    name: str  # unique in a document; the name of its picture
    title: str
    caption: str  # one or two sentences: the statistic, the unit, how to read it
    table: Table
    drawing: Drawing | None = None  # None: the table alone
    operation: str = ""  # readers can hide the charts of an operation; "": always shown
    grouped: bool = False  # whether a terminal omits repeated cells of the first column
    most: int | None = None  # rows that a terminal shows; None: all
    spread: bool = False  # whether these are spread evenly, up to the last row

    @cached_property
    def spec(self) -> dict[str, Any] | None:
        """Return the Vega-Lite of the chart; None if it has no drawing."""
        if self.drawing is None:
            return None
        from ddpbench.present.charts.draw import draw  # loads altair

        return draw(self.drawing)

    @property
    def text_table(self) -> Table:
        """Return the table with the rows and cells that a terminal shows."""
        table, rows, count = self.table, list(self.table.rows), len(self.table.rows)
        if self.most is not None and self.most < count:
            chosen = [(i + 1) * count // self.most - 1 for i in range(self.most)]
            rows = [rows[i] for i in chosen] if self.spread else rows[: self.most]
            table = replace(table, title=f"{table.title} ({self.most} of {count})")
        if self.grouped:
            above = [None, *(row[0] for row in rows[:-1])]
            cells = zip(rows, above, strict=False)  # without rows, `above` has one item
            rows = [("" if row[0] == before else row[0], *row[1:]) for row, before in cells]
        return replace(table, rows=tuple(rows))


def draw_chart(name: str, title: str, caption: str, drawing: Drawing) -> Chart:
    """Return a chart whose table has the values of its drawing."""
    return Chart(name, title, caption, tabulate_rows(title, drawing.shown), drawing)


@dataclass(frozen=True)
class Section:
    """A part of a document. A page shows the charts of a row side by side if there is room."""

    name: str  # the anchor: "collectives"
    title: str
    intro: str = ""  # the result; a terminal shows it last, a page first
    lines: tuple[str, ...] = ()  # plain facts, one paragraph each
    findings: tuple[Finding, ...] = ()
    rows: tuple[tuple[Chart, ...], ...] = ()
    legend: tuple[str, ...] = ()  # of all its tables

    @property
    def charts(self) -> list[Chart]:
        """Return the charts in the order of the page."""
        return [chart for row in self.rows for chart in row]


@dataclass(frozen=True)
class Document:
    """The output of a command. CSV and JSON show the values, other writers the sections."""

    title: str
    sections: tuple[Section, ...]
    values: Table = NO_VALUES  # CSV: a row per case, unrounded; None: unknown
    data: Any = None  # JSON
    runs: tuple[Run, ...] = ()  # whose command lines a page shows


def make_table(
    title: str,
    headings: Iterable[str],
    rows: Iterable[Sequence[Any]],
    left: Container[str] = (),
    legend: Iterable[str] = (),
) -> Table:
    """Return a table; columns whose heading is in `left` are aligned left."""
    columns = tuple(TableColumn(name, "left" if name in left else "right") for name in headings)
    return Table(title, columns, tuple(map(tuple, rows)), tuple(legend))


def tabulate_rows(
    title: str, rows: Sequence[Mapping[str, Any]], left: tuple[str, ...] = ()
) -> Table:
    """Return a table of these rows without empty columns, and without names that begin with "_".

    Words are aligned left, and the columns in `left`.
    """
    names = dict.fromkeys(name for row in rows for name in row if not name.startswith("_"))
    cells = {name: [row.get(name) for row in rows] for name in names}
    known = {name: cells[name] for name in names if set(cells[name]) - {None, ""}}
    words = [n for n, texts in known.items() if any(str(t)[:1].isalpha() for t in texts if t)]
    return make_table(title, known, zip(*known.values(), strict=True), (*words, *left))


def show_rows(
    title: str,
    columns: Sequence[Column[RowT]],
    rows: Iterable[RowT],
    legend: Iterable[str] = (),
) -> Table:
    """Return a table with these columns and a row per item."""
    cells = [[column.show(row) for column in columns] for row in rows]
    left = {column.heading for column in columns if column.left}
    return make_table(title, [column.heading for column in columns], cells, left, legend)


def describe_columns(columns: Iterable[Column[Any]]) -> Table:
    """Return the table of `--columns help`: name, unit, whether it is a default, and meaning."""
    headings = ("column", "unit", "default", "meaning")
    cells = [(c.name, c.unit, "yes" if c.default else "", c.meaning) for c in columns]
    return make_table("", headings, cells, headings)


def format_cell(value: Any, column: TableColumn) -> str:
    """Format a value of a table; None is "-"."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and column.decimals is not None:
        return f"{value:.{column.decimals}f}"
    return format_number(value)


def build_for_each(
    runs: Sequence[ReportRun], build: Callable[[ReportRun], Iterable[Section]]
) -> Iterator[Section]:
    """Yield the sections of each run. Those of several runs have the run in their titles."""
    if len(runs) == 1:
        yield from build(runs[0])
        return
    for number, run in enumerate(runs, 1):
        for section in build(run):
            rows = tuple(
                tuple(_label_chart(chart, run, number) for chart in row) for row in section.rows
            )
            title = f"{section.title}: {run.label}"
            yield replace(section, name=f"{section.name}-{number}", title=title, rows=rows)


def _label_chart(chart: Chart, run: ReportRun, number: int) -> Chart:
    return replace(chart, name=f"{chart.name}-{number}", title=f"{chart.title}: {run.label}")


def make_titles(kinds: Iterable[Kind]) -> dict[Kind, str]:
    """Return a title per kind: the operation, and the parts that differ within an operation."""
    known: dict[str, list[Kind]] = {}
    for kind in dict.fromkeys(kinds):
        known.setdefault(kind[0], []).append(kind)
    differing = set()
    for same in known.values():
        parts = enumerate(zip(*same, strict=True))
        differing |= {i for i, texts in parts if len(set(texts)) > 1}
    return {
        kind: " ".join([kind[0], *(text for i, text in enumerate(kind) if i in differing and text)])
        for same in known.values()
        for kind in same
    }


def plain_name(text: str) -> str:
    """Return the text as a name of a chart: ASCII letters, digits, "_" and "-"."""
    return re.sub(r"\W+", "-", text, flags=re.ASCII).strip("-")
