"""Stragglers: a slow rank is named with its cause; noise accuses nobody."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frozen import Frozen
from rank_pool import RankPool
from rank_setups import a_rank, a_setup
from simulated_gpu import SimulatedGpu

from ddpbench.analysis.rank_setup import Setup
from ddpbench.doctor.stragglers import judge, measure
from ddpbench.doctor.stragglers.judge import (
    ALONE,
    TOGETHER,
    Load,
    Measured,
    Pass,
    Shown,
    Suspect,
    find_cause,
)
from ddpbench.doctor.stragglers.measure import Effort, build_tables, prepare_efforts
from ddpbench.present.writers.text import lay_out
from ddpbench.records import store
from ddpbench.records.schema import Finding
from ddpbench.runtime import cpu, devices

LOADS = {"matmul": Load("matmul", 1e9, "GFLOP/s"), "copy": Load("copy", 1e8, "GB/s")}
WORK = 5e-3
ROUND = (1.0, 1.01, 0.99, 1.02, 1.0)  # what a repetition takes in each, to the usual
FREE = {"throttled": 0.0, "stolen": 0.0, "queued": 0.01}


def shown(
    alone: float = 1.0, at_once: float = 1.0, copy: float = 1.0, ms: float = 10.0,
    kept: dict[str, float | None] | None = None, waited: Sequence[float] = (), **other: Any,
) -> Shown:  # fmt: skip
    """What a rank shows that takes so many times the usual; waited in ms."""
    seconds = {
        when: {
            "matmul": [ms * 1e-3 * f * r for r in ROUND],
            "copy": [1e-2 * copy * r for r in ROUND],
        }
        for when, f in ((ALONE, alone), (TOGETHER, alone * at_once))
    }
    shares = {ALONE: kept or FREE, TOGETHER: kept or FREE}
    return Shown(seconds, shares, [round(each * 1e6) for each in waited], **other)


def found(ranks: Pass, setup: Setup | None = None, times: int = 3) -> tuple[Finding, ...]:
    """The findings of so many passes in which the ranks show this."""
    setup = setup or a_setup(*[a_rank() for _ in ranks])
    return judge.find_all(Measured([ranks] * times, LOADS, setup, WORK))


# --- who is slow ----------------------------------------------------------------------------------


def test_equal_ranks_are_left_in_peace() -> None:
    """Equal ranks, one rank, ranks of which one takes 1.3 times as long: none is slow."""
    assert found([shown()] * 4) == ()
    assert found([shown()]) == ()
    assert found([shown(), shown(alone=1.3, copy=1.3)]) == ()
    assert not judge.is_suspected([[shown()] * 4], WORK)


def test_a_slow_rank_is_named_with_figures(frozen: Frozen) -> None:
    """At twice the time, alone: rank, host, its rate and the others' range, cause, next step; the
    same slowness together is not told again."""
    ranks = [shown(), shown(ms=10.5), shown(alone=2.0), shown()]
    setup = a_setup(*[a_rank("n1"), a_rank("n1"), a_rank("n2"), a_rank("n2")])
    frozen.findings(found(ranks, setup))


def test_only_what_every_pass_shows_is_told() -> None:
    """A rank slow in two of three passes, or another one in each, is noise; so is one that is as
    fast as the others in its best round."""
    slow, fine = [shown(), shown(alone=2.0)], [shown(), shown()]
    setup = a_setup(a_rank(), a_rank())
    assert judge.find_all(Measured([slow, slow, fine], LOADS, setup, WORK)) == ()
    assert judge.find_all(Measured([slow, slow[::-1], slow], LOADS, setup, WORK)) == ()
    assert judge.find_all(Measured([slow], LOADS, setup, WORK)) == ()  # not yet confirmed
    assert judge.is_suspected([slow], WORK)
    wild = {ALONE: {"matmul": [0.01, 0.01, 0.02, 0.02, 0.02]}}
    assert found([shown(), replace(shown(), seconds=wild)]) == ()


def test_noise_accuses_nobody() -> None:
    """A hundred runs of two and of eight equal ranks whose rounds scatter, some hit by bursts
    ten times as long: not one finding."""
    draw = np.random.default_rng(1)
    for run in range(100):
        size = (2, 8)[run % 2]
        setup = a_setup(*[a_rank() for _ in range(size)])
        noise = np.exp(draw.normal(0, 0.3, (3, size, 5)))
        noise[draw.random(noise.shape) < 0.1] *= 10
        waits = draw.exponential(4, (3, size, 40))
        passes = [
            [
                Shown(
                    {ALONE: {"matmul": list(noise[i, r])}}, {}, [int(w * 1e6) for w in waits[i, r]]
                )
                for r in range(size)
            ]
            for i in range(3)
        ]
        assert judge.find_all(Measured(passes, LOADS, setup, WORK)) == ()


def test_on_a_busy_host_nobody_is_judged(frozen: Frozen) -> None:
    """Where the other ranks wait for a core as well, a slow one is not accused, and that is said;
    where they do not, it is."""
    crowd = {**FREE, "queued": 0.5}
    ranks = [shown(kept=crowd), shown(alone=3, kept=crowd)]
    assert found(ranks) == ()
    assert judge.find_unjudged([ranks]) == {ALONE: 0.5, TOGETHER: 0.5}
    ranks = [shown(), shown(alone=3, kept=crowd)]
    frozen.findings(found(ranks))
    assert judge.find_unjudged([ranks]) == {}


def test_ranks_of_one_host_and_cause_are_one_finding(frozen: Frozen) -> None:
    """Two throttled ranks of four hosts' eight: one warning for both."""
    slow = shown(alone=3.0, copy=3.0, kept={**FREE, "throttled": 0.6})
    hosts = [a_rank(host) for host in "aabbccdd"]
    ranks = [slow if its["hostname"] == "c" else shown() for its in hosts]
    frozen.findings(found(ranks, a_setup(*hosts)))


# --- why ------------------------------------------------------------------------------------------

GPU: dict[str, Any] = {"sm_clock_hertz": 1.98e9, "temperature_celsius": 60,
                       "throttle_reasons": ["SwPowerCap"]}  # fmt: skip
HOT = {**GPU, "sm_clock_hertz": 6e8, "temperature_celsius": 91,
       "throttle_reasons": ["SwPowerCap", "HwThermalSlowdown"]}  # fmt: skip
# What happens → (what the slow rank shows, what the others show)
CAUSES = {
    "quota": (shown(alone=2, kept={**FREE, "throttled": 0.4}), shown()),
    "hypervisor": (shown(alone=2, kept={**FREE, "stolen": 0.5}), shown()),
    "process": (
        shown(alone=2, kept={**FREE, "queued": 0.45}, neighbours=["stress (pid 7)"]),
        shown(),
    ),
    "all the same": (
        shown(alone=2, kept={**FREE, "stolen": 0.3}),
        shown(kept={**FREE, "stolen": 0.25}),
    ),
    "clock": (shown(alone=2, hertz=1.2e9), shown(hertz=3e9)),
    "heat": (shown(alone=2, hertz=1.2e9, thermal=4), shown(hertz=3e9)),
    "mates": (shown(at_once=2), shown()),
    "process beside a few": (
        shown(alone=2, kept={**FREE, "queued": 0.4}),
        shown(kept={**FREE, "queued": 0.19}),
    ),
    "unknown": (shown(alone=2, kept=dict.fromkeys(FREE)), shown()),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_what_was_counted(name: str, frozen: Frozen) -> None:
    """A quota, the hypervisor, a process on the same cores, clock and heat are told with what was
    counted; what all ranks have alike explains nothing."""
    slow, fine = CAUSES[name]
    frozen.findings(found([fine, fine, slow, fine]))


def test_unlike_hardware_is_a_cause(frozen: Frozen) -> None:
    """Of two CPU models the slow rank's is told beside the others'."""
    ranks = [a_rank(cpu_model="fast"), a_rank(cpu_model="fast"), a_rank(cpu_model="old")]
    setup = Setup(ranks, [[0, 1, 2]])
    frozen.findings(found([shown(), shown(), shown(alone=2)], setup))


def test_a_gpu_that_slows_down_says_why(frozen: Frozen) -> None:
    """A reason that the other GPUs do not give, with clock and temperature; one that all give, as
    for power, is none."""
    ranks = [shown(gpu=GPU), shown(alone=2, gpu=HOT), shown(gpu=GPU)]
    setup = a_setup(*[a_rank() for _ in ranks], device="cuda")
    cause, why = find_cause(Suspect(1, ALONE, "GPU", ranks, setup))
    assert cause.name == "throttled"
    frozen.text(why)
    cool = [shown(gpu=GPU)] * 3
    assert find_cause(Suspect(1, ALONE, "GPU", cool, setup))[0].name == "nature"


def test_what_holds_all_up_is_a_note(frozen: Frozen) -> None:
    """Time that is stolen from all ranks makes none slow; it is worth knowing."""
    frozen.findings(found([shown(kept={**FREE, "stolen": 0.3})] * 2, times=1))


# --- who is late ----------------------------------------------------------------------------------


def test_a_late_rank_is_told_without_a_common_clock(frozen: Frozen) -> None:
    """Three ranks wait 4 ms longer than the fourth: it is late, though it computes as fast; a rank
    that is slow too is told once, with what the others wait."""
    early, last = shown(waited=[4.1] * 40), shown(waited=[0.1] * 40)
    frozen.findings(found([early, early, last, early]))
    slow = replace(shown(alone=2), waited_ns=last.waited_ns)
    frozen.findings(found([early, early, slow, early]))
    assert judge.median_wait_seconds([early, last]) == [pytest.approx(4e-3), 0.0]


def test_waiting_that_changes_sides_accuses_nobody() -> None:
    """Each rank is last in half of the repetitions: nobody is late."""
    turns_ = [4.1, 0.1] * 20
    assert found([shown(waited=turns_), shown(waited=turns_[::-1])]) == ()
    brief = [shown(waited=[1.0] * 40), shown(waited=[0.1] * 40)]
    assert found(brief) == ()


def test_on_a_busy_host_nobody_is_late(frozen: Frozen) -> None:
    """Where the other ranks wait for a core in any part of a pass, no rank is late; where only the
    late rank does, it is."""
    early, last = shown(waited=[4.1] * 40), shown(waited=[0.1] * 40)
    for when in (ALONE, TOGETHER):
        crowd = {ALONE: FREE, TOGETHER: FREE, when: {**FREE, "queued": 0.5}}
        assert found([replace(early, kept=crowd), replace(last, kept=crowd)]) == ()
        frozen.findings(found([early, replace(last, kept=crowd)]))


# --- what is shown --------------------------------------------------------------------------------


def test_a_row_for_each_rank(frozen: Frozen) -> None:
    """Rates alone and at once, what a rank waits, why it did not run; unknown columns are left
    out, and of many ranks the slowest are shown."""
    its = {
        "host": "a", "seconds": {"alone": {"matmul": 0.01}, "together": {"matmul": 0.02}},
        "kept": {"alone": {"queued": 0.25, "throttled": None}}, "wait_seconds": 1e-3,
        "hertz": None, "neighbours": [],
    }  # fmt: skip
    figures = {"loads": {"matmul": {"amount": 1e9, "unit": "GFLOP/s"}}, "ranks": [its, its]}
    (table,) = build_tables(figures, "gloo")
    heads, *_, last = lay_out(table).splitlines()
    assert last.split() == ["1", "a", "100.0", "50.00", "1.00", "25"]
    frozen.text("\n".join((heads, *table.legend)))
    slow = {**its, "seconds": {"alone": {"matmul": 0.1}, "together": {"matmul": 0.1}}}
    (table,) = build_tables({**figures, "ranks": [*[its] * 20, slow]}, "gloo")
    assert len(table.rows) == 16
    frozen.text(table.title)
    assert lay_out(table).splitlines()[2].split()[:3] == ["20", "a", "10.00"]
    assert build_tables({**figures, "ranks": [its]}, "gloo") == ()


# --- how it is measured ---------------------------------------------------------------------------


def test_shares_add_up_over_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stolen is that of all busy threads, time in the queue that of one; what is unknown once
    stays unknown."""
    use = cpu.CpuUse(2.0, 2.0, 0, 0, None, None, 1.0, None)
    queue = iter([0.0, 0.5, 0.5, 2.0])
    monkeypatch.setattr(cpu, "CpuMeter", lambda: type("M", (), {"stop": lambda self: use})())
    monkeypatch.setattr(cpu, "queued_seconds", lambda: next(queue))
    own = measure.Turns(4, {"matmul": []})
    nothing = Effort(LOADS["matmul"], torch.device("cpu"), lambda: None)
    own.carry(nothing, 0.0)
    own.carry(nothing, 0.0)
    assert own.kept == {"throttled": None, "stolen": 0.125, "queued": 0.5}


class Events:
    """A GPU whose events are 7 ms apart, and the order of what it was given."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def record(self) -> None:
        self.given.append("event")

    def synchronize(self) -> None:
        self.given.append("wait")

    def elapsed_time(self, later: object) -> float:
        return 7.0


@pytest.fixture
def gpu_of_events(simulated_gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> Events:
    """A simulated GPU with small loads."""
    events, kind = Events(), devices.KINDS["cuda"]
    monkeypatch.setattr(kind, "event", lambda device: events)
    monkeypatch.setattr(kind, "synchronize", lambda device: events.given.append("all"))
    monkeypatch.setattr(kind, "in_use", lambda: events.given.append("state"))
    monkeypatch.setattr(measure, "SIDE", {"cpu": 8, "cuda": 16})
    monkeypatch.setattr(measure, "COPY_NBYTES", {"cpu": 64, "cuda": 128})
    monkeypatch.setattr(measure, "LEAST_COPY_NBYTES", 64)
    return events


@pytest.mark.thorough
def test_a_gpu_times_its_own_loads(gpu_of_events: Events, simulated_gpu: SimulatedGpu) -> None:
    """A rank with a GPU has the CPU's loads too, on the host's clock; those of the GPU run there,
    between two events, with amounts of their own."""
    efforts = prepare_efforts(torch.device("cuda", 0), 64)
    assert {name: effort.load.amount for name, effort in efforts.items()} == {
        "matmul": 2.0 * 8**3,
        "memory copy": 64.0,
        "GPU matmul": 2.0 * 16**3,
        "GPU memory copy": 4 * 128.0,
    }
    for name, effort in efforts.items():
        gpu_of_events.given.clear()
        simulated_gpu.called.clear()
        seconds = effort.time()
        on_gpu = name.startswith("GPU")
        assert (seconds == 7e-3) == on_gpu
        assert gpu_of_events.given == (["event", "event", "wait"] if on_gpu else [])
        assert simulated_gpu.reads == []
    assert [*prepare_efforts(torch.device("cpu"), 0)] == ["matmul"]


@pytest.mark.thorough
def test_the_state_of_a_gpu_is_read_while_it_computes(gpu_of_events: Events) -> None:
    """After some work was handed over, and before it is waited for; never on the CPU."""
    device, given = torch.device("cuda", 0), gpu_of_events.given
    work = prepare_efforts(device, 0)["GPU matmul"]
    busy = replace(work, call=lambda: given.append("work"))
    measure.gpu_at_work(busy)
    assert [*dict.fromkeys(given)] == ["work", "state", "all"]
    assert given.count("work") == measure.GPU_CALLS
    on_cpu = prepare_efforts(torch.device("cpu"), 0)["matmul"]
    assert measure.gpu_at_work(on_cpu) is None


def test_equal_work_is_a_usual_ranks() -> None:
    """How often, by the median of the ranks' medians: one slow rank does not shorten it."""
    assert measure.size_equal_work([[1e-3] * 5, [1e-3] * 5, [1e-2] * 5], 5e-3) == (
        5,
        pytest.approx(5e-3),
    )
    assert measure.size_equal_work([[1.0]], 5e-3) == (1, 1.0)


def test_waiting_for_a_core_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells ns on a core, ns in its queue, and turns; or nothing."""
    monkeypatch.setattr(cpu, "read", {"/proc/self/schedstat": "700 1500000000 3\n"}.get)
    assert cpu.queued_seconds() == 1.5
    monkeypatch.setattr(cpu, "read", lambda path: None)
    assert cpu.queued_seconds() is None


# --- real ranks -----------------------------------------------------------------------------------

WORDS = ("doctor", "--only", "stragglers", "--case-time", "1", "--output", "run")


def test_equal_real_ranks_are_left_in_peace(pool: RankPool, tmp_path: Path, frozen: Frozen) -> None:
    """Two ranks here: alone and at once each load has a rate in each rank, what they wait is known,
    and nothing is found above a note."""
    done = pool.call(2, tmp_path, *WORDS)
    assert done.returncode == 0, done
    run = store.read(tmp_path / "run")
    (examined,) = run.examinations
    bad = [f.code for f in run.findings if f.severity != "note" and f.code != "oversubscribed"]
    frozen.facts([done.returncode, bad])
    for its in examined.figures["ranks"]:
        assert set(its["seconds"][ALONE]) == {"matmul", "memory copy"}
        assert all(seconds > 0 for seconds in its["seconds"][ALONE].values())
    assert [table.title in done.stdout for table in examined.tables] == [True]
    if len(os.sched_getaffinity(0)) >= 2:
        assert min(its["wait_seconds"] for its in examined.figures["ranks"]) >= 0


def test_crowded_ranks_are_looked_at_alone(pool: RankPool, tmp_path: Path, frozen: Frozen) -> None:
    """More threads than cores: what all show at once would mean nothing and is not looked at, which
    is said; the only finding is that they are too many."""
    many = str(len(os.sched_getaffinity(0)) + 1)
    environs = [{"RANK": str(r), "LOCAL_RANK": str(r), "OMP_NUM_THREADS": many} for r in range(2)]
    done = pool.ask(tmp_path, environs, *WORDS, "--init-method", f"file://{tmp_path / 'meet'}")
    assert done.returncode == 0, done
    run = store.read(tmp_path / "run")
    bad = [[f.severity, f.code] for f in run.findings if f.severity != "note"]
    frozen.facts([done.returncode, bad])
    (examined,) = run.examinations
    assert set(examined.figures["ranks"][0]["seconds"]) == {ALONE}
    assert examined.unchecked


def test_one_rank_has_nobody_to_be_slower_than(
    pool: RankPool, tmp_path: Path, frozen: Frozen
) -> None:
    """It is measured, and what cannot be said of it is named."""
    done = pool.call(1, tmp_path, *WORDS)
    run = store.read(tmp_path / "run")
    bad = [[f.severity, f.code] for f in run.findings if f.severity != "note"]
    frozen.facts([done.returncode, bad])
    (examined,) = run.examinations
    assert set(examined.figures["ranks"][0]["seconds"]) >= {ALONE}
    frozen.text("\n".join(examined.unchecked))
