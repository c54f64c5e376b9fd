"""Stragglers: a slow rank is named with its cause, and noise causes no finding."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen import Frozen
from rank_pool import RankPool
from rank_setups import a_rank, a_setup

from ddpbench.analysis.rank_setup import Setup
from ddpbench.doctor.stragglers import judge
from ddpbench.doctor.stragglers.judge import (
    ALONE,
    TOGETHER,
    Load,
    Measured,
    Pass,
    RankPass,
    Suspect,
    find_cause,
)
from ddpbench.records import store
from ddpbench.records.schema import Finding

LOADS = {"matmul": Load("matmul", 1e9, "GFLOP/s"), "copy": Load("copy", 1e8, "GB/s")}
WORK = 5e-3
ROUND = (1.0, 1.01, 0.99, 1.02, 1.0)  # what a repetition takes in each, to the usual
FREE: dict[str, float | None] = {"throttled": 0.0, "stolen": 0.0, "queued": 0.01}


def a_rank_pass(
    alone: float = 1.0,
    at_once: float = 1.0,
    copy: float = 1.0,
    *,
    ms: float = 10.0,
    lost: dict[str, float | None] | None = None,
    waited: Sequence[float] = (),
    **other: Any,
) -> RankPass:
    """Return the measurements of a rank that takes so many times the usual; waited in ms."""
    seconds = {
        when: {
            "matmul": [ms * 1e-3 * f * r for r in ROUND],
            "copy": [1e-2 * copy * r for r in ROUND],
        }
        for when, f in ((ALONE, alone), (TOGETHER, alone * at_once))
    }
    shares = {ALONE: lost or FREE, TOGETHER: lost or FREE}
    return RankPass(seconds, shares, [round(each * 1e6) for each in waited], **other)


def judge_ranks(ranks: Pass, setup: Setup | None = None) -> tuple[Finding, ...]:
    """Return the findings of three equal passes."""
    setup = setup or a_setup(*[a_rank() for _ in ranks])
    return judge.find_all(Measured([ranks] * 3, LOADS, setup, WORK))


# --- who is slow ----------------------------------------------------------------------------------


FINE, TWICE = a_rank_pass(), a_rank_pass(alone=2.0)
BRIEF = [a_rank_pass(waited=[1.0] * 40), a_rank_pass(waited=[0.1] * 40)]
TURNS = [4.1, 0.1] * 20
CROWD: dict[str, float | None] = {**FREE, "queued": 0.5}
HEALTHY: dict[str, list[Pass]] = {
    "equal": [[FINE] * 4] * 3,
    "little slower": [[FINE, a_rank_pass(alone=1.3, copy=1.3)]] * 3,
    "slow in two passes": [[FINE, TWICE], [FINE, TWICE], [FINE, FINE]],
    "another in each pass": [[FINE, TWICE], [TWICE, FINE], [FINE, TWICE]],
    "not confirmed": [[FINE, TWICE]],
    "busy host": [[a_rank_pass(lost=CROWD), a_rank_pass(alone=3, lost=CROWD)]] * 3,
    "late in turn": [[a_rank_pass(waited=TURNS), a_rank_pass(waited=TURNS[::-1])]] * 3,
    "short waits": [BRIEF] * 3,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_rank_is_named_without_evidence(name: str) -> None:
    passes = HEALTHY[name]
    setup = a_setup(*[a_rank() for _ in passes[0]])
    assert judge.find_all(Measured(passes, LOADS, setup, WORK)) == ()


def test_a_slow_rank_is_named_with_figures(frozen: Frozen) -> None:
    """The same slowness with all ranks at once is not reported again."""
    ranks = [FINE, a_rank_pass(ms=10.5), TWICE, FINE]
    setup = a_setup(*[a_rank("n1"), a_rank("n1"), a_rank("n2"), a_rank("n2")])
    frozen.findings(judge_ranks(ranks, setup))


def test_noise_causes_no_finding() -> None:
    """A hundred runs of equal ranks whose rounds scatter, some hit by bursts ten times as long."""
    draw = np.random.default_rng(1)
    for run in range(100):
        size = (2, 8)[run % 2]
        setup = a_setup(*[a_rank() for _ in range(size)])
        noise = np.exp(draw.normal(0, 0.3, (3, size, 5)))
        noise[draw.random(noise.shape) < 0.1] *= 10
        waited_ns = (draw.exponential(4, (3, size, 40)) * 1e6).astype(int)
        passes = [
            [
                RankPass({ALONE: {"matmul": list(noise[i, rank])}}, {}, list(waited_ns[i, rank]))
                for rank in range(size)
            ]
            for i in range(3)
        ]
        assert judge.find_all(Measured(passes, LOADS, setup, WORK)) == ()


def test_on_a_busy_host_nobody_is_judged(frozen: Frozen) -> None:
    """If the other ranks wait for a core as well, the report says so. If they do not, the slow rank
    is named."""
    slow = a_rank_pass(alone=3, lost=CROWD)
    assert judge.find_unjudged([[a_rank_pass(lost=CROWD), slow]]) == {ALONE: 0.5, TOGETHER: 0.5}
    ranks = [FINE, slow]
    frozen.findings(judge_ranks(ranks))
    assert judge.find_unjudged([ranks]) == {}


def test_ranks_of_one_host_and_cause_are_one_finding(frozen: Frozen) -> None:
    slow = a_rank_pass(alone=3.0, copy=3.0, lost={**FREE, "throttled": 0.6})
    hosts = [a_rank(host) for host in "aabbccdd"]
    ranks = [slow if facts["hostname"] == "c" else FINE for facts in hosts]
    frozen.findings(judge_ranks(ranks, a_setup(*hosts)))


# --- why ------------------------------------------------------------------------------------------

GPU: dict[str, Any] = {"sm_clock_hertz": 1.98e9, "throttle_reasons": ["SwPowerCap"]}
HOT = {
    "sm_clock_hertz": 6e8,
    "temperature_celsius": 91,
    "throttle_reasons": ["SwPowerCap", "HwThermalSlowdown"],
}
# What happens → the slow rank
CAUSES = {
    "quota": a_rank_pass(alone=2, lost={**FREE, "throttled": 0.4}),
    "hypervisor": a_rank_pass(alone=2, lost={**FREE, "stolen": 0.5}),
    "process": a_rank_pass(alone=2, lost={**FREE, "queued": 0.45}, neighbours=["stress (pid 7)"]),
    "all the same": a_rank_pass(alone=2, lost={**FREE, "stolen": 0.3}),
    "mates": a_rank_pass(at_once=2),
    "unknown": a_rank_pass(alone=2, lost=dict.fromkeys(FREE)),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_what_was_counted(name: str, frozen: Frozen) -> None:
    """What all ranks have alike explains nothing."""
    fine = a_rank_pass(lost={**FREE, "stolen": 0.25}) if name == "all the same" else FINE
    frozen.findings(judge_ranks([fine, fine, CAUSES[name], fine]))


def test_unlike_hardware_is_a_cause(frozen: Frozen) -> None:
    ranks = [a_rank(cpu_model="fast"), a_rank(cpu_model="fast"), a_rank(cpu_model="old")]
    setup = Setup(ranks, [[0, 1, 2]])
    frozen.findings(judge_ranks([a_rank_pass(), a_rank_pass(), a_rank_pass(alone=2)], setup))


def test_a_gpu_that_slows_down_says_why(frozen: Frozen) -> None:
    """A reason that the other GPUs do not report. One that all report explains nothing."""
    ranks = [a_rank_pass(gpu=GPU), a_rank_pass(alone=2, gpu=HOT), a_rank_pass(gpu=GPU)]
    setup = a_setup(*[a_rank() for _ in ranks], device="cuda")
    cause, why = find_cause(Suspect(1, ALONE, "GPU", ranks, setup))
    assert cause.name == "throttled"
    frozen.text(why)
    cool = [a_rank_pass(gpu=GPU)] * 3
    assert find_cause(Suspect(1, ALONE, "GPU", cool, setup))[0].name == "nature"


# --- who is late ----------------------------------------------------------------------------------


def test_a_late_rank_is_told_without_a_common_clock(frozen: Frozen) -> None:
    """Three ranks wait 4 ms longer than the fourth. A rank that is slow as well has one finding."""
    early, last = a_rank_pass(waited=[4.1] * 40), a_rank_pass(waited=[0.1] * 40)
    frozen.findings(judge_ranks([early, early, last, early]))
    slow = replace(a_rank_pass(alone=2), waited_ns=last.waited_ns)
    frozen.findings(judge_ranks([early, early, slow, early]))
    assert judge.median_wait_seconds([early, last]) == [pytest.approx(4e-3), 0.0]


def test_on_a_busy_host_nobody_is_late(frozen: Frozen) -> None:
    """If the other ranks wait for a core in any part of a pass, no rank is late."""
    early, last = a_rank_pass(waited=[4.1] * 40), a_rank_pass(waited=[0.1] * 40)
    for when in (ALONE, TOGETHER):
        crowd = {ALONE: FREE, TOGETHER: FREE, when: {**FREE, "queued": 0.5}}
        assert judge_ranks([replace(early, lost=crowd), replace(last, lost=crowd)]) == ()
        frozen.findings(judge_ranks([early, replace(last, lost=crowd)]))


# --- how it is measured ---------------------------------------------------------------------------


# --- real ranks -----------------------------------------------------------------------------------

WORDS = ("doctor", "--only", "stragglers", "--case-time", "1", "--output", "run")


def test_crowded_ranks_are_looked_at_alone(pool: RankPool, tmp_path: Path, frozen: Frozen) -> None:
    """With more threads than cores, they are not measured all at once, and the report says so. The
    only finding is that they are too many."""
    many = str(len(os.sched_getaffinity(0)) + 1)
    environs = [{"RANK": str(r), "LOCAL_RANK": str(r), "OMP_NUM_THREADS": many} for r in range(2)]
    done = pool.ask(tmp_path, environs, *WORDS)
    assert done.returncode == 0, done
    run = store.read(tmp_path / "run")
    bad = [[f.severity, f.code] for f in run.findings if f.severity != "note"]
    frozen.facts([done.returncode, bad])
    (examined,) = run.examinations
    assert not [c for c in examined.tables[0].columns if "at once" in c.heading]
    assert examined.unchecked
