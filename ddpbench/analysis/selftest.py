"""What a self-test makes of a run in which a fault was planted: was it found, and named rightly?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddpbench.records.schema import Run

PREFIX, STORED = "ddpbench: ", "ddpbench: stored in "
UNCHECKED = "not checked: "


@dataclass(frozen=True)
class Expected:
    """What a fault must lead to.

    codes  with one of which the command ends
    found  a pattern of a line that tells the fault
    named  a pattern of a line that tells which rank, link, tensor or variable it is
    """

    codes: tuple[int, ...]
    found: str
    named: str


@dataclass(frozen=True)
class Tried:
    """A fault that was planted, or a run without any. None: could not be tried here."""

    fault: str
    planted: str  # what was done, in a few words
    found: bool | None
    named: bool | None
    seconds: float | None
    said: str  # what was told of it; else why it could not be tried
    right: bool | None  # whether all came out as it must


def told(run: Run | None, stderr: str) -> list[str]:
    """What a command told a user, a line each: findings beyond notes, what was not checked,
    sentences on stderr."""
    findings = run.findings if run is not None else ()
    lines = [
        f"{each.severity} {each.code}: {each.sentence}"
        + (f". Next: {each.next_step}" if each.next_step else "")
        for each in findings
        if each.severity != "note"
    ]
    lines += [
        f"{UNCHECKED}{sentence}"
        for each in (run.examinations if run is not None else ())
        for sentence in each.unchecked
    ]
    spoken = [line for line in stderr.splitlines() if line.startswith(PREFIX)]
    return lines + [line.removeprefix(PREFIX) for line in spoken if not line.startswith(STORED)]


def judged(
    fault: str, planted: str, expected: Expected, code: int, lines: Sequence[str], seconds: float
) -> Tried:
    """Whether a fault was found, and named; what is said of it is the line that names it, else the
    one that finds it, else how the command ended."""
    finding, naming = (
        next((line for line in lines if re.search(pattern, line)), None)
        for pattern in (expected.found, expected.named)
    )
    found = finding is not None and code in expected.codes
    named = found and naming is not None
    said = finding if naming is None else naming
    if not named:
        last = said or (lines[-1] if lines else "nothing was said")
        said = f"exit code {code}: {last}"
    return Tried(fault, planted, found, named, seconds, said or "", named)


def unharmed(code: int, lines: Sequence[str], seconds: float, allowed: Sequence[str]) -> Tried:
    """Of a run without a fault; `allowed` are patterns of what may be told nevertheless."""
    fine = [f"^{UNCHECKED}", *allowed]
    alarms = [line for line in lines if not any(re.search(each, line) for each in fine)]
    said = alarms[0] if alarms else f"exit code {code}"
    right = code == 0 and not alarms
    return Tried("healthy", "nothing", bool(alarms), None, seconds, said, right)
