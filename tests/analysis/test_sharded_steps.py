"""The budget of a sharded step: parts of known length are found again, and add up to the step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stored_steps import (
    a_sharded_case,
    a_sharded_summary,
    a_step_result,
    a_step_run,
    sharded_samples,
)

from ddpbench.analysis import sharded_steps, step_lines, steps
from ddpbench.records.schema import StepSummary

SPANS = ("exposed all_gather", "exposed reduce_scatter", "exposed all_reduce")


def parts_ms(summary: StepSummary) -> dict[str, float]:
    """The parts in ms."""
    return {part.name: part.figure.value * 1e3 for part in summary.budget}


def test_the_parts_are_those_of_the_samples_and_add_up() -> None:
    """The step is compute plus exposed communication; that is its operations plus the overhead."""
    summary = a_sharded_summary(blocks=2, gather=(4, 1), scatter=6, overhead=1.5)
    parts = parts_ms(summary)
    assert parts["exposed all_gather"] == pytest.approx(5 * 4, rel=0.01)
    assert parts["hidden all_gather"] == pytest.approx(5 * 1, abs=0.1)
    assert parts["exposed reduce_scatter"] == pytest.approx(3 * 6, rel=0.01)
    assert parts["hidden reduce_scatter"] == pytest.approx(0, abs=1e-9)
    assert parts[steps.EXPOSED] == pytest.approx(39.5, abs=0.5)
    exposed = sum(parts[name] for name in (*SPANS[:2], steps.OVERHEAD))
    assert exposed == pytest.approx(parts[steps.EXPOSED], rel=1e-9)
    whole = parts[steps.EITHER] + parts[steps.EXPOSED]
    assert whole == pytest.approx(summary.step.value * 1e3, rel=1e-9)


def test_a_straggler_is_not_communication() -> None:
    """The other ranks wait 20 ms for rank 2 in a collective, and nothing of it is exposed."""
    even = parts_ms(a_sharded_summary(scatter=6))
    summary = a_sharded_summary(scatter=6, late=(2, 20.0))
    parts = parts_ms(summary)
    for name in SPANS[:2]:
        assert parts[name] == pytest.approx(even[name], rel=0.02)
    assert parts["waiting for rank 2"] == pytest.approx(20, rel=0.02)
    (first, *others) = summary.collectives
    assert (first.late_rank, first.wait.value) == (2, pytest.approx(20e-3, rel=0.02))
    assert {each.late_rank for each in others} == {None}


def test_groups_that_work_at_once_count_by_the_slowest() -> None:
    """With HSDP a rank that waits in one group is not compared with the ranks of another."""
    samples = sharded_samples(reduce=3.0)
    timed = samples.timed
    assert timed is not None
    ns = timed.ns.copy()
    reduces = [i for i, span in enumerate(timed.spans) if span.operation == "all_reduce"]
    ns[2:, :, reduces, 1:] += 4_000_000  # ranks 2 and 3 are a slow group
    slow = sharded_steps.summarise(replace(samples, timed=replace(timed, ns=ns)), 256, 16)
    assert parts_ms(slow)["exposed all_reduce"] == pytest.approx(3 * 7, rel=0.01)
    row = next(each for each in slow.collectives if each.operation == "all_reduce")
    assert row.late_rank is None
    assert row.wait.value < 1e-3


def test_collectives_are_told_apart_by_layers_phase_and_operation() -> None:
    """Their exposed times add up to the parts, and calls of one kind are one figure."""
    summary = a_sharded_summary(blocks=2)
    keys = [(each.layers, each.phase, each.operation) for each in summary.collectives]
    assert len(keys) == len(set(keys)) == 8
    assert keys[0] == ("root", "forward", "all_gather")
    gathers = [each for each in summary.collectives if each.operation == "all_gather"]
    total = sum(each.exposed.value for each in gathers)
    assert total * 1e3 == pytest.approx(parts_ms(summary)["exposed all_gather"], rel=0.01)
    assert summary.peak_nbytes == 400_000_000


@pytest.mark.parametrize("launches", [2, 6])
def test_launches_are_merged_so_that_the_parts_still_add_up(launches: int) -> None:
    """Those of the launches with the median step; medians of each layer group."""
    case = a_sharded_case()
    results = [
        a_step_result(case, i, a_sharded_summary(seed=i, gather=(4 + i % 3, 1)))
        for i in range(launches)
    ]
    (line,) = step_lines.lines(a_step_run(*results))
    assert line.summary is not None
    parts = parts_ms(line.summary)
    exposed = sum(parts[name] for name in (*SPANS[:2], steps.OVERHEAD))
    assert exposed == pytest.approx(parts[steps.EXPOSED], rel=1e-9)
    assert len(line.summary.collectives) == 8
