"""Lateness and stay of each rank as heat maps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_runs import a_case, a_result, a_run, a_summary

from ddpbench.records import store
from ddpbench.records.schema import Result, Run
from ddpbench.report.chart import Chart, ReportRun
from ddpbench.report.sections import skew
from ddpbench.session.summary import operation_columns

CALL_NS = 100_000


def add_case(folder: Path, part: int, case: str, late: list[int]) -> None:
    """Store ten calls of which each rank enters late by so many ns; all leave together."""
    rank, repetition = np.divmod(np.arange(len(late) * 10), 10)
    entry = repetition * 10**9 + np.array(late)[rank]
    ends = repetition * 10**9 + CALL_NS
    timed = np.column_stack([repetition, rank, entry, ends, np.full_like(rank, -1)])
    columns = operation_columns(
        case, part, cold=timed[:0].copy(), warm_up=timed[:0].copy(), timed=timed, warm_ups=0
    )
    store.add_samples(folder, part, columns)


def a_stored_run(folder: Path, lates: dict[int, list[int]], **other: Any) -> Run:
    """Store an all_reduce for each size; its lateness per rank in ns."""
    results: list[Result] = []
    for part, (nbytes, late) in enumerate(lates.items()):
        case = a_case(nbytes=nbytes, world_size=len(late))
        add_case(folder, part, case.key, late)
        results.append(a_result(case, part, summary=a_summary(CALL_NS * 1e-9, **other)))
    return replace(a_run(*results), id="a")


def charts(run: Run, folder: Path) -> list[Chart]:
    section = skew.section([ReportRun(run.id, run, folder)])
    return section.charts if section else []


def cells(chart: Chart, choice: int = 0) -> dict[tuple[int, int], float]:
    """Return the seconds of each rank and size."""
    data = chart.choices[choice].data
    sizes = data["calls"]["nbytes"]
    rows = zip(*(data["cells"][name] for name in ("rank", "case", "seconds")), strict=True)
    return {(rank, sizes[case]): seconds for rank, case, seconds in rows}


def test_the_late_rank_is_late_and_stays_shortest(tmp_path: Path) -> None:
    """Both heat maps hold a cell per rank and size, in seconds; their tables hold the µs."""
    run = a_stored_run(tmp_path, {1024: [0, 40_000, 2_000], 4096: [0, 60_000, 4_000]})
    late, stay = charts(run, tmp_path)
    assert cells(late)[1, 4096] == pytest.approx(60e-6)
    assert cells(stay)[1, 4096] == pytest.approx(40e-6)
    assert min(cells(stay), key=cells(stay).__getitem__) == (1, 4096)
    assert [column.heading for column in late.table.columns] == ["rank", "1 KiB µs", "4 KiB µs"]
    assert late.table.rows[1] == (1, pytest.approx(40.0), pytest.approx(60.0))
    assert late.choices[0].data["calls"]["call"] == pytest.approx((1e-4, 1e-4))


def test_clocks_that_differ_show_no_lateness(tmp_path: Path) -> None:
    """Where entries of ranks are not comparable, only the stay is shown: it needs one clock."""
    run = a_stored_run(tmp_path, {1024: [0, 40_000]}, skew_seconds=None)
    assert [chart.name for chart in charts(run, tmp_path)] == ["skew-stay"]


def test_many_ranks_keep_the_latest(tmp_path: Path) -> None:
    """Of 100 ranks the map keeps the 64 latest, and the latest of all is one of them."""
    late = [n % 7 for n in range(100)]
    late[41] = 70_000
    shown, _ = charts(a_stored_run(tmp_path, {1024: late}), tmp_path)
    ranks = {rank for rank, _ in cells(shown)}
    assert len(ranks) == 64
    assert 41 in ranks


def test_the_spec_holds_the_first_choice(tmp_path: Path) -> None:
    """A picture of the chart needs no page."""
    late, _ = charts(a_stored_run(tmp_path, {1024: [0, 40_000]}), tmp_path)
    assert late.spec is not None
    assert [row["seconds"] for row in late.spec["datasets"]["cells"]] == pytest.approx([0, 4e-5])


def test_one_rank_has_no_skew(tmp_path: Path) -> None:
    """A run of one rank has no section, and neither has one without samples."""
    run = a_stored_run(tmp_path, {1024: [0]})
    assert charts(run, tmp_path) == []
    assert skew.section([ReportRun("a", run)]) is None
