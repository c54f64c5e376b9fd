"""Verdicts on replicas on a page."""

from typing import Any

import pytest
from frozen import Frozen
from stored_steps import a_step_case, a_step_result, a_step_run, some_replicas

from ddpbench.records.schema import Replicas, Run
from ddpbench.report.chart import Chart, ReportRun, Section
from ddpbench.report.sections import replicas


def the_section(*found: Replicas | None, **case: Any) -> Section | None:
    """The section of a run with a launch for each."""
    results = [a_step_result(a_step_case(**case), n, replicas=r) for n, r in enumerate(found)]
    return replicas.section([ReportRun("a", a_step_run(*results))])


def the_chart(*found: Replicas) -> Chart:
    """Its only chart."""
    section = the_section(*found)
    assert section is not None
    ((chart,),) = section.rows
    return chart


def bars(chart: Chart) -> list[tuple[Any, ...]]:
    """What is drawn over the steps."""
    assert chart.spec is not None
    (rows,) = chart.spec["datasets"].values()
    return [(row["case"], row["found"], row["begin"], row["end"]) for row in rows]


BAD = some_replicas(
    equal=False, ok=False, differing=38, verified=54, last_step=54, equal_until=16, first_bad=20,
    tensors=("parameter 0.weight", "optimizer 0.momentum"), ranks=(1,), text="step 20: different",
)  # fmt: skip


def test_equal_replicas_are_a_sentence_and_a_row(frozen: Frozen) -> None:
    """Nothing is drawn if all was equal: a bar of one colour tells no more than the sentence."""
    section = the_section(some_replicas())
    assert section is not None
    (line,) = section.lines
    frozen.text(line)
    chart = the_chart(some_replicas())
    assert chart.spec is None
    assert chart.table.rows == (
        ("mlp", "gloo", 1, "equal", 136, 136, None, "-", "-", "4.50", "[4.50 … 4.50]", "5.6"),
    )


def test_a_fault_is_drawn_since_when(frozen: Frozen) -> None:
    """Equal until step 16, then three steps that were not verified, then different from 20 on."""
    chart = the_chart(BAD)
    assert bars(chart) == [
        ("mlp on gloo", "equal", 0, 16),
        ("mlp on gloo", "not known", 16, 19),
        ("mlp on gloo", "NOT EQUAL", 19, 54),
    ]
    frozen.text(chart.caption)
    (row,) = chart.table.rows
    assert row[3:9] == (
        "NOT EQUAL", 54, 16, 20, "1", "parameter 0.weight, optimizer 0.momentum",
    )  # fmt: skip


def test_each_launch_has_its_own_bar() -> None:
    """A fault in one of two launches: the other is shown beside it."""
    chart = the_chart(some_replicas(), BAD)
    assert bars(chart)[0] == ("mlp on gloo, launch 1", "equal", 0, 136)
    assert {case for case, *_ in bars(chart)[1:]} == {"mlp on gloo, launch 2"}


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (some_replicas(equal=True, ok=False, first_bad=1, equal_until=None), "NOT FINITE"),
        (some_replicas(equal=False, ok=False, first_bad=1, equal_until=None), "NOT EQUAL"),
    ],
)
def test_a_fault_in_the_first_step_leaves_no_equal_steps(found: Replicas, state: str) -> None:
    """Replicas that hold NaN are equal, and wrong all the same."""
    chart = the_chart(found)
    assert [bar[1:] for bar in bars(chart)] == [(state, 0, 136)]
    assert chart.table.rows[0][3] == state


def test_many_tensors_are_counted(frozen: Frozen) -> None:
    """A cell names six tensors, and how many there are beside them."""
    names = tuple(f"parameter {n}.weight" for n in range(100))
    found = some_replicas(equal=False, ok=False, first_bad=2, equal_until=1, tensors=names)
    cell = the_chart(found).table.rows[0][8]
    assert cell.count("parameter ") == 6
    frozen.text(cell)


def test_runs_that_verified_nothing_have_no_such_section() -> None:
    """Neither a run without steps nor one with --verify off."""
    assert the_section(None) is None
    run: Run = a_step_run()
    assert replicas.section([ReportRun("a", run)]) is None
