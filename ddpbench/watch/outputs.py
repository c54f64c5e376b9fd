"""All outputs of rank 0: the line, the table, the stored run, metrics and the user's callback.

An output that fails is reported once and ends; the others go on.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ddpbench.present.steps.columns import format_ms
from ddpbench.records import store
from ddpbench.records.schema import SEVERITIES, Finding, Run
from ddpbench.records.terminal_text import tell
from ddpbench.records.watched import COLUMNS, Moment
from ddpbench.records.wording import install_extra
from ddpbench.watch.judging.summary import summarize
from ddpbench.watch.stored import StoredRun, print_table, update_run

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

    from ddpbench.watch.judging.history import History
    from ddpbench.watch.settings import Settings

STORING = "storing the run"


class Outputs:
    """All outputs of rank 0. An error of an output is reported, never raised.

    settings: what the user asked for; run: of the job before its first report.
    """

    def __init__(self, settings: Settings, run: Run) -> None:
        self._settings, self._run = settings, run
        self._folder: Path | None = None
        self._outputs: dict[str, Callable[[Run, Moment | None], object]] = {}
        self._attempt(STORING, self._open_run)
        self._attempt("metrics for Prometheus", self._open_metrics)
        if settings.on_report is not None:
            call = settings.on_report
            self._outputs["on_report"] = lambda *report: call(describe_report(*report))
        self._line_at = time.monotonic() + settings.every
        with contextlib.suppress(AttributeError, ValueError):  # none, closed, or the script's own
            if sys.stderr.isatty():
                self._outputs["the line"] = self._show_line

    @property
    def folder(self) -> Path | None:
        """The folder of the stored run; None if it is not stored."""
        return self._folder if STORING in self._outputs else None

    def update(
        self, history: History, findings: Sequence[Finding], end: store.End | None = None
    ) -> None:
        """Hand the job as it is now to all outputs. end: None while the job goes on."""
        worst_first = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
        summary = summarize(history)
        self._run = update_run(self._run, summary, tuple(worst_first), end)
        for name, output in list(self._outputs.items()):
            self._attempt(name, output, self._run, summary and summary.latest)

    def finish(self, history: History, findings: Sequence[Finding], end: store.End) -> None:
        """Give out the end of the job, and print the table to stderr.

        An end that another rank has stored came first.
        """
        with contextlib.suppress(store.InvalidRun):
            if self.folder is not None and (run := store.read(self.folder)).exit_code:
                end = store.End(run.state, run.state_reason, run.exit_code)
        self.update(history, findings, end)
        self._attempt("the table", print_table, self._run, self._settings.format, self.folder)

    def _attempt(self, name: str, action: Callable[..., object], *arguments: object) -> None:
        """Run a part of the output; if it fails, report that and end this output."""
        try:
            action(*arguments)
        except Exception as error:
            self._outputs.pop(name, None)
            tell(f"watch: {name} failed, the job continues: {type(error).__name__}: {error}")

    def _open_run(self) -> None:
        if self._settings.output is not None:
            stored = StoredRun(self._settings.output, self._run)
            self._folder = stored.folder
            self._run = replace(self._run, id=stored.folder.name)
            self._outputs[STORING] = lambda run, _: stored.update(run)

    def _open_metrics(self) -> None:
        if self._settings.prometheus is not None:
            metrics = Metrics(self._settings.prometheus)
            self._outputs["metrics for Prometheus"] = metrics.update

    def _show_line(self, run: Run, latest: Moment | None) -> None:
        """Print the line, if it is time and the job goes on. latest: None before any step."""
        now = time.monotonic()
        if now < self._line_at or run.state != "running":
            return
        self._line_at = now + self._settings.every
        line = "no optimizer step was seen on all ranks yet"
        if latest is not None:
            step = latest.step_seconds
            columns = zip(COLUMNS, latest.seconds, strict=True)
            parts = [f"{name} {format_ms(seconds, step)}" for name, seconds in columns]
            line = f"step {latest.step}: {format_ms(step, step)} ms: {', '.join(parts)}"
        worst = [f"{finding.severity}: {finding.sentence}" for finding in run.findings[:1]]
        tell("; ".join([line, *worst]))


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


class Metrics:
    """The newest report as metrics for Prometheus.

    where: a port on which to serve them on all interfaces, or a file for the textfile collector.
    Raises ImportError without prometheus_client, and OSError.
    """

    def __init__(self, where: str) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            hint = f"prometheus_client is not installed: {install_extra('watch')}"
            raise ImportError(hint) from error
        self._report: dict[str, Any] = {}
        self._registry: Any = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        self._file, self._server = where, None
        if where.isdecimal():
            serve: Any = prometheus_client.start_http_server
            self._server, _ = serve(int(where), registry=self._registry)

    def update(self, run: Run, latest: Moment | None) -> None:
        """Show the metrics of a report. After the last one, serve no more."""
        self._report = describe_report(run, latest)
        if self._server is None:
            from prometheus_client import write_to_textfile

            write_to_textfile(self._file, self._registry)
        elif run.state != "running":
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics. Of single ranks, only those that a finding names have one."""
        from prometheus_client.core import GaugeMetricFamily

        for name, text, samples in _list_metrics(self._report) if self._report else ():
            labels = [*samples[0][0]] if samples else []
            metric = GaugeMetricFamily(f"ddpbench_watch_{name}", text, labels=labels)
            for values, value in samples:
                metric.add_metric([*values.values()], value)
            yield metric


def _list_metrics(
    report: dict[str, Any],
) -> Iterator[tuple[str, str, list[tuple[dict[str, str], float]]]]:
    """Yield name, description and samples of each metric: labels and value."""
    job = {name: str(report[name]) for name in ("run", "script", "backend")}
    running = float(report["state"] == "running")
    yield "info", "The job that is watched.", [(job, 1.0)]
    yield "running", "1: the job goes on.", [({}, running)]
    yield "ranks", "Ranks of the job.", [({}, report["world_size"])]
    if seconds := report["seconds"]:
        text = "Number of the last step that all ranks reported."
        yield "last_step", text, [({}, report["step"])]
        yield "step_seconds", "Time of one step, median of the newest.", [({}, seconds["step"])]
        text = "The least that any rank was blocked in collectives, in one step."
        yield "exposed_communication_seconds", text, [({}, seconds["exposed"])]
        text = "Parts of a step, of the median rank: its own phases, and blocked in collectives."
        yield "part_seconds", text, [({"part": part}, seconds[part]) for part in COLUMNS]
    labels = {
        (
            finding["severity"],
            finding["code"],
            str(finding["place"].get("rank", "")),
            ",".join(finding["place"].get("hosts", [finding["place"].get("host", "")])),
        )
        for finding in report["findings"]
    }
    names = ("severity", "code", "rank", "host")
    findings = [(dict(zip(names, one, strict=True)), 1.0) for one in sorted(labels)]
    yield "finding", "1: this is found now; `ddpbench show` has the sentences.", findings
