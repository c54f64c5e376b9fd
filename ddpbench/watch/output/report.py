"""What rank 0 tells of a job: the line, the table, the stored run, metrics and the user's callback.

An output that fails is reported once and ends; the others go on.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ddpbench.present.steps.columns import ms
from ddpbench.records import store
from ddpbench.records.schema import SEVERITIES, Finding, Run
from ddpbench.records.terminal_text import tell
from ddpbench.records.watched import COLUMNS, Moment
from ddpbench.watch.judging.summary import Summary, summarize
from ddpbench.watch.output.metrics import Metrics
from ddpbench.watch.output.stored import Job, StoredRun, build_run

if TYPE_CHECKING:
    from ddpbench.watch.judging.history import History
    from ddpbench.watch.settings import Settings


T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """The state of a job after a round of reports."""

    run: Run
    summary: Summary | None  # None: no step was seen on all ranks yet

    @property
    def latest(self) -> Moment | None:
        """The newest steps."""
        return self.summary.latest if self.summary is not None else None

    def as_dict(self) -> dict[str, Any]:
        """Return what `on_report` receives; the guide, chapter api, documents the keys."""
        case, latest = self.run.steps[0].case, self.latest
        seconds: dict[str, float] = {}
        if latest is not None:
            seconds = dict(zip(COLUMNS, latest.seconds, strict=True))
            seconds |= {"step": latest.step_seconds, "exposed": latest.exposed_seconds}
        return {
            "run": self.run.id,
            "state": self.run.state,
            "script": case.workload,
            "backend": case.backend,
            "world_size": case.world_size,
            "step": latest.step if latest is not None else None,
            "seconds": seconds,
            "findings": msgspec.to_builtins(self.run.findings),
        }


class Outputs:
    """All outputs of rank 0. An error of an output is reported, never raised.

    settings: what the user asked for; job: what is known of the job before its first report.
    """

    def __init__(self, settings: Settings, job: Job) -> None:
        self._format, self._job = settings.format, job
        self._folder: Path | None = None
        self._outputs: dict[str, Callable[[Report], object]] = {}
        if settings.output is not None:
            self._attempt("storing the run", self._open_run, settings.output)
        if settings.prometheus is not None:
            self._attempt("metrics for Prometheus", self._open_metrics, settings.prometheus)
        if settings.on_report is not None:
            call = settings.on_report
            self._outputs["on_report"] = lambda report: call(report.as_dict())
        line = Line(settings.every)
        with contextlib.suppress(AttributeError, ValueError):  # none, closed, or the script's own
            if sys.stderr.isatty():
                self._outputs["the line"] = lambda report: line.show(report.latest, report.run)

    def update(self, history: History, findings: Sequence[Finding]) -> None:
        """Give out what is known after a round of reports."""
        self._give(self._report(history, findings))

    def finish(self, history: History, findings: Sequence[Finding], end: store.End) -> None:
        """Give out the end of the job, and print the table to stderr.

        An end that another rank has stored came first.
        """
        with contextlib.suppress(store.InvalidRun):
            if self.folder is not None and (run := store.read(self.folder)).exit_code:
                end = store.End(run.state, run.state_reason, run.exit_code)
        report = self._report(history, findings, end)
        self._give(report)
        self._attempt("the table", self._print, report.run)
        for finding in findings:  # what was asked for and not done is the last that is printed
            if (finding.severity, finding.code) == ("error", "replicas-not-compared"):
                tell(finding.sentence)

    @property
    def folder(self) -> Path | None:
        """The folder of the stored run; None if it is not stored."""
        return self._folder if "storing the run" in self._outputs else None

    def _open_run(self, results: Path) -> None:
        stored = StoredRun(results, self._job)
        self._folder = stored.folder
        self._outputs["storing the run"] = lambda report: stored.update(report.run)

    def _open_metrics(self, where: str) -> None:
        metrics = Metrics(where)
        self._outputs["metrics for Prometheus"] = lambda report: metrics.update(report.as_dict())

    def _report(
        self, history: History, findings: Sequence[Finding], end: store.End | None = None
    ) -> Report:
        worst_first = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
        summary = summarize(history)
        run = build_run(self._job, summary, tuple(worst_first), end)
        if self._folder is not None:
            run = replace(run, id=self._folder.name)
        return Report(run, summary)

    def _give(self, report: Report) -> None:
        for name, output in list(self._outputs.items()):
            self._attempt(name, output, report)

    def _attempt(self, name: str, action: Callable[[T], object], argument: T) -> None:
        """Run a part of the output; if it fails, report that and end this output."""
        try:
            action(argument)
        except Exception as error:
            self._outputs.pop(name, None)
            tell(f"watch: {name} failed, the job continues: {type(error).__name__}: {error}")

    def _print(self, run: Run) -> None:
        from ddpbench.present.formats import FORMATS

        sys.stderr.write(FORMATS[self._format](run, None, False))
        if self.folder is not None:
            tell(f"stored in {self.folder}")


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
