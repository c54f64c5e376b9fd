"""Rows of steps from marks that are written by hand."""

from __future__ import annotations

import itertools
import random

import pytest
from mark_letters import SECOND, make_marks

from ddpbench.records.watched import PHASES
from ddpbench.watch.observe.steps import STEP, Step, StepBuilder
from ddpbench.watch.window import BLOCKED


def build(text: str) -> list[Step]:
    return StepBuilder().add(make_marks(text))


def rows(text: str) -> list[list[float]]:
    """Return the seconds of each step: input, forward, backward, optimizer, other, blocked."""
    assert PHASES == ("input", "forward", "backward", "optimizer", "other")
    return [[round(seconds, 6) for seconds in step.row] for step in build(text)]


def test_a_step_lies_between_the_ends_of_two_steps_of_the_anchor() -> None:
    """What comes before the first STEP, and after the last one, is in no step."""
    (step,) = build("f.FbBo|f.F..b..w.Bo..|fFbB")
    assert (step.number, step.began_ns, step.ended_ns) == (1, 11 * SECOND, 26 * SECOND)
    assert sum(step.row) == pytest.approx(15)


PARTS = {  # marks → seconds: input, forward, backward, optimizer, other, blocked
    "loader": ("|..i..If..F.b...w..B.o....|", [3, 5, 4, 5, 6, 3]),
    "no DataLoader": ("|...f..Fb..w.Bo.|", [0, 4, 3, 2, 5, 2]),
    "accumulation": ("|f.Fb.wB..f.Fb.w..Bo|", [0, 6, 4, 1, 5, 4]),
    "accumulation from a DataLoader": ("|i.If.Fb.wBi..If.Fb.w..Bo|", [5, 6, 4, 1, 5, 4]),
    "no root module": ("|...b..wBo|", [0, 4, 3, 1, 1, 1]),
    "no root module, with a DataLoader": ("|.i.I...b..wBo|", [2, 4, 3, 1, 3, 1]),
    "own end unknown": ("|f.Fb..Bo|", [0, 3, 3, 1, 2, 0]),
    "closure": ("|o.f.F.b.wB.f.F.b.wB..|", [0, 8, 4, 7, 1, 2]),
    "evaluation": ("|...e..E..f.Fb.wBo|", [0, 3, 2, 1, 11, 1]),
    "two optimizers in turn": ("|fFbwBo.O..f.Fb.wBo.|", [0, 5, 3, 4, 6, 2]),
    "two optimizers after one another": ("|fFbwBo.O.o.|", [0, 2, 1, 4, 4, 1]),
    "a DataLoader within a dataset": ("|i..i.I..If.Fb.wBo|", [8, 3, 2, 1, 3, 1]),
    "an optimizer within an optimizer": ("|o..o.O.|", [0, 0, 0, 7, 1, 0]),
    "waits within phases": ("|w.Wf.w..WFb.wW.w.wW.BowW.|", [0, 4, 4, 3, 3, 12]),
    "waits, no root module": ("|..w.W..w.Wb.wBo..w.W.|", [0, 7, 2, 5, 1, 7]),
    "nothing known": ("|......|", [0, 0, 0, 0, 7, 0]),
}


@pytest.mark.parametrize("name", PARTS)
def test_each_moment_of_a_step_is_counted_in_one_phase(name: str) -> None:
    """The phases of a step are those that the marks show, and their sum is the step."""
    text, row = PARTS[name]
    assert rows(text) == [row]
    assert sum(row) == len(text) - 1


def test_optimizers_that_step_within_backward() -> None:
    """Where each parameter's optimizer steps in a hook, backward goes on into the next step."""
    text = "|f.Fb.o|.o.O.wBf.Fb.o|"
    assert rows(text)[1] == [0, 3, 6, 3, 1, 1]


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


def test_rows_are_by_the_clock_of_the_device() -> None:
    """A device that takes twice as long has rows twice as long; begin and end stay."""
    marks = make_marks("|f.Fb.wBo|")
    (step,) = StepBuilder().add([(kind, ns, 7 + 2 * ns, step) for kind, ns, _, step in marks])
    (host,) = StepBuilder().add(marks)
    assert step.row == pytest.approx([2 * one for one in host.row])
    assert (step.began_ns, step.ended_ns) == (host.began_ns, host.ended_ns)


def test_events_that_cross_count_as_one_moment() -> None:
    """Events of two streams may be taken in another order than recorded: no phase is negative."""
    marks = make_marks("|f.Fb.wBo|")
    crossed = [(k, ns, ns - 3 * SECOND if k == BLOCKED else ns, step) for k, ns, _, step in marks]
    (step,) = StepBuilder().add(crossed)
    assert min(step.row) == 0.0
    assert sum(step.row) == pytest.approx(9)


def test_memory_does_not_grow_with_what_happens_in_a_step() -> None:
    """A step with 10,000 micro-batches keeps its row alone."""
    (step,) = build("|" + "fFbwB" * 10_000 + "o|")
    assert sum(step.row) == pytest.approx(50_002)
    assert step.row[BLOCKED] == pytest.approx(10_000)
