"""What ddpbench knows of the hosts, the versions and the launches of a run."""

from __future__ import annotations

from collections.abc import Sequence

from ddpbench.report.chart import ReportRun, Section


def section(runs: Sequence[ReportRun]) -> Section | None:
    """Return the tables of the environment; None if no run was launched."""
    return None
