"""Rows of steps from marks that are written by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from ddpbench.records.watched import PHASES
from ddpbench.watch.observe.steps import (
    BACKWARD,
    END,
    FORWARD,
    INPUT,
    OPTIMIZER,
    OTHER,
    STEP,
    Mark,
    Step,
    StepBuilder,
)
from ddpbench.watch.window import BLOCKED

KINDS = {
    "i": INPUT,
    "f": FORWARD,
    "b": BACKWARD,
    "w": BLOCKED,
    "o": OPTIMIZER,
    "e": OTHER,
    "W": BLOCKED + END,
    "I": INPUT + END,
    "F": FORWARD + END,
    "B": BACKWARD + END,
    "O": OPTIMIZER + END,
    "E": OTHER + END,
    "|": STEP,
}
SECOND = 10**9


def make_marks(text: str, begin: int = 5) -> list[Mark]:
    """Marks one second apart for each character: a letter begins a phase, its capital ends it.

    `|` ends a step, `.` is a second without a mark. A `w` without its `W` is the end of the rank's
    own backward."""
    marks, step = [], -1
    for second, letter in enumerate(text, begin):
        step += letter == "|"
        if letter != ".":
            marks.append((KINDS[letter], second * SECOND, second * SECOND, step))
    return marks


def build(text: str) -> list[Step]:
    return StepBuilder().add(make_marks(text))


def rows(text: str) -> list[dict[str, float]]:
    """Phase → seconds, without those that took none, of each step."""
    names = (*PHASES, "blocked")
    return [
        {name: round(one, 6) for name, one in zip(names, step.row, strict=True) if one}
        for step in build(text)
    ]


def test_a_step_lies_between_the_ends_of_two_steps_of_the_anchor() -> None:
    """What comes before the first STEP, and after the last one, is in no step."""
    (step,) = build("f.FbBo|f.F..b..w.Bo..|fFbB")
    assert (step.number, step.began_ns, step.ended_ns) == (1, 11 * SECOND, 26 * SECOND)
    assert sum(step.row) == pytest.approx(15)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        pytest.param(
            "|..i..If..F.b...w..B.o....|",
            {
                "other": 3 + 1 + 1 + 1,
                "input": 3,
                "forward": 3 + 2,
                "backward": 4,
                "blocked": 3,
                "optimizer": 5,
            },
            id="loader",
        ),
        pytest.param(
            "|...f..Fb..w.Bo.|",
            {"other": 4 + 1, "forward": 3 + 1, "backward": 3, "blocked": 2, "optimizer": 2},
            id="no DataLoader",
        ),
        pytest.param(
            "|f.Fb.wB..f.Fb.w..Bo|",
            {
                "other": 1 + 3 + 1,
                "forward": 6,
                "backward": 4,
                "blocked": 1 + 3,
                "optimizer": 1,
            },
            id="accumulation",
        ),
        pytest.param(
            "|i.If.Fb.wBi..If.Fb.w..Bo|",
            {"input": 2 + 3, "forward": 6, "backward": 4, "blocked": 4, "other": 5, "optimizer": 1},
            id="accumulation from a DataLoader",
        ),
        pytest.param(
            "|...b..wBo|",
            {"forward": 4, "backward": 3, "blocked": 1, "other": 1, "optimizer": 1},
            id="no root module",
        ),
        pytest.param(
            "|.i.I...b..wBo|",
            {"other": 3, "input": 2, "forward": 4, "backward": 3, "blocked": 1, "optimizer": 1},
            id="no root module, with a DataLoader",
        ),
        pytest.param(
            "|f.Fb..Bo|",
            {"forward": 3, "backward": 3, "other": 1 + 1, "optimizer": 1},
            id="own end unknown",
        ),
        pytest.param(
            "|o.f.F.b.wB.f.F.b.wB..|",
            {"other": 1, "optimizer": 2 + 2 + 3, "forward": 8, "backward": 4, "blocked": 2},
            id="closure",
        ),
        pytest.param(
            "|...e..E..f.Fb.wBo|",
            {
                "other": 4 + 3 + 3 + 1,
                "forward": 3,
                "backward": 2,
                "blocked": 1,
                "optimizer": 1,
            },
            id="evaluation",
        ),
        pytest.param(
            "|fFbwBo.O..f.Fb.wBo.|",
            {"forward": 1 + 1 + 2 + 1, "backward": 1 + 2, "blocked": 2}
            | {"other": 1 + 3 + 1 + 1, "optimizer": 2 + 2},
            id="two optimizers in turn",
        ),
        pytest.param(
            "|fFbwBo.O.o.|",
            {"forward": 2, "backward": 1, "blocked": 1, "other": 1 + 1 + 2, "optimizer": 4},
            id="two optimizers after one another",
        ),
        pytest.param(
            "|i..i.I..If.Fb.wBo|",
            {
                "other": 1 + 1 + 1,
                "input": 8,
                "forward": 3,
                "backward": 2,
                "blocked": 1,
                "optimizer": 1,
            },
            id="a DataLoader within a dataset",
        ),
        pytest.param(
            "|o..o.O.|", {"other": 1, "optimizer": 7}, id="an optimizer within an optimizer"
        ),
        pytest.param(
            "|w.Wf.w..WFb.wW.w.wW.BowW.|",
            {"other": 3, "blocked": 2 + 3 + 1 + 5 + 1, "forward": 2 + 1 + 1, "backward": 2 + 2}
            | {"optimizer": 1 + 2},
            id="waits within phases",
        ),
        pytest.param(
            "|..w.W..w.Wb.wBo..w.W.|",
            {"forward": 3 + 3 + 1, "blocked": 2 + 2 + 1 + 2, "backward": 2}
            | {"other": 1, "optimizer": 3 + 2},
            id="waits, no root module",
        ),
        pytest.param("|......|", {"other": 7}, id="nothing known"),
    ],
)
def test_each_moment_of_a_step_is_counted_in_one_phase(text: str, row: dict[str, float]) -> None:
    """The phases of a step are those that the marks show, and their sum is the step."""
    assert rows(text) == [row]
    assert sum(row.values()) == len(text) - 1


def test_optimizers_that_step_within_backward() -> None:
    """Where each parameter's optimizer steps in a hook, backward goes on into the next step."""
    text = "|f.Fb.o|.o.O.wBf.Fb.o|"
    row = {"optimizer": 2 + 1, "backward": 2 + 2 + 2, "blocked": 1, "other": 1, "forward": 3}
    assert rows(text)[1] == row
    assert sum(row.values()) == 14


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
