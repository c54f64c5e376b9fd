"""Findings of a watch on made-up jobs with the noise of a busy host, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from frozen import Frozen
from msgspec import structs
from synthetic_rounds import Fault, Job

from ddpbench.records.schema import Finding
from ddpbench.watch.judging import judge as judges
from ddpbench.watch.judging.history import SILENT, History
from ddpbench.watch.judging.judge import judge
from ddpbench.watch.judging.summary import summarize
from ddpbench.watch.window import COLUMNS, JoinedCall, Window

PHASES = ("input", "forward", "backward", "optimizer")
STEP_SECONDS = 0.125
NOISES = ({}, {"modes": True}, {"noise": 0.1, "spikes": 0.05})
FOUR = {"a": [*range(4)]}
TWO_HOSTS = {"a": [*range(4)], "b": [*range(4, 8)]}
WHERE = ("rank", "ranks", "host", "hosts", "phase", "every")


def draw_faults(seed: int, count: int = 1, least: float = 0.05, **when: int) -> list[Fault]:
    """Return faults on different ranks, of `least` to half of a step in a random phase."""
    draw = np.random.default_rng(1000 + seed)
    return [
        Fault(
            int(rank),
            PHASES[draw.integers(4)],
            STEP_SECONDS * (1.4 if count > 1 else 1) * draw.uniform(least, 0.5),
            **when,
        )
        for rank in draw.permutation(4)[:count]
    ]


def warnings(history: History) -> list[Finding]:
    """Return the findings above a note, and check that none is an error."""
    findings = judge(history, history.world_size)
    assert all(finding.severity in ("warning", "note") for finding in findings)
    return [finding for finding in findings if finding.severity == "warning"]


def watch(job: Job, steps: int, **changed: object) -> History:
    """Watch a job whose rounds have these values instead of their own."""
    history = History()
    for round_ in job.rounds(steps):
        history.add(structs.replace(round_, **changed))
    return history


def where(findings: Sequence[Finding]) -> list[object]:
    """Return what findings state without their figures: severity, code and the place."""
    return [
        [each.severity, each.code, {name: each.place[name] for name in WHERE if name in each.place}]
        for each in findings
    ]


def freeze(frozen: Frozen, *findings: Finding) -> None:
    """Assert who is blamed for what, and the wording."""
    frozen.facts(where(findings))
    frozen.text("\n".join(f"{each.sentence}\n    Next: {each.next_step}" for each in findings))


def is_right(found: Sequence[Finding], faults: Sequence[Fault]) -> bool:
    """Whether these findings are these faults: rank, phase, period, size within 10 %, start."""
    places = {finding.place.get("rank"): finding.place for finding in found}
    if set(places) != {fault.rank for fault in faults} or len(found) != len(faults):
        return False
    for fault in faults:
        place = places[fault.rank]
        if place["phase"] != fault.phase or abs(place["seconds"] / fault.seconds - 1) > 0.1:
            return False
        if place["every"] != fault.every or "until_step" in place:
            return False
        since = place.get("since_step")
        if (since is None) != (fault.since == 0) or abs((since or 0) - fault.since) > 4:
            return False
    return True


@pytest.mark.parametrize("noise", NOISES, ids=("quiet", "modes", "busy"))
def test_a_straggler_is_found_with_its_phase_and_size(
    frozen: Frozen, noise: dict[str, float]
) -> None:
    """Rank, phase and size within 10 % are right in 95 % of jobs of 250 steps, from 5 % of a
    step."""
    faults = [draw_faults(seed) for seed in range(20)]
    found = [
        warnings(Job(seed=seed, faults=fault, **noise).watch(250))
        for seed, fault in enumerate(faults)
    ]
    assert sum(map(is_right, found, faults)) >= 19
    frozen.facts([where(findings) for findings in found[:4]])


@pytest.mark.parametrize("noise", NOISES, ids=("quiet", "modes", "busy"))
@pytest.mark.parametrize(("steps", "jobs"), [(64, 60), (300, 20)])
def test_healthy_jobs_have_no_finding_above_a_note(
    noise: dict[str, float], steps: int, jobs: int
) -> None:
    """Neither heavy tails, warm-up, correlated noise nor changing speeds make a rank late."""
    found = [warnings(Job(seed=seed, **noise).watch(steps)) for seed in range(jobs)]
    assert [one for one in found if one] == []


def test_a_long_healthy_job_has_no_finding_above_a_note() -> None:
    """Verdicts after every round of a job do not add up to a false alarm, however many there
    are."""
    history = History()
    for round_ in Job(seed=5, modes=True).rounds(2000):
        history.add(round_)
        assert warnings(history) == []


@pytest.mark.parametrize(
    ("count", "when"),
    [(2, {}), (1, {"every": 5}), (1, {"since": 150})],
    ids=("two", "every fifth step", "halfway"),
)
def test_other_stragglers_are_found(frozen: Frozen, count: int, when: dict[str, int]) -> None:
    """Two stragglers, one that is late in every fifth step, and one that becomes late halfway are
    right in 9 of 10 jobs, from 10 % of a step."""
    faults = [draw_faults(seed, count, 0.1, **when) for seed in range(10)]
    found = [warnings(Job(seed=seed, faults=fault).watch(300)) for seed, fault in enumerate(faults)]
    assert sum(map(is_right, found, faults)) >= 9
    frozen.facts([where(findings) for findings in found[:4]])


@pytest.mark.parametrize(
    ("since", "until", "steps"),
    [(150, None, 300), (50, 200, 300), (5000, None, 20_000)],
    ids=("since", "until", "long"),
)
def test_first_and_last_late_step_are_reported(
    frozen: Frozen, since: int, until: int | None, steps: int
) -> None:
    """Of a rank that becomes late, with the time, in a long job as well; and of one that was."""
    job = Job(faults=[Fault(1, "forward", 0.02, since=since, until=until or steps)])
    (finding,) = warnings(job.watch(steps))
    place, ends = finding.place, np.cumsum(np.median(job.rows(steps).sum(axis=2), axis=0))
    assert place["since_step"] == pytest.approx(since, abs=max(4, steps / 200))
    assert place["since"] == pytest.approx(1_790_000_000 + ends[place["since_step"]], abs=1.0)
    assert place.get("until_step") == (until and pytest.approx(until - 1, abs=4))
    freeze(frozen, finding)


def test_waiting_is_no_slowness() -> None:
    """Ranks whose steps are all equally long differ in what they are blocked: the one that is
    blocked least is late, and a rank with more own time that is blocked no less is not."""
    rounds = Job(faults=[Fault(3, "backward", 0.02)]).rounds(200)
    steps = [float(np.median(rows.sum(axis=1))) for rows in rounds[2].rows.values()]
    assert max(steps) < 1.02 * min(steps)
    history = History()
    for round_ in rounds:
        for rows in round_.rows.values():
            rows[:, -1] = 0.01
        history.add(round_)
    assert warnings(history) == []


def test_a_slow_host_is_blamed_for_all_its_ranks(frozen: Frozen) -> None:
    """If all ranks of one host are late in one phase, one finding names the host."""
    faults = [Fault(rank, "forward", 0.01) for rank in TWO_HOSTS["b"]]
    (finding,) = warnings(Job(hosts=TWO_HOSTS, faults=faults).watch(200))
    freeze(frozen, finding)
    assert finding.place["seconds"] == pytest.approx(0.01, rel=0.1)


def test_a_straggler_among_a_thousand_ranks_is_found(frozen: Frozen) -> None:
    """With eight ranks of each of 64 hosts known, one late rank is found and no other blamed."""
    hosts = {f"host{i}": range(16 * i, 16 * i + 16) for i in range(64)}
    (finding,) = warnings(Job(hosts=hosts, faults=[Fault(777, "forward", 0.03)]).watch(150))
    frozen.facts(where([finding]))


def test_a_lasting_slowdown_of_all_ranks_has_a_step_and_a_time(frozen: Frozen) -> None:
    """Steps that take 40 % longer from step 500 on are reported as such; two speeds that take turns
    are not."""
    (finding,) = warnings(Job(slower_since=(500, 1.4)).watch(900))
    freeze(frozen, finding)
    assert finding.place["since_step"] == pytest.approx(500, abs=4)
    assert finding.place["seconds"] / finding.place["before_seconds"] == pytest.approx(1.4, abs=0.1)
    assert warnings(Job(modes=True, seed=2).watch(900)) == []


def test_input_and_communication_that_all_ranks_wait_for_are_reported(frozen: Frozen) -> None:
    """A job whose ranks all spend most of a step in input, or in its transfers, is told so, with
    how much."""
    (finding,) = warnings(Job(work=(0.1, 0.02, 0.03, 0.01, 0.001)).watch(200))
    assert finding.place["seconds"] == pytest.approx(0.1, rel=0.1)
    (exposed,) = judge(Job(transfer=0.05).watch(200), 4)
    assert exposed.place["seconds"] == pytest.approx(0.045, rel=0.2)
    freeze(frozen, finding, exposed)


def test_what_takes_time_on_hosts_is_reported_with_the_hosts(frozen: Frozen) -> None:
    """Garbage collections, compilations and other programs, each where it takes enough of the
    time, and in three rounds after the first."""
    own = {"a": {"gc_seconds": 1.0, "compile_seconds": 0.5}, "b": {"gc_seconds": 0.5}, "c": {}}
    busy = {"a": 0.16, "b": 0.01, "c": 0.3}
    facts = {
        rank: {"seconds": 5.0, "cores": 1.0, "host_busy_seconds": 5.0 * busy[host], **own[host]}
        for rank, host in enumerate("abc")
    }
    rounds, history = Job(hosts={"a": [0], "b": [1], "c": [2]}).rounds(200), History()
    for round_ in rounds[:3]:
        history.add(structs.replace(round_, facts=facts))
        assert judge(history, 3) == ()
    history.add(structs.replace(rounds[3], facts=facts))
    freeze(frozen, *judge(history, 3))


def test_a_judge_is_added_by_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function in the table is asked once its condition is met, and its finding is reported."""
    note = Finding("note", "idle", "rank 0 is idle in 3 % of its time", "")
    monkeypatch.setattr(judges, "JUDGES_OF_STEPS", (lambda context: iter([note]),))
    assert judge(History(), 4) == ()
    assert judge(Job().watch(60), 4) == (note,)


def test_memory_and_time_do_not_grow_with_the_job() -> None:
    """After 100,000 steps the history keeps less than 1 MB, and steps of the whole
    job."""
    draw = np.random.default_rng(0)
    block = draw.random((4, 1000, COLUMNS)).astype(np.float32)
    history = History()
    for first in range(0, 100_000, 1000):
        rows = {rank: block[rank] for rank in range(4)}
        history.add(Window(first, FOUR, 10**18 + first * 10**8, first, rows))
    assert sum(kept.values.nbytes for kept in (history.job, *history.ranks.values())) < 900_000
    numbers = history.job.number
    assert numbers[0] < 1000
    assert np.diff(numbers[history.job.evenly()]).max() < 100_000 / 200
    assert np.array_equal(numbers[-1024:], np.arange(100_000)[-1024:])
    assert history.steps == 99_995


def test_rounds_that_overlap_count_once() -> None:
    """Steps that a round repeats are not counted again, and a round without steps is allowed."""
    history = History()
    for round_ in Job().rounds(100):
        history.add(round_)
        history.add(round_)
    assert history.steps == 95
    assert np.all(np.diff(history.job.number) == 1)
    history.add(Window(9, FOUR, 10**18, 100))
    assert history.steps == 95


def test_a_host_that_sends_nothing_does_not_disturb(frozen: Frozen) -> None:
    """Ranks of the other hosts are judged while a host reports no steps."""
    job = Job(hosts=TWO_HOSTS, faults=[Fault(1, "forward", 0.02)])
    history = History()
    for round_ in job.rounds(200):
        rows = {rank: rows for rank, rows in round_.rows.items() if rank < 4}
        history.add(structs.replace(round_, rows=rows))
    frozen.facts(where(warnings(history)))


def test_a_host_that_misses_a_round_is_remembered() -> None:
    """While one of two hosts misses a round, it is judged by its earlier facts, and its ranks
    count; a host that is named anew with the same ranks replaces the former one."""
    facts = {"seconds": 5.0, "cores": 8.0, "host_busy_seconds": 36.0}
    history = watch(Job(hosts=TWO_HOSTS), 200, facts=dict.fromkeys(range(8), facts))
    history.add(Window(9, {"b": TWO_HOSTS["b"]}, 10**18, 200))
    busy = [f.place["hosts"] for f in judge(history, history.world_size) if f.code == "busy-host"]
    assert (busy, list(history.hosts), history.world_size) == ([["a", "b"]], ["a", "b"], 8)
    history.add(Window(10, {"c": TWO_HOSTS["a"]}, 10**18, 200))
    assert dict(history.hosts) == {"c": TWO_HOSTS["a"], "b": TWO_HOSTS["b"]}


def test_a_rank_that_ends_without_steps_is_missing() -> None:
    """Ranks that have ended are listed with their host; the findings rest on those with steps, and
    none is on all ranks. A rank whose reports end is missing after some rounds."""
    history = History()
    rounds = Job(hosts={"a": [0, 1, 2]}, transfer=0.05).rounds(1500)
    for number, round_ in enumerate(rounds):
        ranks = (0, 1) if number < 5 else (0,)
        rows = {rank: round_.rows[rank] for rank in ranks}
        history.add(structs.replace(round_, rows=rows))
        findings = judge(history, 3)
        assert "exposed-communication" not in {finding.code for finding in findings}
        missing = [f.place["ranks"] for f in findings if f.code == "missing-ranks"]
        if number:  # the first round has no step that is judged
            assert missing == [[2] if number < 5 + SILENT - 1 else [1, 2]], number


def test_the_summary_has_phases_ranks_calls_and_a_timeline() -> None:
    """The summary names the slowest rank of a phase, the last rank of a collective and its wait,
    and has a point for each part of the run."""
    job = Job(faults=[Fault(2, "backward", 0.03)])
    history = History()
    assert summarize(history) is None
    for round_ in job.rounds(600):
        calls = [
            JoinedCall("world", n, "all_reduce", 4096, n // 2, 0, 10**6, 3 * 10**6, 2, 4)
            for n in range(2 * round_.first_step, 2 * round_.first_step + 20)
        ]
        history.add(structs.replace(round_, calls=calls))
    summary = summarize(history)
    assert summary is not None
    assert summary.steps is not None
    phases = {phase.name: phase for phase in summary.steps.phases}
    assert phases["backward"].slowest_rank == 2
    assert phases["backward"].slowest_share > 0.9
    assert summary.steps.step.value == pytest.approx(0.155, rel=0.1)
    assert summary.steps.step.interval is not None
    (collective,) = summary.watched.collectives
    assert (collective.calls, collective.last_rank, collective.last_share) == (2, 2, 1)
    assert collective.wait_seconds == pytest.approx(0.003)
    assert [rank.rank for rank in summary.watched.ranks] == [0, 1, 2, 3]
    assert summary.watched.moments[-1].step == 599
    assert 100 < len(summary.watched.moments) <= 256


@pytest.mark.parametrize(("late_by", "found"), [(0.010, 1), (0.0, 0)])
def test_a_late_rank_of_a_job_without_steps_is_found_by_its_arrivals(
    frozen: Frozen, late_by: float, found: int
) -> None:
    """Collectives alone show who comes last, and by how much; without a late rank, nobody."""
    history, draw = History(), np.random.default_rng(7)
    for number in range(0, 60, 20):
        calls = []
        for index in range(number, number + 20):
            arrivals = index * 30_000_000 + draw.exponential(2e5, 4)
            arrivals[2] += late_by * 1e9
            order = np.argsort(arrivals)
            first, second, last = arrivals[order[[0, -2, -1]]].astype(int).tolist()
            call = JoinedCall(
                "0 (0-3)", index, "all_reduce", 4096, -1, first, second, last, int(order[-1]), 4
            )
            calls.append(call)
        history.add(Window(number, FOUR, number, calls=calls))
    findings = judge(history, history.world_size)
    assert len(findings) == found
    freeze(frozen, *findings)
    for finding in findings:
        assert finding.place["seconds"] == pytest.approx(late_by, rel=0.1)
    summary = summarize(history)
    assert summary is not None
    assert summary.steps is None
    assert [row.calls for row in summary.watched.collectives] == [60]
