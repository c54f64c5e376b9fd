"""Measure one case for another program, as the pytest fixtures do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpbench.nested_runs.command_line import last_message
from ddpbench.records import codec, store
from ddpbench.records.schema import Case, Run, StepCase
from ddpbench.verdicts.matching import AnyCase, Side, SideCase, Source, find_cases
from ddpbench.verdicts.regression import Measured

PATIENCE_SECONDS = 15.0  # between asking to end and killing
EXPLAINED = (0, 1, 4)  # exit codes of a run whose findings explain what is wrong


class Unmeasured(Exception):
    """The case could not be measured; the message is the reason, in one sentence."""


def words(settings: Mapping[str, Any]) -> list[str]:
    """Return keywords as options of a command line.

    True gives an option without a value; `options` is one word, or several, as typed.
    """
    arguments: list[str] = []
    for name, value in settings.items():
        option = "--" + name.replace("_", "-")
        if name == "options":
            arguments += [value] if isinstance(value, str) else value
        elif value is True:
            arguments.append(option)
        elif value is not None and value is not False:
            arguments.append(f"{option}={value}")
    return arguments


def measure(command: str, arguments: Sequence[str], folder: Path, deadline_seconds: float) -> Run:
    """Run `ddpbench COMMAND ARGUMENTS` and return the run that it stores in `folder`.

    Its ranks use the import path of this program. Raises Unmeasured if it was refused, a rank died,
    a result was wrong, or it took too long.
    """
    line = ["ddpbench", command, *arguments]
    process = subprocess.Popen(
        [sys.executable, "-m", *line, f"--output={folder}", "--quiet", "--format=json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that all its ranks can be ended
    )
    try:
        _, errors = process.communicate(timeout=deadline_seconds)
    except subprocess.TimeoutExpired:
        reason = f"`{' '.join(line)}` did not end within {deadline_seconds:g} s"
        raise Unmeasured(reason) from None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # the first lets the ranks store results
            if process.poll() is None:
                os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=PATIENCE_SECONDS)
    try:
        run = store.read(folder)
    except store.InvalidRun:
        raise Unmeasured(last_message(errors)) from None
    measured = any(outcome.summary is not None for outcome in run.outcomes)
    if run.state != "complete" or (process.returncode not in EXPLAINED and measured):
        raise Unmeasured(last_message(errors))
    for finding in run.findings:
        if finding.severity == "error":
            raise Unmeasured(f"{finding.sentence}. Next: {finding.next_step}")
    return run


def only_case(run: Run) -> SideCase:
    """Return the only case of a run. Raises Unmeasured if there are several, or it is invalid."""
    found = [*find_cases(Source(run.id, (run,))).values()]
    if len(found) != 1:
        names = ", ".join(each.case.key for each in found) or "none"
        raise Unmeasured(f"expected one case, not {len(found)} ({names}): choose a single one")
    if found[0].fault is not None:
        raise Unmeasured(found[0].fault)
    return found[0]


def summarise(run: Run, found: SideCase) -> Measured:
    """Return the measurement of a run's only case, which is measured."""
    assert found.side is not None
    warnings = tuple(each.sentence for each in run.findings if each.severity == "warning")
    return Measured(found.case, found.side, warnings, torch=run.launches[0].facts["torch"])


def decode(stored: Mapping[str, Any], source: str) -> Measured:
    """Read a measurement that was stored as JSON. source: the file that contains it.

    Raises ValueError for anything else.
    """
    try:
        kind: type[AnyCase] = StepCase if "workload" in stored["case"] else Case
        side = codec.decode(Side, stored["side"])
        case, warnings = codec.decode(kind, stored["case"]), tuple(stored["warnings"])
        return Measured(case, side, warnings, source, str(stored["torch"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{source} contains no figures of ddpbench: {error!r}") from None
