"""The page as text: what it holds of any run, how small it is, and that names stay text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen import Frozen
from stored_runs import a_case, a_launch, a_result, a_run, a_summary, with_facts
from stored_steps import a_step_case, a_step_result, a_step_run

from ddpbench.records.launched import Offset
from ddpbench.records.schema import Finding, Run
from ddpbench.records.table import Table, TableColumn
from ddpbench.report.chart import Chart, Choice, ReportRun
from ddpbench.report.output import page
from ddpbench.report.output.page import make_page, make_sections
from ddpbench.report.sections import environment, overview
from ddpbench.report.sections.overview import summarise

MARKUP = "</script><script>alert(1)</script>"
WORDS = TableColumn("backend", "left")


def the_table(run_or_runs: Any, name: str) -> Table:
    """The table of this name in the section on the environment."""
    runs = run_or_runs if isinstance(run_or_runs, list) else [run_or_runs]
    section = environment.section([ReportRun(f"run {i}", run) for i, run in enumerate(runs)])
    assert section is not None
    return next(chart.table for chart in section.charts if chart.name == name)


# --- what the page holds --------------------------------------------------------------------------


def test_the_page_of_the_reference_run_is_small_and_allows_only_its_own_scripts(
    reference: Path,
) -> None:
    """The page of a default sweep stays below 3 MB; its policy names the hash of every script that
    it holds and nothing from elsewhere."""
    page = reference.read_text()
    assert len(page.encode()) < 3_000_000
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in html.unescape(policy.group(1)).split("; "))
    assert rules["default-src"] == "'none'"
    scripts = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in hashes)
    assert len(re.findall(r"<script", page.replace("".join(scripts), ""))) > len(scripts)
    assert not re.search(r"<(link|img|iframe)\b|<script[^>]*src=", page.replace(scripts[0], ""))


def test_names_with_markup_are_escaped() -> None:
    """A host, a backend, a word of the command line and a finding never end an element."""
    run = a_run(
        a_result(a_case(backend=MARKUP)),
        command_line=("ddpbench", MARKUP),
        findings=(Finding("error", "bad", MARKUP, f"run it again: ddpbench show {MARKUP}"),),
    )
    page = make_page([ReportRun(MARKUP, with_facts(run, {"os": MARKUP}, {"hostname": MARKUP}))])
    assert "alert(1)" in page
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    "run",
    [
        a_run(),
        a_run(launches=(a_launch(facts={}, ranks=()),)),
        a_run(a_result(summary=None, reason="not supported")),
        a_run(a_result(), state="interrupted", state_reason="Ctrl-C"),
        a_run(a_result(), state="running", ended=None),
        a_step_run(a_step_result(summary=None, replicas=None, reason="no memory")),
        a_step_run(a_step_result()),
        a_run(command="doctor"),
        a_run(command="watch", started=""),
        a_run(a_result(a_case(operation="barrier", nbytes=0, count=0))),
    ],
    ids=lambda run: f"{run.command}-{run.state}-{len(run.everything)}",
)
def test_any_run_has_a_page(run: Run) -> None:
    """Empty, skipped, interrupted and old runs have a page with a summary, alone and beside
    another; what is not complete says so."""
    alone = make_page([ReportRun("this", run)])
    assert summarise(ReportRun(run.id, run)) in html.unescape(alone).replace("\u00a0", " ")
    assert ("PARTIAL" in alone) == (run.state != "complete")
    beside = make_page([ReportRun("this", run), ReportRun("that", a_run(a_result()))])
    assert "this and that" in beside


def test_a_page_without_runs_has_its_title() -> None:
    """A page may hold nothing but sections of its caller."""
    assert "<h1>Regressions</h1>" in make_page([], title="Regressions")


# --- what scripts read ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.pi, "3.1416"),
        (1.23456789e-7, "1.2346e-07"),
        (67108864.0, "67108864"),
        (0.1 + 0.2, "0.3"),
        (math.nan, "null"),
        (-math.inf, "null"),
        (np.float64(2 / 3), "0.66667"),
        (np.int64(7), "7"),
        ((True, None, "µ", [1.0]), '[true,null,"µ",[1]]'),
        ({"</script>&": "\u2028"}, '{"\\u003c/script\\u003e\\u0026":"\\u2028"}'),
    ],
)
def test_values_are_short_and_safe(value: Any, text: str) -> None:
    """Floats have five digits, whole ones all of theirs; what JSON lacks is null; no character
    can end the element."""
    assert page.json_in_html(value) == text
    json.loads(text)


def test_a_chart_is_emitted_in_columns() -> None:
    """Rows become columns with a null where a row has no value; a chart with choices emits no
    dataset twice, and each choice's table as text."""
    table = Table("t", (WORDS, TableColumn("µs", decimals=1)), (("gloo *", 2.0), ("mpi", None)))
    spec = {"mark": "bar", "datasets": {"d": [{"a": 1, "b": "x"}, {"a": 2}]}}
    chart = Chart("c", "C", "", spec, table)
    plain = page.figure(chart)
    assert plain["datasets"] == {"d": {"a": [1, 2], "b": ["x", None]}}
    assert plain["spec"] == {"mark": "bar"}
    assert "datasets" in spec
    choice = Choice("one", {"d": {"a": (1,)}}, table)
    chosen = page.figure(replace(chart, choices=(choice,)))
    assert chosen["datasets"] == {}
    assert chosen["choices"][0]["table"] == {
        "headed": True, "columns": [["backend", "left"], ["µs", "right"]], "backend": 0,
        "rows": [["gloo *", "2.0"], ["mpi", "–"]], "legend": (),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "to see it: python -m ddpbench show last",
            ("to see it: ", "python -m ddpbench show last"),
        ),
        ("python -m ddpbench guide hangs", ("", "python -m ddpbench guide hangs")),
        ("replace the cable", None),
        ("run it; python -m ddpbench ddp compares them", None),
        ("look: ddpbench show a; then decide", None),
    ],
)
def test_a_command_at_the_end_of_a_next_step_can_be_copied(
    text: str, parts: tuple[str, str] | None
) -> None:
    """Only a command that ends the next step is one to copy; other text stays whole."""
    assert page.split_command(text) == (parts or (text, ""))


# --- the summary ----------------------------------------------------------------------------------


def a_sweep(**seconds: tuple[float, float]) -> Run:
    """Two sizes on each backend, with the times of both."""
    return a_run(
        *(
            a_result(a_case(backend=backend, nbytes=nbytes), summary=a_summary(time))
            for backend, times in seconds.items()
            for nbytes, time in zip((1024, 4096), times, strict=True)
        )
    )


@pytest.mark.parametrize(
    ("gloo", "mpi"),
    [((1e-3, 2e-3), (2e-3, 3e-3)), ((1e-3, 9e-3), (2e-3, 3e-3)), ((1e-3, 9e-3), (1e-3, 9e-3))],
    ids=["gloo", "each at a size", "none"],
)
def test_the_summary_names_the_fastest_backend(
    gloo: tuple[float, float], mpi: tuple[float, float], frozen: Frozen
) -> None:
    """A backend is the fastest where its interval lies below the others'; the sizes are named."""
    frozen.text(summarise(ReportRun("run", a_sweep(gloo=gloo, mpi=mpi))))


@pytest.mark.parametrize("state", ["failed", "interrupted", "running", "complete"])
def test_the_summary_begins_with_an_early_end(state: str, frozen: Frozen) -> None:
    """The first sentence on an incomplete run says so, and none says that nothing was found."""
    frozen.text(summarise(ReportRun("run", a_run(a_result(), state=state))))


def test_the_summary_of_one_backend_states_its_speed(frozen: Frozen) -> None:
    """With nothing to compare, the result is the shortest message's time and the best bandwidth."""
    frozen.text(summarise(ReportRun("run", a_sweep(gloo=(1e-3, 1e-3)))))


def test_the_summary_of_steps_names_times_and_replicas(frozen: Frozen) -> None:
    """A DDP run's result is the time of a step on each backend, and whether replicas are equal."""
    cases = [a_step_case(backend=name) for name in ("gloo", "mpi")]
    frozen.text(summarise(ReportRun("run", a_step_run(*map(a_step_result, cases)))))


def test_findings_are_sorted_and_shown_once() -> None:
    """The worst finding comes first; of several runs each finding names its run."""
    note, error = (Finding(s, "code", f"{s} happened") for s in ("note", "error"))
    run = a_run(a_result(), findings=(note, error))
    (alone,) = [s for s in make_sections([ReportRun("a", run)]) if s.findings]
    assert [finding.severity for finding in alone.findings] == ["error", "note"]
    both = overview.section([ReportRun("a", run), ReportRun("b", run)])
    assert both is not None
    assert [f.sentence for f in both.findings][:2] == ["a: error happened", "b: error happened"]


# --- the environment ------------------------------------------------------------------------------


def test_facts_of_several_runs_stand_side_by_side() -> None:
    """What differs between runs is marked, what is unknown in one has no value there."""
    first = with_facts(a_run(a_result()), {"memory_nbytes": 2**34, "git_dirty": True}, {})
    second = with_facts(a_run(a_result()), {"kernel": "6.2", "cuda": None}, {})
    table = the_table([first, second], "machine")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["Linux"] == ("6.1", "6.2", "differs")
    assert rows["memory"] == ("16.0 GiB", None, "differs")
    assert rows["uncommitted changes"] == ("yes", None, "differs")
    assert rows["CPU"] == ("CPU X", "CPU X", "")
    assert "CUDA" not in rows
    assert [column.heading for column in table.columns] == ["", "run 0", "run 1", "differs"]


def test_variables_name_the_ranks_where_they_differ() -> None:
    """A variable that all ranks have in common needs no ranks."""
    launch = a_launch(ranks=(
        {"variables": {"A": "1", "B": "1", "C": "1"}}, {"variables": {"A": "1", "B": "2"}},
    ))  # fmt: skip
    table = the_table(a_run(a_result(), launches=(launch,)), "variables")
    assert table.rows == (("A", "1"), ("B", "1 (rank 0); 2 (rank 1)"), ("C", "1 (rank 0)"))


def test_ranks_and_clocks_have_tables_without_empty_columns() -> None:
    """Only columns with a known value are shown; a clock's offset and bound are in µs."""
    offsets = (Offset("far", (2, 3), 12e-6, 3e-6),)
    run = a_run(a_result(), launches=(a_launch(offsets=offsets),))
    ranks = the_table(run, "ranks")
    assert [column.heading for column in ranks.columns] == ["rank", "backend", "host", "cores",
                                                           "threads"]  # fmt: skip
    clocks = the_table(run, "clocks")
    (row,) = clocks.rows
    assert row[2:] == ("far", "2-3", pytest.approx(12), pytest.approx(3))
