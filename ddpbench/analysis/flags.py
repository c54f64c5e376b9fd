"""Flags of table rows: one implementation for collectives and DDP steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ddpbench.records.schema import Case, Interval, Plan, Result, StepCase, StepResult

BUSY_SHARE = 0.05  # of the cores' time that other processes may use
UNUSABLE = {"WRONG", "INVALID"}  # the time of a row with one of these flags must not be used
# A row with one of these flags is not compared with another backend: on a busy host, a backend that
# polls loses to any other process.
NOT_COMPARABLE = {"WRONG", "INVALID", "DIFFER", "NONFINITE", "busy", "unhidden"}


@dataclass(frozen=True, kw_only=True)
class AnyLine:
    """A line of either kind: a case of collectives or a DDP step, over its launches."""

    case: Case | StepCase
    results: tuple[Result, ...] | tuple[StepResult, ...]  # one per launch with a result
    reason: str | None = None  # why no launch measured it
    seconds: float | None = None  # of one call or step
    interval: Interval | None = None  # of `seconds`
    flags: tuple[str, ...] = ()
    faster: float | None = None  # time of the next backend / time of this one, if it is the fastest

    @property
    def half_width(self) -> float | None:
        return None if self.interval is None else self.interval.half_width


ItemT = TypeVar("ItemT")
KeyT = TypeVar("KeyT")
LineT = TypeVar("LineT", bound=AnyLine)


@dataclass(frozen=True)
class Flag(Generic[LineT]):
    """A remark on a row: its explanation, the condition that raises it, and its mark in a table."""

    legend: str
    is_raised: Callable[[LineT, Plan], bool]
    mark: str = ""  # default: its name


BUSY: Flag[Any] = Flag(
    f"other processes used more than {BUSY_SHARE * 100:g} % of the cores meanwhile: measure again "
    "on a quiet host",
    lambda line, plan: any((r.others_share or 0) > BUSY_SHARE for r in line.results),
    mark="B",
)
STOPPED: Flag[Any] = Flag(
    "ended early by Ctrl-C or a signal",
    lambda line, plan: any(r.stop_reason == "interrupted" for r in line.results),
)


def find_fastest(group: Sequence[LineT]) -> LineT | None:
    """Return the line whose interval is below all others, of lines that differ in backend only.

    In it, `faster` is set. Returns None if one of them has no interval or a flag of NOT_COMPARABLE.
    """
    measured = sorted((line for line in group if line.seconds), key=lambda line: line.seconds or 0)
    intervals = [line.interval for line in measured if line.interval is not None]
    flags = {flag for line in measured for flag in line.flags}
    if NOT_COMPARABLE & flags or not 1 < len(measured) == len(intervals):
        return None
    first, second = (line.seconds or 0 for line in measured[:2])
    best, *others = intervals
    if any(best.high >= other.low for other in others):
        return None
    return replace(measured[0], faster=second / first)


def note_fastest(known: Sequence[LineT]) -> list[LineT]:
    """Return these lines, with `faster` set in the fastest of those that differ in backend only."""
    groups = group_by(known, lambda line: replace(line.case, backend="", provider=""))
    fastest = {best.case: best for group in groups.values() if (best := find_fastest(group))}
    return [fastest.get(line.case, line) for line in known]


def group_by(items: Iterable[ItemT], key: Callable[[ItemT], KeyT]) -> dict[KeyT, list[ItemT]]:
    """Return the items with each key, in their order."""
    groups: dict[KeyT, list[ItemT]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
