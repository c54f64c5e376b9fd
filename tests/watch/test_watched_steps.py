"""Rows of steps from marks that are written by hand."""

from __future__ import annotations

import itertools
import random

import pytest
from mark_letters import SECOND, make_marks

from ddpbench.watch.observe.steps import STEP, Step, StepBuilder
from ddpbench.watch.window import BLOCKED


def build(text: str) -> list[Step]:
    return StepBuilder().add(make_marks(text))


def rows(text: str) -> list[list[float]]:
    """Return the seconds of each step: input, forward, backward, optimizer, other, blocked."""
    return [[round(seconds, 6) for seconds in step.row] for step in build(text)]


def test_a_step_lies_between_the_ends_of_two_steps_of_the_anchor() -> None:
    """What comes before the first STEP, and after the last one, is in no step."""
    (step,) = build("f.FbBo|f.F..b..w.Bo..|fFbB")
    assert (step.number, step.began_ns, step.ended_ns) == (1, 11 * SECOND, 26 * SECOND)
    assert sum(step.row) == pytest.approx(15)


PARTS = {  # marks → seconds: input, forward, backward, optimizer, other, blocked
    "loader": ("|..i..If..F.b...w..B.o....|", [3, 5, 4, 5, 6, 3]),
    "no DataLoader": ("|...f..Fb..w.Bo.|", [0, 4, 3, 2, 5, 2]),
    "accumulation from a DataLoader": ("|i.If.Fb.wBi..If.Fb.w..Bo|", [5, 6, 4, 1, 5, 4]),
    "no root module": ("|...b..wBo|", [0, 4, 3, 1, 1, 1]),
    "own end unknown": ("|f.Fb..Bo|", [0, 3, 3, 1, 2, 0]),
    "closure": ("|o.f.F.b.wB.f.F.b.wB..|", [0, 8, 4, 7, 1, 2]),
    "evaluation": ("|...e..E..f.Fb.wBo|", [0, 3, 2, 1, 11, 1]),
    "two optimizers in turn": ("|fFbwBo.O..f.Fb.wBo.|", [0, 5, 3, 4, 6, 2]),
    "two optimizers after one another": ("|fFbwBo.O.o.|", [0, 2, 1, 4, 4, 1]),
    "an optimizer within an optimizer": ("|o..o.O.|", [0, 0, 0, 7, 1, 0]),
    "waits within phases": ("|w.Wf.w..WFb.wW.w.wW.BowW.|", [0, 4, 4, 3, 3, 12]),
    "nothing known": ("|......|", [0, 0, 0, 0, 7, 0]),
}


@pytest.mark.parametrize("name", PARTS)
def test_each_moment_of_a_step_is_counted_in_one_phase(name: str) -> None:
    """The phases of a step are those that the marks show, and their sum is the step."""
    text, row = PARTS[name]
    assert rows(text) == [row]
    assert sum(row) == len(text) - 1


def test_what_is_lost_spoils_one_step_only() -> None:
    """An end that never comes, as after an exception in step(), is forgotten with its step."""
    lost = "|f.Fb.wBo..f.Fb.wBo|"  # the first step() raised
    whole = "f.Fb.wBo|"
    assert rows(lost + whole)[1] == rows("|" + whole)[0]
    stuck = "|f.Fb.wBf...o|fFb.wBo|"  # a forward's end was lost
    assert rows(stuck + whole)[2] == rows("|" + whole)[0]


def test_lost_steps_are_not_joined_into_one() -> None:
    """If the marks of a whole step are lost, no step is built across the gap."""
    marks = make_marks("|f.Fb.wBo|f.Fb.wBo|f.Fb.wBo|")
    steps = [one for one in marks if one[0] == STEP]
    kept = [one for one in marks if not steps[0][1] < one[1] <= steps[1][1]]
    assert [step.number for step in StepBuilder().add(kept)] == [3]


def test_marks_may_come_in_any_portions() -> None:
    """The steps do not depend on when the marks were taken."""
    text = "fFbwB" + "|f.Fb.wB..f.Fb.w..Bo" * 30 + "|"
    marks, builder = make_marks(text), StepBuilder()
    cuts = sorted(random.Random(1).sample(range(len(marks)), 40))
    portions = [marks[a:b] for a, b in itertools.pairwise([0, *cuts, len(marks)])]
    assert [step for one in portions for step in builder.add(one)] == build(text)


def test_events_that_cross_count_as_one_moment() -> None:
    """Events of two streams may be taken in another order than recorded: no phase is negative."""
    marks = make_marks("|f.Fb.wBo|")
    crossed = [(k, ns, ns - 3 * SECOND if k == BLOCKED else ns, step) for k, ns, _, step in marks]
    (step,) = StepBuilder().add(crossed)
    assert min(step.row) == 0.0
    assert sum(step.row) == pytest.approx(9)
