"""Marks of a training loop as letters, to read and to write them in tests.

A letter begins a phase, its capital ends it, `|` ends a step. `wW` is a wait, and a `w` alone the
end of the own backward.
"""

from __future__ import annotations

from collections.abc import Iterable

from ddpbench.watch.observe.steps import (
    BACKWARD,
    END,
    FORWARD,
    INPUT,
    OPTIMIZER,
    OTHER,
    STEP,
    Mark,
)
from ddpbench.watch.window import BLOCKED

BEGINS = {INPUT: "i", FORWARD: "f", BACKWARD: "b", BLOCKED: "w", OPTIMIZER: "o", OTHER: "e"}
ENDS = {kind + END: letter.upper() for kind, letter in BEGINS.items()}
LETTERS = BEGINS | ENDS | {STEP: "|"}
KINDS = {letter: kind for kind, letter in LETTERS.items()}
SECOND = 10**9


def letters(marks: Iterable[Mark]) -> str:
    """Return the letters of marks."""
    return "".join(LETTERS[kind] for kind, *_ in marks)


def make_marks(text: str) -> list[Mark]:
    """Return marks one second apart for each character; `.` is a second without a mark."""
    marks, step = [], -1
    for second, letter in enumerate(text, 5):
        step += letter == "|"
        if letter != ".":
            marks.append((KINDS[letter], second * SECOND, second * SECOND, step))
    return marks
