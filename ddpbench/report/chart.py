"""Parts of a page: its runs, its sections, their charts, and the table of each chart."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpbench.analysis.lines import Line, lines
from ddpbench.records import store
from ddpbench.records.schema import Finding, Run
from ddpbench.records.table import Table

if TYPE_CHECKING:
    import pandas as pd

    from ddpbench.report.repetitions import Repetitions


@dataclass(frozen=True)
class ReportRun:
    """A run of a page, its name there, and its folder. A log of another tool has no folder."""

    label: str  # its id; unique on a page
    run: Run
    folder: Path | None = None

    @cached_property
    def lines(self) -> list[Line]:
        """Return the lines of the run's collectives, which several sections read."""
        return lines(self.run)

    @cached_property
    def samples(self) -> pd.DataFrame | None:
        """Return the raw samples (records.samples.SAMPLE_COLUMNS); None if none are stored."""
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
        from ddpbench.report.repetitions import reduce_samples  # loads numpy

        try:
            return tuple(reduce_samples(self.run, self.folder)) if self.folder else (), None
        except store.InvalidRun as error:
            return (), str(error)


@dataclass(frozen=True)
class Choice:
    """One of the things that a chart can show, one at a time."""

    label: str  # "all_reduce 1 MiB gloo"
    data: dict[str, dict[str, tuple[Any, ...]]]  # name of a dataset of the chart → its columns
    table: Table

    @property
    def datasets(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of each dataset, as Vega-Lite reads them."""
        return {
            name: [
                dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]
            for name, columns in self.data.items()
        }


@dataclass(frozen=True)
class Chart:
    """A chart and the same values as a table."""

    name: str  # unique on a page; the name of its picture
    title: str
    caption: str  # the statistic, the unit, how to read it: one or two sentences
    spec: dict[str, Any] | None  # Vega-Lite, as altair returns it; None: the table is all there is
    table: Table
    operation: str = ""  # readers can hide the charts of an operation; "": always shown
    choices: tuple[Choice, ...] = ()  # the spec's datasets hold the first


Rows = tuple[tuple[Chart, ...], ...]


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading. Charts in one row stand side by side if there is room."""

    name: str  # the anchor: "collectives"
    title: str
    intro: str = ""
    lines: tuple[str, ...] = ()  # plain facts, a paragraph each
    findings: tuple[Finding, ...] = ()
    rows: Rows = ()

    @property
    def charts(self) -> list[Chart]:
        """Return the charts in the order of the page."""
        return [chart for row in self.rows for chart in row]


MakeSection = Callable[[Sequence[ReportRun]], "Section | None"]  # None: these runs have none


def join_findings(
    runs: Sequence[ReportRun], find: Callable[[ReportRun], Iterable[Finding]]
) -> list[Finding]:
    """Return what `find` returns for each run; of several runs each sentence names its run."""
    return [
        replace(found, sentence=f"{run.label}: {found.sentence}") if len(runs) > 1 else found
        for run in runs
        for found in find(run)
    ]


def side_by_side(runs: Sequence[ReportRun], make: Callable[[ReportRun], Iterable[Chart]]) -> Rows:
    """Return a row for the first charts of all runs, one for the second, …

    make: returns the charts of one run. Names and titles tell several runs apart.
    """
    columns = [list(make(run)) for run in runs]
    if len(runs) > 1:
        labelled = enumerate(zip(columns, runs, strict=True), 1)
        columns = [_name_run(charts, n, run.label) for n, (charts, run) in labelled]
    return tuple(tuple(filter(None, row)) for row in zip_longest(*columns))


def _name_run(charts: Iterable[Chart], number: int, label: str) -> list[Chart]:
    """Return the charts of one run of several, with its number in names, its label in titles."""
    return [replace(c, name=f"{c.name}-{number}", title=f"{c.title}: {label}") for c in charts]


def pair(charts: Sequence[Chart]) -> Rows:
    """Return rows of two charts."""
    return tuple(tuple(charts[n : n + 2]) for n in range(0, len(charts), 2))


def arrange(runs: Sequence[ReportRun], make: Callable[[ReportRun], Iterable[Chart]]) -> Rows:
    """Return the charts of one run in pairs; those of several runs side by side."""
    return side_by_side(runs, make) if len(runs) > 1 else pair([c for r in runs for c in make(r)])


def plain_name(text: str) -> str:
    """Return the text as a name of a chart, or as a part of it."""
    return re.sub(r"\W+", "-", text, flags=re.ASCII).strip("-")
