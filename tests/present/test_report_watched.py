"""The page of a watched job: its timeline, ranks, collectives and links."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from stored_steps import a_step_case, a_step_result, a_step_run
from synthetic_rounds import BEGAN_NS, Fault, Job

from ddpbench.present import watch as watched_section
from ddpbench.present.document import Chart, ReportRun
from ddpbench.records.schema import Finding, Run
from ddpbench.records.watched import WatchedCollective, WatchedLink
from ddpbench.watch.judging.judge import judge
from ddpbench.watch.judging.summary import Summary, summarize

SINCE = 300
LATE = Fault(3, "forward", 0.03, since=SINCE)


@cache
def watch_a_job() -> tuple[Summary, tuple[Finding, ...]]:
    """What a watch learns of a job of two hosts of which rank 3 is late from half-way on."""
    history = Job({"a": range(2), "b": range(2, 4)}, faults=[LATE]).watch(600)
    summary = summarize(history)
    assert summary is not None
    return summary, judge(history, history.world_size)


def a_watched_run(**changes: Any) -> Run:
    """The run of this job, with collectives and a link."""
    summary, findings = watch_a_job()
    collectives = (
        WatchedCollective("0 (0-3)", 4, "all_reduce", 4_000_000, 1.0, 0.03, 3, 0.9),
        WatchedCollective("0 (0-3)", 4, "broadcast", 8, 0.01, 0.01, None, 0.3),
    )
    links = (WatchedLink("a", "b", "eth0", 10**9, 1e9, 1e-4, 3),)
    known = replace(summary.watched, collectives=collectives, links=links)
    result = a_step_result(a_step_case(workload="train.py"), watched=replace(known, **changes))
    result = replace(result, summary=summary.steps)
    run = a_step_run(result, command="watch", started="2026-09-21T14:13:20Z")
    assert BEGAN_NS == 1_790_000_000 * 10**9
    return replace(run, findings=findings)


def charts(run: Run) -> dict[str, Chart]:
    """All charts of the section by their names."""
    (section,) = watched_section.build_sections(ReportRun("run", run))
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


def test_a_rule_stands_where_a_finding_begins(shown: dict[str, Chart]) -> None:
    """The straggler has a rule at its first late step, with its sentence, and no rule is at 0."""
    run = a_watched_run()
    (finding,) = [one for one in run.findings if one.code == "straggler"]
    (rule,) = rows_of(shown["watch-parts"], "finding")
    assert rule["finding"] == finding.sentence
    assert rule["_label"] == "rank 3: straggler"
    points = rows_of(shown["watch-parts"], "step")
    before = max(point["_x"] for point in points if point["step"] < SINCE - 16)
    after = min(point["_x"] for point in points if point["step"] > SINCE + 16)
    assert before < rule["_x"] < after


def test_the_late_rank_stands_out(shown: dict[str, Chart]) -> None:
    """It is the first of the ranks, named by its finding."""
    assert shown["watch-ranks"].table.rows[0][0] == "3"
    texts = {row["rank"]: row["_text"] for row in rows_of(shown["watch-ranks"], "_text")}
    assert texts["3 on b"] == "straggler"
