"""What a chart draws."""

from __future__ import annotations

from typing import Any

from ddpbench.present.document import Chart


def values(chart: Chart) -> list[dict[str, Any]]:
    """The rows of a chart's data."""
    assert chart.spec is not None
    return list(chart.spec["datasets"]["data"])
