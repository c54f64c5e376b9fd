"""All outputs of rank 0: the table, the stored run, metrics and the user's callback.

An output that fails is reported once and ends; the others go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ddpbench.records import store
from ddpbench.records.schema import SEVERITIES, Finding, Run
from ddpbench.records.terminal_text import tell
from ddpbench.records.watched import COLUMNS, Moment
from ddpbench.records.wording import install_extra
from ddpbench.watch import stored
from ddpbench.watch.judging.history import History
from ddpbench.watch.judging.summary import summarize

STORING, METRICS = "storing the run", "metrics for Prometheus"


@dataclass(frozen=True)
class Settings:
    """The arguments of `ddpbench.watch`, which explains them. output: an absolute path."""

    verify: int = 0
    timeout: float = 0.0
    output: Path | None = None
    on_report: Callable[[dict[str, Any]], object] | None = None
    prometheus: int | None = None


class Outputs:
    """All outputs of rank 0. An error of an output is reported, never raised.

    settings: what the user asked for; run: of the job before its first report.
    """

    def __init__(self, settings: Settings, run: Run) -> None:
        self._run = run
        self._folder: Path | None = None
        self._outputs: dict[str, Callable[[Run, Moment | None], object]] = {}
        if settings.output is not None:
            self._attempt(STORING, self._open_run, settings.output)
        if settings.prometheus is not None:
            self._attempt(METRICS, self._open_metrics, settings.prometheus)
        if settings.on_report is not None:
            call = settings.on_report
            self._outputs["on_report"] = lambda *report: call(describe_report(*report))

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
        self._run = stored.update_run(self._run, summary, tuple(worst_first), end)
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
        self._attempt("the table", stored.print_table, self._run, self.folder)

    def _attempt(self, name: str, action: Callable[..., object], *arguments: object) -> None:
        """Run a part of the output; if it fails, report that and end this output."""
        try:
            action(*arguments)
        except Exception as error:
            self._outputs.pop(name, None)
            tell(f"watch: {name} failed, the job continues: {type(error).__name__}: {error}")

    def _open_run(self, results: Path) -> None:
        folder = self._folder = stored.create_run(results, self._run)
        self._run = replace(self._run, id=folder.name)
        self._outputs[STORING] = lambda run, _: stored.store_run(folder, run)

    def _open_metrics(self, port: int) -> None:
        self._outputs[METRICS] = Metrics(port).update


def describe_report(run: Run, latest: Moment | None) -> dict[str, Any]:
    """Return what `on_report` receives; the guide, chapter api, documents the keys.

    latest: the newest steps, None before any.
    """
    case, seconds = run.steps[0].case, dict[str, float]()
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
    """The newest report as metrics for Prometheus, on a port of all interfaces.

    Raises ImportError without prometheus_client, and OSError.
    """

    def __init__(self, port: int) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            hint = f"prometheus_client is not installed: {install_extra('watch')}"
            raise ImportError(hint) from error
        registry = prometheus_client.CollectorRegistry()
        gauge: Any = partial(prometheus_client.Gauge, namespace="ddpbench_watch", registry=registry)
        self._step = gauge("last_step", "Number of the last step that all ranks reported.")
        self._seconds = gauge("seconds", "Time of a step and its parts, newest median.", ["part"])
        names = ["severity", "code", "rank", "host"]
        self._finding = gauge("finding", "1: this is found now.", names)
        serve: Any = prometheus_client.start_http_server
        self._server, _ = serve(port, registry=registry)

    def update(self, run: Run, latest: Moment | None) -> None:
        """Show the metrics of a report. After the last one, serve no more."""
        if latest is not None:
            self._step.set(latest.step)
            for part, seconds in describe_report(run, latest)["seconds"].items():
                self._seconds.labels(part).set(seconds)
        self._finding.clear()
        for finding in run.findings:
            place: dict[str, Any] = finding.place
            rank, host = place.get("rank", ""), place.get("host", "")
            hosts = ",".join(place.get("hosts", [host]))
            self._finding.labels(finding.severity, finding.code, str(rank), hosts).set(1.0)
        if run.state != "running":
            self._server.shutdown()
            self._server.server_close()
