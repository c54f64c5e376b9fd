"""What rank 0 tells of a job: the line, the table, the stored run, metrics and the user's callback.

An output that fails is reported once and ends; the others go on.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ddpbench.present.steps.columns import ms
from ddpbench.records import store
from ddpbench.records.schema import SEVERITIES, Finding, Run
from ddpbench.records.terminal_text import tell
from ddpbench.records.watched import COLUMNS, Moment
from ddpbench.watch.judging.summary import summarize
from ddpbench.watch.output.metrics import Metrics
from ddpbench.watch.output.stored import Job, StoredRun, build_run

if TYPE_CHECKING:
    from ddpbench.watch.judging.history import History
    from ddpbench.watch.settings import Settings


def describe_report(run: Run, latest: Moment | None) -> dict[str, Any]:
    """Return what `on_report` receives; the guide, chapter api, documents the keys.

    latest: the newest steps, None before any.
    """
    case = run.steps[0].case
    seconds: dict[str, float] = {}
    if latest is not None:
        seconds = dict(zip(COLUMNS, latest.seconds, strict=True))
        seconds |= {"step": latest.step_seconds, "exposed": latest.exposed_seconds}
    return {
        "run": run.id,
        "state": run.state,
        "script": case.workload,
        "backend": case.backend,
        "world_size": case.world_size,
        "step": latest.step if latest is not None else None,
        "seconds": seconds,
        "findings": msgspec.to_builtins(run.findings),
    }


class Outputs:
    """All outputs of rank 0. An error of an output is reported, never raised.

    settings: what the user asked for; job: what is known of the job before its first report.
    """

    def __init__(self, settings: Settings, job: Job) -> None:
        self._format, self._job = settings.format, job
        self._folder: Path | None = None
        self._outputs: dict[str, Callable[[Run, Moment | None], object]] = {}
        if settings.output is not None:
            self._attempt("storing the run", self._open_run, settings.output)
        if settings.prometheus is not None:
            self._attempt("metrics for Prometheus", self._open_metrics, settings.prometheus)
        if settings.on_report is not None:
            call = settings.on_report
            self._outputs["on_report"] = lambda *report: call(describe_report(*report))
        line = Line(settings.every)
        with contextlib.suppress(AttributeError, ValueError):  # none, closed, or the script's own
            if sys.stderr.isatty():
                self._outputs["the line"] = line.show

    def update(self, history: History, findings: Sequence[Finding]) -> None:
        """Give out what is known after a round of reports."""
        self._give(history, findings)

    def finish(self, history: History, findings: Sequence[Finding], end: store.End) -> None:
        """Give out the end of the job, and print the table to stderr.

        An end that another rank has stored came first.
        """
        with contextlib.suppress(store.InvalidRun):
            if self.folder is not None and (run := store.read(self.folder)).exit_code:
                end = store.End(run.state, run.state_reason, run.exit_code)
        run = self._give(history, findings, end)
        self._attempt("the table", self._print, run)
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
        self._outputs["storing the run"] = lambda run, _: stored.update(run)

    def _open_metrics(self, where: str) -> None:
        metrics = Metrics(where)
        self._outputs["metrics for Prometheus"] = lambda *report: metrics.update(
            describe_report(*report)
        )

    def _give(
        self, history: History, findings: Sequence[Finding], end: store.End | None = None
    ) -> Run:
        """Hand the job as it is now to all outputs, and return it."""
        worst_first = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
        summary = summarize(history)
        run = build_run(self._job, summary, tuple(worst_first), end)
        if self._folder is not None:
            run = replace(run, id=self._folder.name)
        latest = summary.latest if summary is not None else None
        for name, output in list(self._outputs.items()):
            self._attempt(name, output, run, latest)
        return run

    def _attempt(self, name: str, action: Callable[..., object], *arguments: object) -> None:
        """Run a part of the output; if it fails, report that and end this output."""
        try:
            action(*arguments)
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

    def show(self, run: Run, latest: Moment | None) -> None:
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
    worst = [f"{finding.severity}: {finding.sentence}" for finding in run.findings[:1]]
    return "; ".join([line, *worst])
