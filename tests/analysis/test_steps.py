"""Figures of a DDP step from samples whose truth is known, and against plain loops."""

import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stored_steps import (
    MS,
    a_step_result,
    a_step_run,
    a_step_summary,
    some_replicas,
    step_samples,
)

from ddpbench.analysis import step_lines, steps
from ddpbench.records.schema import Part, StepResult, StepSummary


def parts(summary: StepSummary) -> dict[str, Part]:
    """The budget by name."""
    return {part.name: part for part in summary.budget}


# --- step and phases ------------------------------------------------------------------------------


def test_the_step_is_the_slowest_ranks_wall_over_the_steps_in_a_row() -> None:
    """Per round the largest wall / K, then the median over rounds, with an interval of rounds;
    samples a second follow from it."""
    samples = step_samples(world=3, rounds=11, in_a_row=4, noise=0.05)
    found = steps.summarise(samples, 192, 9)
    each = [max(int(w[r]) for w in samples.walls["ddp"]) / 4 / 1e9 for r in range(11)]
    assert found.step.value == pytest.approx(statistics.median(each))
    assert found.step.interval is not None
    assert found.step.interval.of == "median of 11 rounds"
    assert min(each) <= found.step.interval.low < found.step.interval.high <= max(each)
    assert found.samples_per_second == pytest.approx(192 / found.step.value)
    assert (found.rounds, found.in_a_row, found.warm_up) == (11, 4, 9)


def test_phases_are_those_of_the_slowest_rank_of_each_step() -> None:
    """Forward, backward, optimizer and step against plain loops: the slowest rank's mean over the
    steps of a round, the fastest's, and who was slowest how often."""
    samples = step_samples(world=4, rounds=7, in_a_row=3, noise=0.05, late=(2, 9.0))
    stamps = samples.stamps["ddp"]
    found = steps.summarise(samples, 1, 0).phases
    assert [phase.name for phase in found] == ["forward", "backward", "optimizer", "step"]
    for phase, (a, b) in zip(found, [(0, 1), (1, 2), (2, 3), (0, 3)], strict=True):
        slowest, fastest, who = [], [], []
        for r in range(7):
            spans = [[int(s[r, k, b] - s[r, k, a]) for s in stamps] for k in range(3)]
            slowest.append(statistics.fmean(max(span) for span in spans))
            fastest.append(statistics.fmean(min(span) for span in spans))
            who += [span.index(max(span)) for span in spans]
        assert phase.slowest.value == pytest.approx(statistics.median(slowest) / 1e9)
        assert phase.fastest_seconds == pytest.approx(statistics.median(fastest) / 1e9)
        assert who.count(phase.slowest_rank) == max(map(who.count, who))
        assert phase.slowest_share == who.count(phase.slowest_rank) / len(who)
    assert (found[0].slowest_rank, found[0].slowest_share) == (2, 1.0)


# --- the budget -----------------------------------------------------------------------------------


def test_the_budget_finds_what_was_put_in() -> None:
    """Compute, copies, exposed and hidden communication and what neither backward nor buckets on
    their way explain lie within their intervals' reach of the truth, and are resolved."""
    samples = step_samples(noise=0.01, rounds=60, compute=60, copies=2, exposed=18)
    found = steps.summarise(samples, 128, 16)
    # Four buckets of 8 ms, the last of which is handed over at the end of backward.
    truth = {"compute": 60, "bucket copies": 2, "exposed communication": 18, "exposed transfer": 8,
             "communication overhead": 10, "hidden communication": 24,
             "communication": 32}  # fmt: skip
    budget = parts(found)
    assert list(budget)[:7] == list(truth)
    for name, wanted in truth.items():
        assert budget[name].figure.value * 1e3 == pytest.approx(wanted, abs=0.5), name
        assert budget[name].resolved, name
        assert budget[name].share == pytest.approx(wanted / 80, abs=0.01)


def assert_adds_up(summary: StepSummary) -> None:
    """Its rows make the step, exposed communication and communication, but for rounding."""
    values = {part.name: part.figure.value for part in summary.budget}
    copies = values.get("bucket copies", 0.0)
    compute = values.get("compute", values.get("compute and copies", 0.0))
    exposed, transfer = values["exposed communication"], values["exposed transfer"]
    assert compute + copies + exposed == pytest.approx(summary.step.value)
    assert transfer + values["communication overhead"] == pytest.approx(exposed)
    assert transfer + values["hidden communication"] == pytest.approx(values["communication"])
    for part in summary.budget:
        if part.rank is None:
            assert part.share == pytest.approx(part.figure.value / summary.step.value)
        interval = part.figure.interval
        assert interval is None or interval.low <= part.figure.value <= interval.high


@pytest.mark.parametrize("noise", [0.002, 0.2])
@pytest.mark.parametrize("arms", [("ddp", "noop", "no_sync", "timed"), ("ddp", "noop", "timed")])
def test_the_budget_adds_up_in_one_launch_and_over_several(
    noise: float, arms: tuple[str, ...]
) -> None:
    """However noisy the rounds are, each row lies in its interval and the rows make what they are
    parts of; medians of differences alone would miss the step."""
    found = []
    for seed in range(7):
        samples = step_samples(world=3, rounds=12, noise=noise, late=(1, 8), seed=seed)
        stamps = {name: samples.stamps[name] for name in arms}
        found.append(steps.summarise(replace(samples, stamps=stamps), 1, 0))
    for each in found:
        assert_adds_up(each)
    for launches in (found[:2], found):
        summary = only(
            *(a_step_result(launch=n, summary=each) for n, each in enumerate(launches))
        ).summary
        assert summary is not None
        assert_adds_up(summary)


def test_differences_are_paired_round_by_round() -> None:
    """A machine that becomes twice as slow in the course of the rounds, for all arms alike, leaves
    a difference of 1 % of the step resolved."""
    samples = step_samples(copies=0.8, noise=0.0005)
    drift = np.linspace(0, 80 * MS, 24).astype(np.int64)[None, :, None, None] * np.array(
        [0, 0, 1, 1]
    )
    drifting = {name: walls + 5 * drift[..., 0, 3] for name, walls in samples.walls.items()}
    copies = parts(steps.summarise(replace(samples, walls=drifting), 1, 0))["bucket copies"]
    assert copies.resolved
    assert copies.figure.value * 1e3 == pytest.approx(0.8, abs=0.1)


def test_noise_is_not_resolved() -> None:
    """Without copies and a late rank, hardly one of 40 runs resolves any."""
    found = [
        parts(a_step_summary(copies=0, world=4, rounds=12, noise=0.02, buckets=0, seed=seed))
        for seed in range(40)
    ]
    assert sum(budget["bucket copies"].resolved for budget in found) <= 3
    late = [part for budget in found for part in budget.values() if part.rank is not None]
    assert len(late) == 40
    assert sum(part.resolved for part in late) <= 3
    assert all(part.figure.interval is not None for part in late)


@pytest.mark.parametrize(("delay", "resolved"), [(8.0, True), (1.2, False), (0.0, False)])
def test_a_late_rank_is_named_from_two_percent_of_the_step_on(delay: float, resolved: bool) -> None:
    """The rank whose own time is the longest; its confidence is corrected for the ranks it was
    chosen from."""
    found = a_step_summary(world=3, late=(1, delay))
    (part,) = [part for part in found.budget if part.rank is not None]
    assert part.resolved is resolved
    assert part.figure.interval is not None
    assert part.figure.interval.confidence == pytest.approx(1 - 0.05 / 3)
    if resolved:
        assert (part.name, part.rank) == ("waiting for rank 1", 1)
        assert part.figure.value * 1e3 == pytest.approx(delay, abs=0.3)
    assert {bucket.late_rank for bucket in found.buckets} == ({1} if resolved else {None})


def test_parts_without_their_arm_are_left_out() -> None:
    """Without no_sync compute and copies are one part and the gain is that of communication; with
    DDP alone, or one rank, there is nothing to subtract."""
    samples = step_samples()

    def budget(*arms: str, **other: Any) -> StepSummary:
        stamps = {name: samples.stamps[name] for name in arms}
        return steps.summarise(replace(samples, stamps=stamps, **other), 1, 0)

    names = set(parts(budget("ddp", "noop", "timed")))
    assert {"compute and copies", "exposed communication", "communication"} <= names
    assert not {"compute", "bucket copies"} & names
    alone = budget("ddp", bucket_stamps=None)
    assert (alone.budget, alone.buckets) == ((), ())
    one = steps.summarise(step_samples(world=1), 1, 0)
    assert list(parts(one)) == ["compute"]
    assert {bucket.late_rank for bucket in one.buckets} == {None}


def test_communication_is_split_where_backward_ends() -> None:
    """The time in which any bucket is on its way, gaps left out and overlaps counted once, in the
    rank where that is least: waiting for a late rank is neither communication nor hidden. What
    comes after the last bucket is handed over is exposed, the rest hidden. Without stamps it is not
    known."""
    samples = step_samples(rounds=1, buckets=3)
    spans = [[(0, 10), (30, 50), (40, 45)], [(5, 60), (50, 65), (90, 100)]]  # 30 and 70
    stamps = np.array(spans, np.int64)[:, None] * MS
    for order in (slice(None), slice(None, None, -1)):
        found = parts(steps.summarise(replace(samples, bucket_stamps=stamps[:, :, order]), 1, 0))
        assert found["communication"].figure.value == pytest.approx(0.030)
        assert found["exposed transfer"].figure.value == pytest.approx(0.010)  # from 40 on
        assert found["hidden communication"].figure.value == pytest.approx(0.020)
    none = parts(steps.summarise(replace(samples, bucket_stamps=None), 1, 0))
    assert not {"communication", "exposed transfer", "communication overhead"} & set(none)


# --- buckets --------------------------------------------------------------------------------------


def test_buckets_are_told_without_a_common_clock() -> None:
    """Wire, wait and hand-over of each bucket against plain loops; names and sizes as given."""
    samples = step_samples(world=3, rounds=7, noise=0.05, late=(2, 5.0))
    found = steps.summarise(samples, 1, 0).buckets
    assert [(b.index, b.nbytes, b.parameters, b.first, b.last) for b in found] == [
        tuple(vars(info).values()) for info in samples.buckets
    ]
    stamps = samples.bucket_stamps
    assert stamps is not None
    for b, bucket in enumerate(found):
        each = [[int(s[r, b, 1] - s[r, b, 0]) for s in stamps] for r in range(7)]
        handed = [max(int(s[r, b, 0]) for s in stamps) for r in range(7)]
        wait = statistics.median(max(times) - min(times) for times in each)
        assert bucket.wire.value == pytest.approx(statistics.median(map(min, each)) / 1e9)
        assert bucket.wait.value == pytest.approx(wait / 1e9)
        assert bucket.handed_seconds == pytest.approx(statistics.median(handed) / 1e9)


# --- one line a case, over launches ---------------------------------------------------------------


def only(*results: StepResult) -> step_lines.StepLine:
    """The one line of these results."""
    (line,) = step_lines.lines(a_step_run(*results))
    return line


def test_several_launches_give_the_median_of_their_medians() -> None:
    """Step, phases, parts and buckets over six launches, with intervals over them."""
    found = [a_step_summary(seed=n, compute=60 + n, noise=0.001) for n in range(6)]
    line = only(*(a_step_result(launch=n, summary=each) for n, each in enumerate(found)))
    summary = line.summary
    assert summary is not None
    assert summary.rounds == 6 * 24
    values = sorted(each.step.value for each in found)
    assert summary.step.value == pytest.approx(statistics.median(values))
    assert summary.step.interval is not None
    assert (summary.step.interval.low, summary.step.interval.high) == (values[0], values[-1])
    assert parts(summary)["exposed communication"].resolved
    assert summary.buckets[2].wire.value == pytest.approx(
        statistics.median(each.buckets[2].wire.value for each in found)
    )


def test_below_six_launches_a_part_is_resolved_where_it_is_in_each() -> None:
    """Two launches give no interval; a part that one of them does not resolve is not resolved, and
    a rank is to blame only where it is the same."""
    clear, noisy = a_step_summary(late=(1, 9)), a_step_summary(late=(1, 9), exposed=0, noise=0.05)
    same = only(*(a_step_result(launch=n, summary=clear) for n in range(2)))
    mixed = only(a_step_result(summary=clear), a_step_result(launch=1, summary=noisy))
    other = only(
        a_step_result(summary=clear), a_step_result(launch=1, summary=a_step_summary(late=(0, 9)))
    )
    exposed, late = same.part(steps.EXPOSED), same.part(steps.WAITING)
    assert exposed is not None
    assert (exposed.resolved, exposed.figure.interval) == (True, None)
    assert late is not None
    assert (late.resolved, late.rank) == (True, 1)
    unresolved = mixed.part(steps.EXPOSED)
    assert unresolved is not None
    assert not unresolved.resolved
    assert other.part(steps.WAITING) is None


@pytest.mark.parametrize(
    ("flag", "raising", "not_raising"),
    [
        ("DIFFER", {"replicas": some_replicas(equal=False, ok=False)}, {}),
        ("NONFINITE", {"replicas": some_replicas(ok=False)}, {"replicas": None}),
        ("imprecise", {"summary": a_step_summary(rounds=5)}, {"summary": a_step_summary(rounds=6)}),
    ],
)
def test_each_flag_is_raised_alone_and_only_with_cause(
    flag: str, raising: dict[str, Any], not_raising: dict[str, Any]
) -> None:
    """On either side of its threshold, and in one launch of three."""
    assert only(a_step_result(**raising)).flags == (flag,)
    assert only(a_step_result(**not_raising)).flags == ()
    if flag != "imprecise":
        quiet = [a_step_result(launch=n) for n in range(1, 3)]
        assert flag in only(a_step_result(**raising), *quiet).flags


def test_the_time_of_a_bucket_is_explained() -> None:
    """What exceeds the reduction alone is time beside other buckets, then time in which backward
    computes, then unexplained. The rank that waits least shows it, here rank 0."""
    stamps = np.array([[0, 10], [8, 30], [25, 45]]) * MS  # of three buckets: handed over, reduced
    late = np.array([stamps, stamps - np.array([5, 0]) * MS])  # rank 1 waits 5 ms more
    samples = replace(
        step_samples(rounds=6, buckets=3),
        bucket_stamps=np.stack([late] * 6, axis=1),
        alone=np.full((2, 6, 3), [10, 12, 5]) * MS,
    )
    explained = [
        [figure.value * 1e3 for figure in (b.wire, b.alone, b.queue, b.contention, b.unexplained)]
        for b in steps.summarise(samples, 1, 0).buckets
        if b.alone and b.queue and b.contention and b.unexplained
    ]
    assert explained == [
        pytest.approx(parts) for parts in ([10, 10, 0, 0, 0], [22, 12, 7, 3, 0], [20, 5, 5, 0, 10])
    ]
