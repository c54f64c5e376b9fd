"""Charts and tables of collectives on a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from frozen import Frozen
from stored_runs import a_case, a_result, a_run, a_summary

from ddpbench.interchange import sources
from ddpbench.interchange.log import Hints
from ddpbench.records.schema import Limit, Result, Run, Wrong
from ddpbench.report.chart import Chart, ReportRun, Section
from ddpbench.report.sections import collectives

LIMIT = Limit(2e9, "one-way TCP streams on this host")


def a_sweep(**other: Any) -> list[Result]:
    """Return all_reduce of three sizes on gloo and mpi, with a limit."""
    return [
        a_result(
            a_case(backend=backend, nbytes=nbytes, count=nbytes // 4, **other),
            launch,
            a_summary(seconds * (1 + launch)),
            limit=LIMIT,
        )
        for launch, backend in enumerate(("gloo", "mpi"))
        for nbytes, seconds in ((1024, 1e-4), (4096, 2e-4), (2**20, 1e-2))
    ]


def a_section(*runs: Run) -> Section:
    section = collectives.section([ReportRun(run.id, run) for run in runs])
    assert section is not None
    return section


def charts(section: Section) -> list[Chart]:
    """The charts of operations."""
    return [chart for chart in section.charts if chart.operation]


def layers(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All single layers of a chart."""
    for layer in spec.get("layer", []):
        yield layer
        yield from layers(layer)


def values(chart: Chart) -> list[dict[str, Any]]:
    assert chart.spec is not None
    (data,) = chart.spec["datasets"].values()
    return list(data)


def scales(chart: Chart, channel: str) -> list[dict[str, Any]]:
    assert chart.spec is not None
    channels = [x["encoding"][channel] for x in layers(chart.spec) if channel in x["encoding"]]
    return [channel["scale"] for channel in channels if channel.get("scale")]


def test_an_operation_has_time_and_bandwidth_side_by_side(frozen: Frozen) -> None:
    """Both charts hold a point per size and backend, with its interval in seconds or bytes/s."""
    _, (time, bandwidth) = a_section(a_run(*a_sweep())).rows
    assert [chart.name for chart in (time, bandwidth)] == [
        "all_reduce-time", "all_reduce-bandwidth",
    ]  # fmt: skip
    first = next(p for p in values(time) if (p["backend"], p["nbytes"]) == ("mpi", 4096))
    assert first["seconds"] == 4e-4
    assert (first["seconds_low"], first["seconds_high"]) == pytest.approx((3.96e-4, 4.04e-4))
    rate = next(p for p in values(bandwidth) if (p["backend"], p["nbytes"]) == ("mpi", 4096))
    assert rate["rate"] == pytest.approx(4096 / 4e-4)
    assert rate["rate_low"] == pytest.approx(4096 / 4.04e-4)
    frozen.text(time.caption)


def test_tables_show_the_cells_of_the_terminal() -> None:
    """The two tables together have the terminal's columns; every row names its size and backend."""
    time, bandwidth = charts(a_section(a_run(*a_sweep())))
    assert [column.heading for column in time.table.columns] == [
        "size", "count", "backend", "time µs", "95 %", "p99 µs", "skew µs", "check", "flags",
    ]  # fmt: skip
    assert time.table.rows[:2] == (
        ("1 KiB", "256", "gloo *", "100.0", "±1.0%", "300.0", "1.562", "ok", ""),
        ("1 KiB", "256", "mpi", "200.0", "±1.0%", "600.0", "3.125", "ok", ""),
    )
    assert any(line.startswith("*: the fastest backend") for line in time.table.legend)
    assert [column.heading for column in bandwidth.table.columns][3:] == [
        "algbw GB/s", "busbw GB/s", "% limit", "check", "flags",
    ]  # fmt: skip


def test_the_limit_is_a_line_with_its_source() -> None:
    """Caption and tooltip name the source of the limit, and the chart draws its rate."""
    _, bandwidth = charts(a_section(a_run(*a_sweep())))
    assert f"gloo: {LIMIT.source}, 2.000 GB/s" in bandwidth.caption
    assert {(p["limited"], p["source"]) for p in values(bandwidth)} == {(2e9, LIMIT.source)}
    assert any(
        layer["encoding"].get("y", {}).get("field") == "limited"
        for layer in layers(bandwidth.spec or {})
    )


def test_flagged_points_have_another_shape_and_name_their_flags() -> None:
    """A wrong result is a cross, any other flag a diamond, and the tooltip holds the flags."""
    wide, wrong, fine, *rest = a_sweep()
    wide = replace(wide, summary=a_summary(1e-4, width=0.5))
    wrong = replace(wrong, wrong=(Wrong(0, 1, 2, "3", "4"),))
    time = charts(a_section(a_run(wide, wrong, fine, *rest)))[0]
    gloo = [(p["state"], p["flags_"]) for p in values(time) if p["backend"] == "gloo"]
    assert gloo == [("flagged", "imprecise"), ("do not use", "WRONG"), ("no flag", "")]
    (scale,) = scales(time, "shape")
    assert scale["domain"] == ["no flag", "flagged", "do not use"]
    assert scale["range"] == ["circle", "diamond", "cross"]
    assert any(line.startswith("WRONG: ") for line in time.table.legend)


def test_a_page_without_flags_has_no_legend_for_them() -> None:
    """The legend shows only states that occur."""
    time = charts(a_section(a_run(*a_sweep())))[0]
    shapes = [x["encoding"]["shape"] for x in layers(time.spec or {}) if "shape" in x["encoding"]]
    assert [shape["legend"] for shape in shapes] == [None]


def test_skipped_cases_are_in_the_table_with_their_reason() -> None:
    """An operation without any result has a table and no chart."""
    skipped = a_result(a_case(operation="all_to_all"), summary=None)
    skipped = replace(skipped, summary=None, reason="gloo has no all_to_all")
    *_, table = charts(a_section(a_run(*a_sweep(), skipped)))
    assert table.spec is None
    assert table.table.rows == (("4 KiB", "1024", "gloo", "skipped: gloo has no all_to_all"),)


def test_a_time_of_zero_is_in_the_table_only() -> None:
    """A device's clock may show no time at all: a logarithmic axis has no place for it."""
    (time,) = charts(a_section(a_run(a_result(summary=a_summary(0.0)))))
    assert time.spec is None
    assert time.table.rows[0][:4] == ("4 KiB", "1024", "gloo", "0")


def test_titles_name_what_differs(frozen: Frozen) -> None:
    """Two dtypes of an operation have a row each, whose titles and names differ."""
    section = a_section(a_run(*a_sweep(), *a_sweep(dtype="bfloat16")))
    assert len({chart.title for chart in charts(section)}) == 4
    assert len({chart.name for chart in charts(section)}) == 4
    frozen.text("\n".join(chart.title for chart in charts(section)))


def test_several_runs_lie_in_one_chart() -> None:
    """A run is a dash, a backend a colour, and the table has a column of runs."""
    before, after = a_run(*a_sweep(), id="before"), a_run(*a_sweep(), id="after")
    time, _ = charts(a_section(before, after))
    dashes = [x["encoding"].get("strokeDash", {}) for x in layers(time.spec or {})]
    assert {"field": "run", "sort": ["before", "after"], "title": None, "type": "nominal"} in dashes
    assert time.table.columns[0].heading == "run"
    assert {row[0] for row in time.table.rows} == {"before", "after"}


def test_one_size_is_a_row_of_points() -> None:
    """A barrier has no size: its chart has a row per backend, and there is no bandwidth."""
    barrier = a_case(operation="barrier", nbytes=0, count=0, reduce_op=None)
    ((time,),) = a_section(a_run(a_result(barrier))).rows
    positions = [layer["encoding"]["y"]["field"] for layer in layers(time.spec or {})]
    assert set(positions) == {"of"}


def test_a_log_of_another_tool_has_charts(tmp_path: Path, frozen: Frozen) -> None:
    """A log without intervals shows its times, and the caption names its statistic."""
    log = tmp_path / "osu.log"
    log.write_text(
        "# OSU MPI Allreduce Latency Test v7.3\n"
        "# Size       Avg Latency(us)\n4                       1.50\n8                       1.75\n"
    )
    run = sources.read(log, Hints("all_reduce", 2))
    time, _ = charts(a_section(run))
    frozen.text(time.caption)
    assert [p["seconds"] for p in values(time)] == pytest.approx([1.5e-6, 1.75e-6])


def test_an_overview_names_the_fastest_backend_of_each_size() -> None:
    """gloo takes half the time of mpi; at 4 KiB the intervals overlap, so there is none."""
    results = a_sweep()
    results[1] = replace(results[1], summary=a_summary(3.98e-4, width=0.02))
    ((fastest,), *_) = a_section(a_run(*results)).rows
    assert [row[:4] for row in fastest.table.rows] == [
        ("all_reduce", "1 KiB", "gloo", "2.0"),
        ("all_reduce", "4 KiB", "-", "-"),
        ("all_reduce", "1 MiB", "gloo", "2.0"),
    ]
    assert [(p["backend"], p["ratio"]) for p in values(fastest)] == [("gloo", "2.0")] * 2


def test_one_backend_has_no_overview() -> None:
    """Nothing is the fastest of one."""
    assert len(a_section(a_run(*a_sweep()[:3])).rows) == 1


def test_a_run_without_collectives_has_no_section() -> None:
    """A page of a DDP step has no empty heading."""
    assert collectives.section([ReportRun("a", a_run())]) is None
