"""The chart of any one case and the heat maps of ranks, from raw samples on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from drawn import values
from frozen import Frozen, finding_facts
from stored_runs import a_case, a_result, a_run, a_summary

from ddpbench.present import summary as overview
from ddpbench.present.collectives import cases, skew
from ddpbench.present.document import Chart, ReportRun
from ddpbench.present.repetitions import Repetitions, reduce_samples
from ddpbench.records import store
from ddpbench.records.schema import Run
from ddpbench.session.summary import operation_columns

Ints = npt.NDArray[np.int64]
WARM_UPS = 3


def stamps(entry: Ints, spent: Ints) -> Ints:
    """Return rows of (repetition, rank, entry, exit, -1) of int64[rank, repetition], in ns."""
    ranks, count = spent.shape
    rank, repetition = np.divmod(np.arange(ranks * count), count)
    entry = entry.ravel() + repetition * 10**9
    return np.column_stack([repetition, rank, entry, entry + spent.ravel(), np.full_like(rank, -1)])


def add_case(folder: Path, part: int, case: str, spent: Ints, entry: Ints | None = None) -> None:
    """Store timed repetitions of int64[rank, repetition] ns, a warm-up and a cold call of 1 ms."""
    ranks = len(spent)
    before = np.full((ranks, 1 + WARM_UPS), 10**6)
    zeros = np.zeros_like(before)
    timed = stamps(np.zeros_like(spent) if entry is None else entry, spent)
    cold, warm_up = stamps(zeros[:, :1], before[:, :1]), stamps(zeros[:, 1:], before[:, 1:])
    columns = operation_columns(
        case, part, cold=cold, warm_up=warm_up, timed=timed, warm_ups=WARM_UPS
    )
    store.add_samples(folder, part, columns)


def case_charts(run: Run, folder: Path) -> tuple[Chart, ...]:
    """The repetitions in order and their distribution, of the case that varies most."""
    (section,) = cases.build_sections(ReportRun(run.id, run, folder))
    return section.rows[0]


def test_samples_reduce_to_the_slowest_rank_and_to_each_rank(tmp_path: Path) -> None:
    """A repetition takes as long as its slowest rank; a rank enters late after the first of all."""
    spent = np.array([[1000, 2000, 3000], [4000, 1000, 1000]])
    entry = np.array([[0, 0, 0], [500, 700, 900]])
    add_case(tmp_path, 0, a_case().key, spent, entry)
    store.join_samples(tmp_path)
    (part,) = reduce_samples(tmp_path)
    assert (part.case, part.launch) == (a_case().key, 0)
    assert part.seconds == pytest.approx([4e-6, 2e-6, 3e-6])
    assert part.late == pytest.approx([0, 700e-9])
    assert part.stay == pytest.approx([2e-6, 1e-6])


def test_a_case_in_several_row_groups_is_one(tmp_path: Path, monkeypatch: Any) -> None:
    """Successive row groups of the same case and launch are joined before they are reduced."""
    add_case(tmp_path, 0, "x", np.full((2, 40), 1000))
    frame = store.read_samples(tmp_path)
    parts: list[Repetitions] = []
    monkeypatch.setattr(store, "iterate_samples", lambda _: iter([frame[:33], frame[33:]]))
    parts += reduce_samples(tmp_path)
    assert [(part.case, len(part.seconds)) for part in parts] == [("x", 40)]


def test_points_keep_the_extremes_and_their_order(tmp_path: Path) -> None:
    """10,000 calls become at most 200 points in order, and the one slow call is still there."""
    spent = np.full((2, 10_000), 10_000)
    spent[1, 5000] = 7_000_000
    add_case(tmp_path, 0, a_case().key, spent)
    chart, _ = case_charts(a_run(a_result(summary=a_summary(1e-5))), tmp_path)
    points = values(chart)
    assert len(points) <= 200
    assert [point["_x"] for point in points] == sorted(point["_x"] for point in points)
    assert max(point["_high"] for point in points) == pytest.approx(7e-3)
    assert [point["_y"] for point in points] == pytest.approx([1e-5] * len(points))


def test_shares_count_every_launch_alike(tmp_path: Path) -> None:
    """A launch with many calls does not outvote one with few."""
    add_case(tmp_path, 0, a_case().key, np.full((2, 1000), 10_000))
    add_case(tmp_path, 1, a_case().key, np.full((2, 10), 40_000))
    chart, distribution = case_charts(a_run(a_result(), a_result(launch=1)), tmp_path)
    shares = [row["_y"] for row in values(distribution)]
    assert len(shares) <= 40
    assert list(filter(None, shares)) == pytest.approx([0.5, 0.5])
    assert chart.spec is not None
    assert [rule["_label"] for rule in chart.spec["datasets"]["rules"]] == ["0", "1"]
    table = chart.table
    assert [row[:2] for row in table.rows] == [(0, 1000), (1, 10)]
    assert table.rows[0][4] == pytest.approx(10.0)
    assert table.rows[1][6] is None  # p99 of ten calls


def test_times_are_of_one_call(tmp_path: Path) -> None:
    """A repetition of 20 calls in flight shows a twentieth of its time."""
    add_case(tmp_path, 0, a_case().key, np.full((2, 30), 20_000))
    chart, _ = case_charts(a_run(a_result(calls=20)), tmp_path)
    assert min(row["_y"] for row in values(chart)) == pytest.approx(1e-6)


def test_the_case_that_varies_most_comes_first(tmp_path: Path) -> None:
    """That is a case with two modes. Few cases are drawn."""
    draw = np.random.default_rng(0)
    steady = draw.normal(10_000, 100, (2, 400)).astype(int)
    both = np.where(np.arange(400) % 2, steady, 10 * steady)
    results = []
    for part, (nbytes, spent) in enumerate(
        ((1024, steady), (4096, both), (8, steady), (16, steady))
    ):
        case = a_case(nbytes=nbytes)
        add_case(tmp_path, part, case.key, spent)
        times = np.sort(spent.max(axis=0)) * 1e-9
        quantiles = tuple(np.quantile(times, np.linspace(0, 1, 21)))
        summary = a_summary(float(np.median(times)), quantiles_seconds=quantiles)
        results.append(a_result(case, part, summary))
    (section,) = cases.build_sections(ReportRun("run", a_run(*results), tmp_path))
    assert len(section.rows) == cases.MOST_CASES == 3
    chart, _ = section.rows[0]
    assert chart.title == "all_reduce 4 KiB gloo"


def test_the_summary_names_damaged_samples(tmp_path: Path, frozen: Frozen) -> None:
    """A page without repetitions says why, if the file of samples is damaged; else it says
    nothing about it."""
    run = a_run(a_result())
    whole = overview.build_section([ReportRun("a", run, tmp_path)])
    (tmp_path / "samples.parquet").write_bytes(b"PAR1 broken")
    damaged = overview.build_section([ReportRun("a", run, tmp_path)])
    assert whole.findings == ()
    frozen.facts([finding_facts(finding) for finding in damaged.findings])
    assert str(tmp_path) in damaged.findings[0].sentence


# --- lateness and stay of each rank ---------------------------------------------------------------


def a_stored_run(folder: Path, lates: dict[int, list[int]], **other: Any) -> Run:
    """Store an all_reduce of 0.1 ms for each size; each rank enters late by so many ns."""
    results = []
    for part, (nbytes, late) in enumerate(lates.items()):
        case = a_case(nbytes=nbytes, world_size=len(late))
        entry = np.tile(np.array(late)[:, None], 10)
        add_case(folder, part, case.key, 100_000 - entry, entry)
        results.append(a_result(case, part, summary=a_summary(1e-4, **other)))
    return a_run(*results)


def skew_charts(run: Run, folder: Path) -> list[Chart]:
    return [c for s in skew.build_sections(ReportRun(run.id, run, folder)) for c in s.charts]


def cells(chart: Chart) -> dict[int, float]:
    """Return the share of the call of each rank, in percent."""
    return {row["rank"]: row["_value"] for row in values(chart)}


def test_the_late_rank_is_late_and_stays_shortest(tmp_path: Path) -> None:
    """Both heat maps have a cell per rank and operation: percent of the call, median over sizes."""
    run = a_stored_run(tmp_path, {1024: [0, 40_000, 2_000], 4096: [0, 60_000, 4_000]})
    late, stay = skew_charts(run, tmp_path)
    assert cells(late) == pytest.approx({0: 0, 1: 50, 2: 3})
    assert cells(stay) == pytest.approx({0: 100, 1: 50, 2: 97})


def test_clocks_that_differ_show_no_lateness(tmp_path: Path) -> None:
    """Where entries of ranks are not comparable, only the stay is shown: it needs one clock."""
    run = a_stored_run(tmp_path, {1024: [0, 40_000]}, skew_seconds=None)
    assert [chart.name for chart in skew_charts(run, tmp_path)] == ["skew-stay-gloo"]


def test_many_ranks_keep_the_latest(tmp_path: Path) -> None:
    """Of 100 ranks the map keeps the 64 latest, and the latest of all is one of them."""
    late = [n % 7 for n in range(100)]
    late[41] = 70_000
    shown, _ = skew_charts(a_stored_run(tmp_path, {1024: late}), tmp_path)
    assert len(cells(shown)) == 64
    assert 41 in cells(shown)
