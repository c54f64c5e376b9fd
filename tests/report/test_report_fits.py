"""Fits and guidelines on a page: charts, tables and findings of runs whose truth is planted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import vl_convert
from stored_runs import a_case, a_result, a_run, a_summary, launch_results

from ddpbench.records.schema import Result, Run
from ddpbench.render.formats import table
from ddpbench.report.chart import Chart, MakeSection, ReportRun, Section
from ddpbench.report.sections import fits, guidelines

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


def test_only_valid_fits_are_drawn() -> None:
    """Sizes that no line describes have their points and a reason, but no curve; an operation
    without any valid fit has no chart; below four sizes there is no section."""
    saw = swept(lambda n: 1e-3 * (9 if SIZES.index(n) % 2 else 1), backend="mpi")
    section = a_section(fits.section, a_run(*swept(), *saw))
    one = chart(section, "all_reduce-fit")
    assert {row["backend"] for row in data_with(one, "segment")} == {"gloo"}
    assert {row["backend"] for row in data_with(one, "time")} == {"gloo", "mpi"}
    ((_, backend, sizes, why),) = chart(section, "fit-missing").table.rows
    assert (backend, sizes) == ("mpi", "64 B to 16 MiB")
    assert "× that of the best line" in why
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


def test_the_terminal_shows_fits_of_ended_runs() -> None:
    """A line below the table has the figures, the legend explains them; a run that still goes on,
    a quiet table and one whose times follow no line have neither."""
    run = a_run(*swept())
    text = table(run)
    assert "fit gloo: 64 B to 16 MiB: α 20.5" in text
    assert "fit: time = α + βn" in text
    assert "fit gloo" in table(replace(run, state="interrupted"))
    assert "fit" not in table(replace(run, state="running"))
    assert "fit" not in table(run, quiet=True)
    assert "fit" not in table(a_run(*swept(lambda n: 1e-3 * (9 if SIZES.index(n) % 2 else 1))))


def pair(factor: float, sizes: Sequence[int] = SIZES[:2], **other: Any) -> list[Result]:
    """Return all_gather that takes `factor` times as long as all_to_all."""
    results = []
    for seed, nbytes in enumerate(sizes):
        fields = {"nbytes": nbytes, "count": nbytes // 4, "reduce_op": None, **other}
        gather, exchange = (a_case(operation=f"all_{x}", **fields) for x in ("gather", "to_all"))
        results += launch_results(factor * 1e-3 * (1 + seed), gather, 8, seed=2 * seed)
        results += launch_results(1e-3 * (1 + seed), exchange, 8, seed=2 * seed + 1)
    return results


def test_a_violated_guideline() -> None:
    """The chart holds the planted ratio with its interval and verdict, the section the warning."""
    section = a_section(guidelines.section, a_run(*pair(1.5), *pair(0.5, backend="mpi")))
    one = chart(section, "guideline-all_gather-all_to_all")
    rows = {(row["backend"], row["nbytes"]): row for row in data_with(one, "ratio")}
    violated = rows["gloo", 64]
    assert violated["ratio"] == pytest.approx(1.5, rel=0.01)
    assert violated["low"] < violated["ratio"] < violated["high"]
    assert violated["verdict"] == "VIOLATED"
    assert rows["mpi", 64]["verdict"] == "HOLDS"
    (finding,) = section.findings
    assert "longer than all_to_all" in finding.sentence
    assert finding.next_step == "call all_to_all instead"
    everything = chart(section, "guidelines").table.rows
    assert {"VIOLATED", "HOLDS"} == {row[3] for row in everything}


def test_guidelines_of_several_runs_have_names() -> None:
    """Each run has its own charts and table, whose titles name it, and so does its warning; a run
    with nothing to compare has no section, one of three launches a table alone."""
    first, second = a_run(*pair(1.5)), replace(a_run(*pair(1.0)), id="other")
    section = a_section(guidelines.section, first, second)
    titles = [chart.title for chart in section.charts]
    assert [title.rpartition(": ")[2] for title in titles] == ["a-run", "a-run", "other", "other"]
    names = [chart.name for chart in section.charts]
    assert len(set(names)) == len(names)
    (finding,) = section.findings
    assert finding.sentence.startswith("a-run: ")
    alone = a_run(*launch_results(1e-3))
    assert guidelines.section([ReportRun("one", alone)]) is None
    few = a_run(*(r for r in pair(1.5) if r.launch < 3))
    section = a_section(guidelines.section, few)
    assert [chart.name for chart in section.charts] == ["guidelines"]
