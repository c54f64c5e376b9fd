"""The page of a watched job: its timeline, ranks, collectives and links."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from frozen import Frozen
from stored_runs import a_run
from stored_steps import a_step_case, a_step_result, a_step_run
from synthetic_rounds import BEGAN_NS, Fault, Job

from ddpbench.records.load import Load
from ddpbench.records.schema import Finding, Run
from ddpbench.records.watched import COLUMNS, Moment, Watched, WatchedCollective, WatchedLink
from ddpbench.report.chart import Chart, ReportRun
from ddpbench.report.charts import watch_timeline
from ddpbench.report.output.page import json_in_html, make_page
from ddpbench.report.sections import watched as watched_section
from ddpbench.watch.judging.judge import judge
from ddpbench.watch.judging.summary import summarize

SINCE = 300
LATE = Fault(3, "forward", 0.03, since=SINCE)


@cache
def watch_a_job() -> tuple[Watched, tuple[Finding, ...]]:
    """What a watch learns of a job of two hosts of which rank 3 is late from half-way on."""
    history = Job({"a": range(2), "b": range(2, 4)}, faults=[LATE]).watch(600)
    summary = summarize(history)
    assert summary is not None
    return summary.watched, judge(history, history.world_size)


def a_watched_run(**changes: Any) -> Run:
    """The run of this job with load, loss and a recorded value in some moments."""
    watched, findings = watch_a_job()
    moments = tuple(
        replace(moment, load=Load(0.5, 0.7, 2**30), loss=1 / (i + 1), values={"v <b>": i / 7})
        if i % 10 == 5
        else moment
        for i, moment in enumerate(watched.moments)
    )
    collectives = (
        WatchedCollective("0 (0-3)", 4, "all_reduce", 4_000_000, 1.0, 0.03, 3, 0.9),
        WatchedCollective("0 (0-3)", 4, "broadcast", 8, 0.01, 0.01, None, 0.3, 1e-5),
    )
    links = (WatchedLink("a", "b", "eth0", 10**9, 1e9, 1e-4, 3),)
    known = replace(watched, moments=moments, collectives=collectives, links=links)
    result = a_step_result(a_step_case(workload="train.py"), watched=replace(known, **changes))
    run = a_step_run(result, command="watch", started="2026-09-21T14:13:20Z")
    assert BEGAN_NS == 1_790_000_000 * 10**9
    return replace(run, findings=findings)


def charts(*runs: Run) -> dict[str, Chart]:
    """All charts of the section by their names."""
    section = watched_section.section([ReportRun(f"run {i}", run) for i, run in enumerate(runs)])
    assert section is not None
    return {chart.name: chart for chart in section.charts}


def rows_of(chart: Chart, field: str) -> list[dict[str, Any]]:
    """The data of a chart that has this field."""
    assert chart.spec is not None
    (rows,) = [data for data in chart.spec["datasets"].values() if field in data[0]]
    return list(rows)


@pytest.fixture(scope="module")
def shown() -> dict[str, Chart]:
    """The charts of the run."""
    return charts(a_watched_run())


def test_a_job_without_steps_and_other_commands_have_what_they_have() -> None:
    """Without steps there are collectives and links alone; without a watch there is no section."""
    bare = Watched(0, -1, 0.0, (), 0.0, {"a": 2})
    run = a_watched_run()
    (result,) = run.steps
    known = replace(bare, collectives=result.watched.collectives) if result.watched else bare
    assert [*charts(replace(run, steps=(replace(result, watched=known),)))] == ["watch-collectives"]
    for nothing in (replace(run, steps=(replace(result, watched=bare),)), a_run(), a_step_run()):
        assert watched_section.section([ReportRun("nothing", nothing)]) is None


def test_all_charts_over_time_have_one_axis(shown: dict[str, Chart]) -> None:
    """Parts, lateness, exposed communication, loss, recorded values and load stand below each other
    from the start of the watch to its last step."""
    assert [*shown] == [
        "watch-parts", "watch-lateness", "watch-exposed", "watch-loss", "watch-value-1",
        "watch-load-cpu", "watch-load-memory", "watch-ranks", "watch-extra", "watch-collectives",
        "watch-links",
    ]  # fmt: skip
    axes = set()
    for name in [*shown][:7]:
        spec = shown[name].spec
        assert spec is not None
        encoded = [layer["encoding"] for layer in spec["layer"] if "x" in layer["encoding"]]
        axes |= {str(each["x"]) for each in encoded if each["x"]["field"] == "at"}
    assert len(axes) == 1
    assert shown["watch-value-1"].title == "v <b>"


def test_a_rule_stands_where_a_finding_begins(shown: dict[str, Chart]) -> None:
    """The straggler has a rule at its first late step, with its sentence, and no rule is at 0."""
    run = a_watched_run()
    (finding,) = [one for one in run.findings if one.code == "straggler"]
    (rule,) = rows_of(shown["watch-parts"], "sentence")
    assert rule["sentence"] == finding.sentence
    assert rule["label"] == "rank 3: straggler"
    points = rows_of(shown["watch-parts"], "step")
    before = max(point["at"] for point in points if point["step"] < SINCE - 16)
    after = min(point["at"] for point in points if point["step"] > SINCE + 16)
    assert before < rule["at"] < after


def test_the_late_rank_stands_out_over_time_and_by_phase(shown: dict[str, Chart]) -> None:
    """It is late by 30 ms after the step, and not before; in forward, where it is outlined; and it
    is the first of the ranks, named by its finding."""
    table = shown["watch-lateness"].table
    column = [c.heading for c in table.columns].index("rank 3 ms")
    late = [(row[1], row[column]) for row in table.rows]
    assert min(late)[0] < SINCE - 20
    assert max(late)[0] > SINCE + 20
    for step, value in late:
        if abs(step - SINCE) > 20:
            assert value == pytest.approx(30 if step > SINCE else 0, abs=12)
    cells = {(row["rank"], row["part"]): row for row in rows_of(shown["watch-extra"], "marked")}
    (outlined,) = [place for place, row in cells.items() if row["marked"]]
    assert outlined == ("3 on b", "forward")
    assert cells[outlined]["seconds"] == pytest.approx(0.015, rel=0.15)
    assert shown["watch-ranks"].table.rows[0][0] == 3
    assert shown["watch-ranks"].table.rows[0][-1] == "straggler"


def test_parts_are_in_the_table(shown: dict[str, Chart]) -> None:
    """Each point of the table has the time of day in UTC, the step, and what the chart shows."""
    chart = shown["watch-parts"]
    points, cursors = rows_of(chart, "input"), rows_of(chart, "clock")
    assert len(points) <= watch_timeline.POINTS + 1
    assert [row[:2] for row in chart.table.rows] == [(c["clock"], c["step"]) for c in cursors]
    for point, row in zip(points, chart.table.rows, strict=True):
        assert row[0].endswith(" UTC")
        assert row[3:] == pytest.approx([point[name] * 1e3 for name in COLUMNS])
    assert cursors[0]["clock"].startswith("14:13:")


def test_slow_links_are_outlined() -> None:
    """The links that findings name are marked, in their direction, and in the table too: those that
    a slow host sends, and one from host to host. A host whose ranks are late marks none."""
    ends = [(x, y) for x in "abcd" for y in "abcd" if x != y]
    links = tuple(WatchedLink(x, y, "eth0", 10**9, 1e9, None, 0) for x, y in ends)
    run = a_watched_run(links=links, hosts=dict.fromkeys("abcd", 1))
    places = {
        "slow-link": {"hosts": ["a", "b"]},
        "slow-host": {"hosts": ["d"], "bytes_per_second": {"sends": 1e6}},
    }
    slow = [Finding("warning", code, "slow", "", place) for code, place in places.items()]
    late = Finding("warning", "slow-host", "late", "", {"host": "c", "phase": "forward"})
    chart = charts(replace(run, findings=(*slow, late)))["watch-links"]
    outlined = {(row["from"], row["to"]) for row in rows_of(chart, "slow") if row["slow"]}
    assert outlined == {("a", "b"), ("d", "a"), ("d", "b"), ("d", "c")}
    marked = [[str(value).endswith("slow") for value in row[1:]] for row in chart.table.rows]
    assert sum(map(sum, marked)) == 4


def test_close_moments_are_one_point() -> None:
    """Steps come in rounds: those of a round are merged, and what was read in them is kept."""
    moments = tuple(
        Moment(
            1.79e9 + 60 * n + m, 10 * n + m, 0.1 + m, (0.1 + m,) * 6, 0.1,
            load=Load(1.0 + m, 2.0, 10**9, gpu_share=0.5) if m else None,
            loss=float(m) if n else None, values={"x": float(m)} if m else {},
        )
        for n in range(200) for m in range(3)
    )  # fmt: skip
    run = a_watched_run(moments=moments, ranks=())
    (result,) = run.steps
    assert result.watched is not None
    merged = watch_timeline.build_timeline(run, result.watched).moments
    assert 100 <= len(merged) <= watch_timeline.POINTS + 1
    assert merged[-1].step == moments[-1].step
    first = merged[0]
    assert (first.step_seconds, first.loss, first.values) == (1.1, 1.0, {"x": 1.5})
    assert first.load == Load(2.5, 2.0, 10**9, gpu_share=0.5)


def test_one_huge_step_does_not_flatten_the_others(frozen: Frozen) -> None:
    """The axis is cut above the usual steps, and the caption says so; the table has all."""
    run = a_watched_run()
    (result,) = run.steps
    assert result.watched is not None
    moments = [*result.watched.moments]
    moments[50] = replace(moments[50], step_seconds=9.0, seconds=(9.0, *moments[50].seconds[1:]))
    chart = charts(a_watched_run(moments=tuple(moments[:51] + moments[60:])))["watch-parts"]
    assert chart.spec is not None
    assert chart.spec["layer"][0]["encoding"]["y"]["scale"]["domain"][1] < 1
    frozen.text(chart.caption)


def test_runs_of_other_times_stand_side_by_side() -> None:
    """Two jobs have each chart twice, with names of their own; a run without load and without
    lateness over time shows what it has."""
    run = a_watched_run()
    (result,) = run.steps
    assert result.watched is not None
    old_ranks = tuple(
        replace(rank, late_seconds=(), extra_seconds=()) for rank in result.watched.ranks
    )
    moments = tuple(
        replace(moment, load=None, loss=None, values={}) for moment in result.watched.moments
    )
    old = a_watched_run(moments=moments, ranks=old_ranks)
    names = ("parts", "exposed", "ranks", "collectives", "links")
    shown = charts(old, old)
    assert [*shown] == [f"watch-{name}-{number}" for name in names for number in (1, 2)]


def test_the_page_escapes_what_a_job_says() -> None:
    """Names of hosts, of recorded values and of findings are text, in charts and around them."""
    run = a_watched_run(hosts={"<script>alert(1)</script>": 4})
    nasty = Finding("warning", "straggler", "</script><b>", place={"since_step": 10, "rank": 1})
    page = make_page([ReportRun("a", replace(run, findings=(nasty,)))])
    assert "<script>alert(1)" not in page
    assert "</script><b>" not in page
    assert "v <b>" not in page
    assert "&lt;/script&gt;" in json_in_html("x") + page
