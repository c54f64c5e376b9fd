"""The columns `osu` and `nccl_tests` are what those benchmarks would have printed."""

from dataclasses import replace
from typing import Any

import pytest
from random_stamps import random_stamps
from stored_runs import a_case, a_result, a_run, a_summary

from ddpbench.analysis import lines, stats
from ddpbench.present.collectives.columns import COLUMNS

PIPELINED: dict[str, Any] = {"issue": "pipelined", "start": "none", "async_op": True, "depth": 20}


@pytest.mark.parametrize("device", [False, True])
def test_the_figures_are_those_of_the_others_own_loops(device: bool) -> None:
    """From the same stamps: OSU adds up each rank's calls, divides by their number, and takes the
    mean over ranks. nccl-tests does so with the time of calls in flight, divided by their number.
    Both read the host's clock, on a GPU too."""
    world, count, depth = 3, 50, 20
    stamps = random_stamps(world, count, seed=5, device=device)
    averages = []
    for rank in range(world):
        timer = 0
        for repetition in range(count):
            t_start, t_stop = stamps[rank, repetition, :2]
            timer += int(t_stop - t_start)
        averages.append(timer / count)
    wanted = sum(averages) / world / 1000
    runs = [
        a_run(a_result(replace(a_case(), **how), calls=calls,
                       summary=stats.summary(stats.over_ranks(stamps), calls, common_clock=True)))
        for how, calls in (({}, 1), (PIPELINED, depth))
    ]  # fmt: skip
    (isolated,), (pipelined,) = (lines.lines(run) for run in runs)
    assert COLUMNS["osu"].value(isolated) == pytest.approx(wanted, rel=1e-12)
    assert COLUMNS["nccl_tests"].value(pipelined) == pytest.approx(wanted / depth, rel=1e-12)
    assert COLUMNS["nccl_tests"].value(isolated) is None
    assert COLUMNS["osu"].value(pipelined) is None


@pytest.mark.parametrize(
    ("case", "result"),
    [
        ({"start": "p2p_barrier"}, {}),
        ({"start": "none"}, {}),
        ({"async_op": True}, {}),
        ({"operation": "send_recv"}, {"calls": 2}),
        ({"group": "host", "groups": 2}, {}),
        ({}, {"calls": 30, "batch": 30}),
    ],
)
def test_what_the_others_time_otherwise_has_no_figure(
    case: dict[str, Any], result: dict[str, Any]
) -> None:
    """Another start, calls not waited for, pairs of ranks, some ranks, several calls a stamp."""
    known = {"summary": a_summary(overall_mean_seconds=1e-3), **result}
    (line,) = lines.lines(a_run(a_result(a_case(**case), **known)))
    assert COLUMNS["osu"].value(line) is None
    assert COLUMNS["nccl_tests"].value(line) is None
