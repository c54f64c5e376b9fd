"""Turn reports on replicas into JSON, which a rank can write to a file."""

from __future__ import annotations

import dataclasses
import re
from typing import Any


def report_as_json(report: Any) -> dict[str, Any]:
    """Return the fields of a report and the properties that it derives from them."""
    return {
        **dataclasses.asdict(report),
        "equal": report.equal,
        "ok": report.ok,
        "failed": report.failed,
        "cause": report.cause.code if report.cause else None,
        "severity": report.cause.severity if report.cause else None,
        "minorities": [d.minority for d in report.differences],
        "faults": report.faults,
        "minority": report.minority,
        "headline": report.headline,
        "text": str(report),
    }


def facts_of(report: dict[str, Any], *drop: str) -> list[Any]:
    """Return severity, code and place of each finding, without these parts of a place."""
    return [
        [
            found["severity"],
            found["code"],
            {k: v for k, v in found["place"].items() if k not in drop},
        ]
        for found in report["findings"]
    ]


def without_figures(text: str) -> str:
    """Return a text with N for each number: values of a training differ between processors."""
    return re.sub(r"\d+(?:\.\d+)?(?:e-\d+)?", "N", text)
