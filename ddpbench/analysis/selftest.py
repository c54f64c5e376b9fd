"""Verdicts of a self-test: whether a planted fault was found and named correctly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddpbench.records.schema import Finding, Run

PREFIX, STORED = "ddpbench: ", "ddpbench: stored in "
COMMAND = "selftest"  # of its runs, and their examination
UNCHECKED = "not checked: "


@dataclass(frozen=True)
class Expected:
    """The outcome that a fault must have.

    codes  exit codes, one of which the command must return
    found  a pattern of a line that reports the fault
    named  a pattern of a line that names its rank, link, tensor or variable
    """

    codes: tuple[int, ...]
    found: str
    named: str


@dataclass(frozen=True)
class Tried:
    """A planted fault, or a healthy run. None means that it could not be tried here."""

    fault: str
    planted: str  # a short description
    found: bool | None
    named: bool | None
    seconds: float | None
    said: str  # the message about it, else why it could not be tried
    right: bool | None  # whether the outcome is as expected


def collect_messages(run: Run | None, stderr: str) -> list[str]:
    """Return the messages of a command: findings above note, missing checks, lines on stderr."""
    findings = run.findings if run is not None else ()
    lines = [
        f"{finding.severity} {finding.code}: {finding.sentence}"
        + (f". Next: {finding.next_step}" if finding.next_step else "")
        for finding in findings
        if finding.severity != "note"
    ]
    lines += [
        f"{UNCHECKED}{sentence}"
        for examination in (run.examinations if run is not None else ())
        for sentence in examination.unchecked
    ]
    messages = [line for line in stderr.splitlines() if line.startswith(PREFIX)]
    return lines + [line.removeprefix(PREFIX) for line in messages if not line.startswith(STORED)]


def judge_fault(
    fault: str,
    planted: str,
    expected: Expected,
    *,
    code: int,
    lines: Sequence[str],
    seconds: float,
) -> Tried:
    """Judge whether a fault was found and named.

    The message shown is the line that names it, else the line that finds it, else how the command
    ended.
    """
    finding, naming = (
        next((line for line in lines if re.search(pattern, line)), None)
        for pattern in (expected.found, expected.named)
    )
    found = finding is not None and code in expected.codes
    named = found and naming is not None
    said = finding if naming is None else naming
    if not named:
        last = said or (lines[-1] if lines else "no message")
        said = f"exit code {code}: {last}"
    return Tried(fault, planted, found, named, seconds, said or "", named)


def judge_healthy(code: int, lines: Sequence[str], seconds: float, allowed: Sequence[str]) -> Tried:
    """Judge a run without a fault; `allowed` are patterns of acceptable messages."""
    fine = [f"^{UNCHECKED}", *allowed]
    alarms = [line for line in lines if not any(re.search(each, line) for each in fine)]
    said = alarms[0] if alarms else f"exit code {code}"
    right = code == 0 and not alarms
    return Tried("healthy", "nothing", bool(alarms), None, seconds, said, right)


def list_findings(rows: Sequence[Tried]) -> tuple[Finding, ...]:
    """Return an error for each planted fault that was missed, and for each false alarm."""
    return tuple(
        Finding(
            "error",
            "false-alarm" if row.fault == "healthy" else "fault-missed",
            f"{row.fault}, {row.planted}: {row.said}",
            f"python -m ddpbench doctor --selftest {row.fault} --healthy 0"
            if row.fault != "healthy"
            else "python -m ddpbench doctor",
        )
        for row in rows
        if row.right is False
    )
