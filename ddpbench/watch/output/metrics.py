"""A watched job as metrics for Prometheus: in a file of the textfile collector, or on a port."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ddpbench.records.watched import COLUMNS
from ddpbench.records.wording import install_extra

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

MISSING = f"prometheus_client is not installed: {install_extra('watch')}"


class Metrics:
    """The newest report as metrics.

    where: a port on which to serve them on all interfaces, or a file. Raises ImportError without
    prometheus_client, and OSError.
    """

    def __init__(self, where: str) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ImportError(MISSING) from error
        self._report: dict[str, Any] = {}
        self._registry: Any = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        self._file = "" if where.isdecimal() else where
        self._server: Any = None
        if not self._file:
            self._server, _ = prometheus_client.start_http_server(
                int(where), registry=self._registry
            )

    def update(self, report: dict[str, Any]) -> None:
        """Show the metrics of a report (`describe_report`). After the last one, serve no more."""
        self._report = report
        if self._file:
            from prometheus_client import write_to_textfile

            write_to_textfile(self._file, self._registry)
        elif self._server is not None and report["state"] != "running":
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics. Of single ranks, only those that a finding names have one."""
        if self._report:
            yield from _metrics(self._report)


def _metrics(report: dict[str, Any]) -> Iterator[GaugeMetricFamily]:
    from prometheus_client.core import GaugeMetricFamily

    info = {name: str(report[name]) for name in ("run", "script", "backend")}
    about = GaugeMetricFamily("ddpbench_watch_info", "The job that is watched.", labels=[*info])
    about.add_metric([*info.values()], 1)
    yield about
    seconds = report["seconds"]
    figures = [
        ("running", "1: the job goes on.", float(report["state"] == "running")),
        ("ranks", "Ranks of the job.", report["world_size"]),
    ]
    if seconds:
        exposed = "The least that any rank was blocked in collectives, in one step."
        figures += [
            ("last_step", "Number of the last step that all ranks reported.", report["step"]),
            ("step_seconds", "Time of one step, median of the newest.", seconds["step"]),
            ("exposed_communication_seconds", exposed, seconds["exposed"]),
        ]
    for name, text, value in figures:
        yield GaugeMetricFamily(f"ddpbench_watch_{name}", text, value)
    if seconds:
        parts = GaugeMetricFamily(
            "ddpbench_watch_part_seconds",
            "Parts of a step, of the median rank: its own phases, and blocked in collectives.",
            labels=["part"],
        )
        for part in COLUMNS:
            parts.add_metric([part], seconds[part])
        yield parts
    findings = GaugeMetricFamily(
        "ddpbench_watch_finding",
        "1: this is found now; `ddpbench show` has the sentences.",
        labels=["severity", "code", "rank", "host"],
    )
    for found in {_labels(finding) for finding in report["findings"]}:
        findings.add_metric(found, 1)
    yield findings


def _labels(finding: dict[str, Any]) -> tuple[str, ...]:
    place = finding["place"]
    hosts = place.get("hosts", [place.get("host", "")])
    return finding["severity"], finding["code"], str(place.get("rank", "")), ",".join(hosts)
