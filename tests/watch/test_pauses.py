"""Long steps of one rank, joined over ranks, and what becomes of them over a whole job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from frozen import Frozen
from test_judge import where

from ddpbench.hang.places import describe_line
from ddpbench.records.watched import WatchedBalance
from ddpbench.watch.judging.history import History
from ddpbench.watch.judging.judge import judge
from ddpbench.watch.judging.pauses import KINDS, PauseHistory
from ddpbench.watch.observe.long_steps import LongSteps, Look
from ddpbench.watch.observe.steps import Step
from ddpbench.watch.window import (
    BLOCKED,
    COLUMNS,
    LONG_STEPS,
    LongStep,
    Window,
    join_long_steps,
)

USUAL = (0.001, 0.003, 0.004, 0.001, 0.0005, 0.0005)  # seconds of a step
OTHER = 4
SAVE, WAIT, MODEL = "train.py:31 torch.save", "train.py:33 dist.barrier", "train.py:20 model"


def make_steps(count: int, extra: dict[int, tuple[int, float]]) -> list[Step]:
    """Steps from 1 on; extra: step → column, and how many seconds more than usual."""
    draw, end_ns, steps = np.random.default_rng(3), 10**9, []
    for number in range(1, count + 1):
        row = np.array(USUAL) * draw.uniform(0.97, 1.03)
        column, seconds = extra.get(number, (OTHER, 0.0))
        row[column] += seconds
        begin_ns, end_ns = end_ns, end_ns + round(row.sum() * 1e9)
        steps.append(Step(number, begin_ns, end_ns, tuple(row)))
    return steps


def look(steps: Sequence[Step], lines: dict[int, str]) -> list[Look]:
    """A look every 5 ms; lines: step → line in the second half of it."""
    looks = []
    for ns in range(steps[0].began_ns, steps[-1].ended_ns, 5 * 10**6):
        step = next(step for step in steps if step.ended_ns > ns)
        late = ns > step.began_ns + sum(USUAL) * 1e9
        looks.append(Look(ns, 0.005, lines.get(step.number, MODEL) if late else MODEL))
    return looks


def find(steps: Sequence[Step], looks: Sequence[Look] = (), rank: int = 0) -> list[LongStep]:
    long = LongSteps(rank)
    long.add(steps, looks)
    return sorted(long.take(2**62), key=lambda step: step.number)


def a_long_step(number: int, rank: int, own: float, waited: float = 0.0, **more: Any) -> LongStep:
    extra = [0.0] * COLUMNS
    extra[OTHER], extra[BLOCKED] = own, waited
    return LongStep(number, number * 10**7, rank, tuple(extra), **more, shared=own, waited=waited)


def test_long_steps_are_found_with_their_line() -> None:
    """Each of them, with how much longer than usual it took, in which part, and at which line."""
    late = range(20, 300, 20)
    steps = make_steps(300, dict.fromkeys(late, (OTHER, 0.05)))
    found = find(steps, look(steps, dict.fromkeys(late, SAVE)))
    assert [one.number for one in found] == [*late]
    assert [one.own for one in found] == pytest.approx([0.05] * len(found), rel=0.02)
    assert {line for one in found for line in one.lines} == {SAVE}
    assert sum(one.lines[SAVE] for one in found) == pytest.approx(0.05 * len(found), rel=0.1)


def test_lines_of_usual_steps_are_shares_of_a_step() -> None:
    long = LongSteps(0)
    steps = make_steps(200, {})
    long.add(steps, look(steps, {}))
    assert long.usual_lines() == {MODEL: pytest.approx(0.01, rel=0.1)}


def test_steps_that_stay_longer_are_no_long_steps() -> None:
    """A new level, a slow growth, and steps of any length."""
    draw = np.random.default_rng(0)
    level = dict.fromkeys(range(100, 401), (OTHER, 0.02))
    growth = {n: (OTHER, n * 1e-4) for n in range(1, 401)}
    any_length = {n: (OTHER, draw.uniform(0, 0.03)) for n in range(1, 401)}
    for extra in (level, growth, any_length):
        assert len(find(make_steps(400, extra))) <= 4


def test_a_window_has_the_longest_steps_that_ended_by_its_end() -> None:
    """All ranks report a step in the same round; the others are in the next one."""
    shorter, longer = range(5, 801, 5), range(7, 801, 200)
    extra = dict.fromkeys(shorter, (OTHER, 0.05)) | dict.fromkeys(longer, (OTHER, 0.5))
    steps, long = make_steps(810, extra | {805: (OTHER, 0.05)}), LongSteps(0)
    long.add(steps, ())
    found = long.take(steps[802].ended_ns)
    assert {*longer} <= {step.number for step in found}
    assert len(found) == LONG_STEPS
    assert [one.number for one in long.take(2**62)] == [805]


def test_joined_steps_have_the_rank_with_the_most_time_of_its_own() -> None:
    """Joined in any order, by host or at once."""
    steps = [
        a_long_step(7, 0, 0.25, lines={SAVE: 0.25}),
        a_long_step(7, 1, 0.0, 0.24, lines={WAIT: 0.24}),
        a_long_step(7, 2, 0.01, 0.25, lines={WAIT: 0.25}),
    ]
    (joined,) = join_long_steps(steps)
    assert (joined.rank, joined.ranks, joined.shared) == (0, 3, 0.0)
    assert join_long_steps([*join_long_steps(steps[1:]), steps[0]]) == [joined]


def remember(steps: Sequence[LongStep], count: int = 1000) -> PauseHistory:
    """What is remembered of a job of so many steps; each rank reports in rounds of 50 steps."""
    history = PauseHistory()
    for first in range(0, count, 50):
        history.add([step for step in steps if first <= step.number < first + 50])
    return history


def save_every(every: int, first: int = 0, count: int = 1000) -> list[LongStep]:
    """Rank 0 saves; rank 1 waits."""
    return [
        step
        for number in range(first or every, count, every)
        for step in (
            a_long_step(number, 0, 0.25, lines={SAVE: 0.25}),
            a_long_step(number, 1, 0.0, 0.25, lines={WAIT: 0.25}),
        )
    ]


@pytest.mark.parametrize("every", [5, 20, 499])
def test_pauses_are_counted_with_their_period(every: int) -> None:
    """Over the whole job, whatever happens in between."""
    draw = np.random.default_rng(every)
    others = draw.choice(1500, max(1, 150 // every), replace=False)
    noise = [a_long_step(int(n), 0, 0.2, lines={}) for n in others]
    (pause, *_) = remember(save_every(every, count=1500) + noise, 1500).summarize(1500)
    assert (pause.rank, pause.phase, pause.line) == (0, "other", SAVE)
    assert pause.every == every
    assert pause.seconds == pytest.approx(0.25, rel=0.05)
    assert pause.mean_seconds == pytest.approx(0.25 / every, rel=0.3)  # with the others


def test_pauses_at_random_steps_have_no_period() -> None:
    """In 199 of 200 jobs; three of four may be equally far apart by chance."""
    found = []
    for seed in range(200):
        steps = np.random.default_rng(seed).choice(1000, 4 + seed % 30, replace=False)
        history = remember([a_long_step(int(n), 0, 0.2, lines={SAVE: 0.2}) for n in steps])
        found += [pause.every for pause in history.summarize(1000)]
    assert sum(map(bool, found)) <= 1


def test_what_all_ranks_do_is_a_pause_of_all() -> None:
    """And of none if all are only blocked for longer."""
    every = range(50, 1000, 50)
    own = [a_long_step(n, rank, 0.5, lines={SAVE: 0.4}) for n in every for rank in range(2)]
    blocked = [a_long_step(n + 9, r, 0.0, 0.1, lines={}) for n in every for r in range(2)]
    first, second = remember(own + blocked).summarize(1000)
    assert (first.rank, first.phase, first.every, first.count) == (None, "other", 50, 19)
    assert (second.rank, second.phase, second.every, second.count) == (None, "blocked", 50, 19)


def test_pauses_at_different_lines_are_different() -> None:
    """One without a line is of the kind that has such a size and comes most often. Those of one
    period are of one kind: after a call that holds Python's lock, the line is a later one."""
    lines = {n: {SAVE: 0.2} for n in range(50, 300, 50)} | {300: {}}
    lines |= {n: {MODEL: 0.2} for n in range(307, 500, 50)}
    history = remember([a_long_step(n, 0, 0.2, lines=one) for n, one in lines.items()])
    assert [(kind.line, kind.count) for kind in history.summarize(500)] == [(SAVE, 6), (MODEL, 4)]
    seen = {200: WAIT, 250: MODEL}
    every = [a_long_step(n, 0, 0.1, lines={seen.get(n, SAVE): 0.1}) for n in range(50, 1000, 50)]
    (kind,) = remember(every).summarize(1000)
    assert (kind.every, kind.count) == (50, len(every))


def test_kinds_of_pauses_are_bounded() -> None:
    """The ones that cost most stay."""
    steps = [a_long_step(n, n, 0.1 + n, lines={}) for n in range(1, 2 * KINDS)]
    kinds = remember(steps).kinds
    assert len(kinds) == KINDS
    assert max(kind.rank for kind in kinds) == 2 * KINDS - 1


def judge_pauses(steps: Sequence[LongStep], lines: dict[str, float], count: int = 1000) -> Any:
    """The findings on a job with steps of 10 ms and these pauses; lines: of a usual step."""
    history = History()
    history.add(Window(0, {"a": [0, 1]}, 10**9, long_steps=[*steps], lines={0: lines}))
    together = sum(kind.seconds for kind in history.long_steps.kinds)
    history.balance = WatchedBalance(1.0, count, 0.01 * count, len(steps), together, 1.0)
    return [finding for finding in judge(history, 2) if finding.code == "pauses"]


def test_findings_on_pauses(frozen: Frozen) -> None:
    """Regular ones, those at an unusual line and very long ones are warnings; others are notes, if
    they cost much."""
    usual = {MODEL: 0.005}
    irregular = [3, 90, 311, 312, 500, 870]
    cases = [
        save_every(20),
        save_every(20, 500),
        [a_long_step(n, rank, 0.5, lines={SAVE: 0.4}) for n in (50, 100, 150) for rank in (0, 1)],
        [a_long_step(n, 0, 0.2, lines={SAVE: 0.2}) for n in irregular],
        [a_long_step(n, 0, 0.2, lines={MODEL: 0.2}) for n in irregular],
        [a_long_step(n, 0, 0.02, lines={MODEL: 0.02}) for n in irregular],
        [a_long_step(700, 1, 10.0, lines={MODEL: 10.0})],
        [a_long_step(n, rank, 0.0, 0.2, lines={}) for n in irregular for rank in (0, 1)],
    ]
    found = [judge_pauses(steps, usual) for steps in cases]
    frozen.facts([where(findings) for findings in found])
    frozen.text(
        "\n".join(f.sentence + "\n    Next: " + f.next_step for each in found for f in each)
    )


def test_a_line_is_named_with_what_it_calls() -> None:
    """Of the program's own code, also in a library's callback; nothing of arguments is shown."""
    seen = []

    def save(*secret: object) -> SimpleNamespace:
        seen.append(describe_line(sys._getframe(1)))
        return SimpleNamespace(again=save)

    line = sys._getframe().f_lineno
    save("secret", (save("a)("), 1))
    SimpleNamespace(deep=SimpleNamespace(save=save)).deep.save(
        "secret",
    )
    list(map(save, [1]))
    name = "test_pauses.py"
    assert seen[0] == seen[1] == f"{name}:{line + 1} save"
    assert seen[3].startswith(f"{name}:")
    assert not any("secret" in each for each in seen)
