"""What a chart draws."""

from __future__ import annotations

from typing import Any

from ddpbench.present.document import Chart

BESIDE = ("cursor", "levels", "rules", "ticks")  # datasets


def values(chart: Chart) -> list[dict[str, Any]]:
    """The rows of a chart's data."""
    assert chart.spec is not None
    (rows,) = [rows for name, rows in chart.spec["datasets"].items() if name not in BESIDE]
    return list(rows)
