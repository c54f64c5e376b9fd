"""What a page is made of: sections, charts, and the table of each chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        from ddpbench.report.repetitions import reduce_samples  # loads numpy

        try:
            return () if self.folder is None else tuple(reduce_samples(self.run, self.folder))
        except store.InvalidRun:
            return ()


@dataclass(frozen=True)
class Choice:
    """One of the things that a chart can show, one at a time."""

    label: str  # "all_reduce 1 MiB gloo"
    data: dict[str, dict[str, tuple[Any, ...]]]  # name of a dataset of the chart → its columns
    table: Table


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


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading. Charts in one row stand side by side if there is room."""

    name: str  # the anchor: "collectives"
    title: str
    intro: str = ""
    lines: tuple[str, ...] = ()  # plain facts, a paragraph each
    findings: tuple[Finding, ...] = ()
    rows: tuple[tuple[Chart, ...], ...] = ()


MakeSection = Callable[[Sequence[ReportRun]], "Section | None"]  # None: these runs have none


def side_by_side(
    runs: Sequence[ReportRun], make: Callable[[ReportRun], Sequence[Chart]]
) -> tuple[tuple[Chart, ...], ...]:
    """Return a row for the first charts of all runs, one for the second, …

    make: returns the charts of one run. Names and titles tell several runs apart.
    """
    columns = [make(run) for run in runs]
    if len(runs) > 1:
        columns = [
            [replace(c, name=f"{c.name}-{n}", title=f"{c.title}: {run.label}") for c in charts]
            for n, (run, charts) in enumerate(zip(runs, columns, strict=True), 1)
        ]
    return tuple(tuple(filter(None, row)) for row in zip_longest(*columns))
