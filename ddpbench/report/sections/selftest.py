"""The self-test: which planted faults were found and named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddpbench.analysis.selftest import COMMAND
from ddpbench.records.table import Table, TableColumn
from ddpbench.report.chart import Chart, ReportRun, Section, side_by_side
from ddpbench.report.examination_results import find_examinations

COLUMNS = (
    TableColumn("", "left"),
    *(TableColumn(heading, "left") for heading in ("fault", "planted", "found", "named")),
    TableColumn("seconds", decimals=1),
    TableColumn("message", "left"),
)
SYMBOLS = {True: "✓", False: "✗", None: "–"}
ANSWERS = {True: "yes", False: "no", None: None}


def section(runs: Sequence[ReportRun]) -> Section | None:
    """Return the table of all trials; None if no run is a self-test."""
    rows = side_by_side(runs, _tables)
    return Section("selftest", "Self-test", rows=rows) if rows else None


def _tables(run: ReportRun) -> list[Chart]:
    caption = "✓ is as expected, ✗ is not, – could not be tried here. A healthy run has no fault."
    table = Table("planted faults", COLUMNS, tuple(_rows(run)))
    return [Chart("selftest", "Planted faults", caption, None, table)] if table.rows else []


def _rows(run: ReportRun) -> Iterator[tuple[Any, ...]]:
    for one in find_examinations([run], COMMAND.__eq__):
        for trial in one.examination.figures.get("trials", ()):
            yield _row(trial)


def _row(trial: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        SYMBOLS[trial["right"]],
        trial["fault"],
        trial["planted"],
        ANSWERS[trial["found"]],
        ANSWERS[trial["named"]],
        trial["seconds"],
        trial["said"].partition(". Next: ")[0],
    )
