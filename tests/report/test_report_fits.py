"""Fits on a page: charts and tables of runs whose truth is planted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import vl_convert
from frozen import Frozen
from stored_runs import a_case, a_result, a_run, a_summary

from ddpbench.records.schema import Result, Run
from ddpbench.render.formats import table
from ddpbench.report.chart import Chart, MakeSection, ReportRun, Section
from ddpbench.report.sections import fits

SIZES = tuple(64 * 8**k for k in range(7))


def hockney(nbytes: int) -> float:
    """Return 20 µs and 1 GB/s."""
    return 20e-6 + nbytes / 1e9


def swept(
    seconds: Callable[[int], float] = hockney, launches: int = 6, **other: Any
) -> list[Result]:
    """Return all sizes of an operation; each launch is 1 % slower than the one before."""
    return [
        a_result(
            a_case(nbytes=nbytes, count=nbytes // 4, **other),
            launch,
            a_summary(seconds(nbytes) * 1.01**launch),
            bus_factor=0.5,
        )
        for launch, nbytes in itertools.product(range(launches), SIZES)
    ]


def a_section(make: MakeSection, *runs: Run) -> Section:
    section = make([ReportRun(run.id, run) for run in runs])
    assert section is not None
    for chart in (chart for chart in section.charts if chart.spec):
        assert "<svg" in vl_convert.vegalite_to_svg(chart.spec)
    return section


def chart(section: Section, name: str) -> Chart:
    return next(chart for chart in section.charts if chart.name == name)


def data_with(one: Chart, column: str) -> list[dict[str, Any]]:
    """Return the rows of the chart's dataset that has this column."""
    assert one.spec is not None
    return next(rows for rows in one.spec["datasets"].values() if column in rows[0])


def test_the_curve_and_its_figures() -> None:
    """The curve goes through the measured points of each backend, a ring marks n½ of 20 KB, and the
    table has α, 1/β as algbw and busbw, and n½."""
    slow = swept(lambda n: 3 * hockney(n), backend="mpi")
    section = a_section(fits.section, a_run(*swept(), *slow))
    one = chart(section, "all_reduce-fit")
    curve = data_with(one, "segment")
    for point in data_with(one, "time"):
        near = min(
            (row for row in curve if row["backend"] == point["backend"]),
            key=lambda row: abs(math.log(row["nbytes"] / point["nbytes"])),
        )
        assert near["seconds"] == pytest.approx(point["seconds"], rel=0.25)
    figures = chart(section, "fit-figures").table.rows
    assert [row[1:3] for row in figures] == [("gloo", "64 B to 16 MiB"), ("mpi", "64 B to 16 MiB")]
    assert figures[0][3].startswith("20.5")
    assert figures[0][4].startswith("0.975")
    assert figures[0][5].startswith("0.487")
    assert figures[0][6].startswith("19.5")
    assert figures[0][7] == "6 launches"
    assert one.table.rows[0][:4] == ("gloo", "64 B", "20.57", "20.57")
    assert {chart.name for chart in section.charts} == {
        "all_reduce-fit",
        "fit-figures",
    }


def test_only_valid_fits_are_drawn(frozen: Frozen) -> None:
    """Sizes that no line describes have their points and a reason, but no curve; an operation
    without any valid fit has no chart; below four sizes there is no section."""
    saw = swept(lambda n: 1e-3 * (9 if SIZES.index(n) % 2 else 1), backend="mpi")
    section = a_section(fits.section, a_run(*swept(), *saw))
    one = chart(section, "all_reduce-fit")
    assert {row["backend"] for row in data_with(one, "segment")} == {"gloo"}
    assert {row["backend"] for row in data_with(one, "time")} == {"gloo", "mpi"}
    ((_, backend, sizes, why),) = chart(section, "fit-missing").table.rows
    assert (backend, sizes) == ("mpi", "64 B to 16 MiB")
    frozen.text(why)
    section = a_section(fits.section, a_run(*saw))
    assert [chart.name for chart in section.charts] == ["fit-missing"]
    few = [r for r in swept() if r.case.nbytes in SIZES[:3]]
    assert fits.section([ReportRun("few", a_run(*few))]) is None
    assert fits.section([ReportRun("none", replace(a_run(), results=()))]) is None


def test_runs_are_overlaid_and_variants_apart() -> None:
    """Two runs share a chart, which tells them by dashes and a column; dtypes have a chart each."""
    first, second = a_run(*swept()), replace(a_run(*swept(launches=8)), id="other")
    section = a_section(fits.section, first, second)
    one = chart(section, "all_reduce-fit")
    assert {row["run"] for row in data_with(one, "segment")} == {"a-run", "other"}
    assert one.table.columns[0].heading == "run"
    assert [row[0] for row in chart(section, "fit-figures").table.rows] == ["a-run", "other"]
    both = a_section(fits.section, a_run(*swept(), *swept(dtype="float64")))
    names = [chart.name for chart in both.charts]
    assert len(names) == len(set(names)) == 3


def test_the_terminal_shows_fits_of_ended_runs(frozen: Frozen) -> None:
    """A line below the table has the figures, the legend explains them; a run that still goes on,
    a quiet table and one whose times follow no line have neither."""
    run = a_run(*swept())
    text = table(run)
    frozen.text("\n".join(line for line in text.splitlines() if line.startswith("fit")))
    assert "fit gloo" in table(replace(run, state="interrupted"))
    assert "fit" not in table(replace(run, state="running"))
    assert "fit" not in table(run, quiet=True)
    assert "fit" not in table(a_run(*swept(lambda n: 1e-3 * (9 if SIZES.index(n) % 2 else 1))))
