"""Documents: what a command shows, in sections, whichever writer shows it."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpbench.present.columns import Column, RowT, digits
from ddpbench.records.schema import Finding, Run
from ddpbench.records.table import Table, TableColumn

if TYPE_CHECKING:
    import pandas as pd

    from ddpbench.analysis.lines import Line
    from ddpbench.present.charts.kinds import Drawing
    from ddpbench.present.repetitions import Repetitions

NO_VALUES = Table("", (), ())
Kind = tuple[str, ...]  # what a case is: columns.title_parts


@dataclass(frozen=True)
class ReportRun:
    """A run of a page, its name there, and its folder. A log of another tool has no folder."""

    label: str  # its id; unique on a page
    run: Run
    folder: Path | None = None

    @cached_property
    def lines(self) -> list[Line]:
        """Return the lines of the run's collectives, which several sections read."""
        from ddpbench.analysis.lines import lines  # loads numpy

        return lines(self.run)

    @cached_property
    def samples(self) -> pd.DataFrame | None:
        """Return the raw samples (store.SAMPLE_COLUMNS); None if none are stored."""
        from ddpbench.records import store  # loads msgspec

        try:
            return None if self.folder is None else store.read_samples(self.folder)
        except store.InvalidRun:
            return None

    @cached_property
    def repetitions(self) -> tuple[Repetitions, ...]:
        """Return the raw samples of each case and launch, reduced; none if none are stored.

        This needs the memory of one case, `samples` that of the run.
        """
        return self._reduced[0]

    @property
    def damage(self) -> str | None:
        """Return the reason why stored samples cannot be read; None if they can, or if none are."""
        return self._reduced[1]

    @cached_property
    def _reduced(self) -> tuple[tuple[Repetitions, ...], str | None]:
        from ddpbench.present.repetitions import reduce_samples  # loads numpy
        from ddpbench.records import store

        try:
            return tuple(reduce_samples(self.run, self.folder)) if self.folder else (), None
        except store.InvalidRun as error:
            return (), str(error)


@dataclass(frozen=True)
class Choice:
    """One of the things that a chart can show, one at a time."""

    label: str  # "all_reduce 1 MiB gloo"
    drawing: Drawing
    table: Table

    @property
    def data(self) -> dict[str, dict[str, tuple[Any, ...]]]:
        """Return the columns of each dataset of the chart."""
        from ddpbench.present.charts.kinds import list_columns

        return {name: list_columns(frame) for name, frame in self.drawing.datasets.items()}


@dataclass(frozen=True)
class Chart:
    """A chart and the same values as a table."""

    name: str  # unique on a page; the name of its picture
    title: str
    caption: str  # the statistic, the unit, how to read it: one or two sentences
    drawing: Drawing | None  # None: the table is all there is
    table: Table
    operation: str = ""  # readers can hide the charts of an operation; "": always shown
    choices: tuple[Choice, ...] = ()  # the drawing is that of the first
    # First rows that Markdown shows, folding the others; None: all of a short table.
    remarkable: int | None = None

    @cached_property
    def spec(self) -> dict[str, Any] | None:
        """Return the Vega-Lite of the chart."""
        if self.drawing is None:
            return None
        from ddpbench.present.charts.draw import draw  # loads altair

        return draw(self.drawing)


Rows = tuple[tuple[Chart, ...], ...]


def draw_chart(
    name: str, title: str, caption: str, drawing: Drawing, legend: Iterable[str] = ()
) -> Chart:
    """Return a chart whose table has what its data shows."""
    return Chart(name, title, caption, drawing, tabulate_data(title, drawing, legend))


def draw_choices(name: str, title: str, caption: str, choices: Sequence[Choice]) -> Chart:
    """Return a chart that shows one of several things; first the first."""
    first = choices[0].drawing, choices[0].table
    return Chart(name, title, caption, *first, choices=tuple(choices))


def tabulate_data(title: str, drawing: Drawing, legend: Iterable[str] = ()) -> Table:
    """Return the table of what the data of a chart shows."""
    from ddpbench.present.charts.kinds import list_columns

    columns = list_columns(drawing.shown)
    left = [n for n, cells in columns.items() if any(str(cell)[:1].isalpha() for cell in cells)]
    return make_table(title, columns, zip(*columns.values(), strict=True), left, legend)


@dataclass(frozen=True)
class Section:
    """A part of a document. On a page, charts in one row stand side by side if there is room."""

    name: str  # the anchor: "collectives"
    title: str
    intro: str = ""  # the result; a terminal shows it last, a page first
    lines: tuple[str, ...] = ()  # plain facts, a paragraph each
    findings: tuple[Finding, ...] = ()
    rows: Rows = ()

    @property
    def charts(self) -> list[Chart]:
        """Return the charts in the order of the page."""
        return [chart for row in self.rows for chart in row]


@dataclass(frozen=True)
class Document:
    """What a command shows. Text and Markdown have the sections, CSV and JSON the values."""

    title: str
    sections: tuple[Section, ...]
    values: Table = NO_VALUES  # CSV: a row per case, unrounded; None is unknown
    data: Any = None  # JSON


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


def tabulate(
    title: str,
    columns: Sequence[Column[Any]],
    rows: Iterable[Sequence[Any]],
    legend: Iterable[str] = (),
) -> Table:
    """Return a table with the headings and the alignment of a terminal's columns."""
    left = {column.heading for column in columns if column.left}
    return make_table(title, [column.heading for column in columns], rows, left, legend)


def build_table(title: str, columns: Sequence[Column[RowT]], rows: Sequence[RowT]) -> Table:
    """Return a table with a row per item, without the columns in which no row has a text."""
    kept = [column for column in columns if any(map(column.show, rows))]
    return show_rows(title, kept, rows)


def show_rows(
    title: str,
    columns: Sequence[Column[RowT]],
    rows: Iterable[RowT],
    legend: Iterable[str] = (),
) -> Table:
    """Return a table with these columns and a row per item."""
    cells = [[column.show(row) for column in columns] for row in rows]
    return tabulate(title, columns, cells, legend)


def describe_columns(columns: Iterable[Column[Any]]) -> Table:
    """Return a table of columns for people: name, unit, whether a table has it, and meaning."""
    headings = ("column", "unit", "default", "meaning")
    cells = [(c.name, c.unit, "yes" if c.default else "", c.meaning) for c in columns]
    return make_table("", headings, cells, headings)


def as_row(table: Table) -> tuple[Chart]:
    """Return the row of a section that has this table alone, without a picture."""
    return (Chart("", table.title, "", None, table, remarkable=len(table.rows)),)


def format_cell(value: Any, column: TableColumn) -> str:
    """Format a value of a table; "-" if it is unknown."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and column.decimals is not None:
        return f"{value:.{column.decimals}f}"
    return digits(value)


MakeSection = Callable[[Sequence[ReportRun]], "Section | None"]  # None: these runs have none


def side_by_side(runs: Sequence[ReportRun], make: Callable[[ReportRun], Iterable[Chart]]) -> Rows:
    """Return a row for the first charts of all runs, one for the second, …

    make: returns the charts of one run. Names and titles tell several runs apart.
    """
    columns = [list(make(run)) for run in runs]
    if len(runs) > 1:
        columns = [
            [replace(c, name=f"{c.name}-{n}", title=f"{c.title}: {run.label}") for c in charts]
            for n, (charts, run) in enumerate(zip(columns, runs, strict=True), 1)
        ]
    return tuple(tuple(filter(None, row)) for row in zip_longest(*columns))


def arrange(runs: Sequence[ReportRun], make: Callable[[ReportRun], Iterable[Chart]]) -> Rows:
    """Return the charts of one run in pairs; those of several runs side by side."""
    if len(runs) > 1:
        return side_by_side(runs, make)
    charts = [chart for run in runs for chart in make(run)]
    return tuple(tuple(charts[n : n + 2]) for n in range(0, len(charts), 2))


def describe(of: Kind) -> str:
    """Return all parts but the operation: "float32, sum, in place, 2 ranks, cpu"."""
    return ", ".join(filter(None, of[1:]))


def titles(kinds: Iterable[Kind]) -> dict[Kind, str]:
    """Return a title for each: the operation, and the parts of which an operation has several."""
    distinct = list(dict.fromkeys(kinds))
    differs = []
    for part in zip(*distinct, strict=True):
        values = {(of[0], text) for of, text in zip(distinct, part, strict=True)}
        differs.append(len(values) > len({operation for operation, _ in values}))
    return {
        of: " ".join([of[0], *(text for text in compress(of, differs) if text)]) for of in distinct
    }


def plain_name(text: str) -> str:
    """Return the text as a name of a chart, or as a part of it."""
    return re.sub(r"\W+", "-", text, flags=re.ASCII).strip("-")
