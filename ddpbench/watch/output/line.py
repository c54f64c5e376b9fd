"""The line that rank 0 prints on a terminal while the job runs."""

from __future__ import annotations

import time

from ddpbench.records.schema import Finding, Run
from ddpbench.records.terminal_text import tell
from ddpbench.records.watched import COLUMNS, Moment
from ddpbench.render.step_columns import ms


class Line:
    """Prints a line to stderr every so many seconds."""

    def __init__(self, every: float) -> None:
        self._every, self._next = every, time.monotonic() + every

    def show(self, latest: Moment | None, run: Run) -> None:
        """Print the line, if it is time and the job goes on. latest: None before any step."""
        now = time.monotonic()
        if now >= self._next and run.state == "running":
            self._next = now + self._every
            tell(format_line(latest, run))


def format_line(latest: Moment | None, run: Run) -> str:
    """Format the newest steps and the worst finding in one line."""
    if latest is None:
        line = "no optimizer step was seen on all ranks yet"
    else:
        step = latest.step_seconds
        parts = [
            f"{name} {ms(seconds, step)}"
            for name, seconds in zip(COLUMNS, latest.seconds, strict=True)
        ]
        line = f"step {latest.step}: {ms(step, step)} ms: {', '.join(parts)}"
    return "; ".join([line, *map(_format_finding, run.findings[:1])])


def _format_finding(finding: Finding) -> str:
    return f"{finding.severity}: {finding.sentence}"
