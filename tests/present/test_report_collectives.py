"""Charts and tables of collectives on a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from drawn import values
from frozen import Frozen
from stored_runs import a_case, a_result, a_run, a_summary

from ddpbench.present.collectives import sections as collectives
from ddpbench.present.document import Chart, ReportRun, Section
from ddpbench.records.schema import Limit, Result, Run

LIMIT = Limit(2e9, "one-way TCP streams on this host")


def a_sweep(**other: Any) -> list[Result]:
    """Return all_reduce of three sizes on gloo and mpi, with a limit."""
    return [
        a_result(
            a_case(backend=backend, nbytes=nbytes, count=nbytes // 4, **other),
            launch,
            a_summary(seconds * (1 + launch)),
            limit=LIMIT,
        )
        for launch, backend in enumerate(("gloo", "mpi"))
        for nbytes, seconds in ((1024, 1e-4), (4096, 2e-4), (2**20, 1e-2))
    ]


def a_section(*runs: Run) -> Section:
    reported = [ReportRun(run.id, run) for run in runs]
    return next(collectives.build_sections(reported, drawn=True))


def charts(section: Section) -> list[Chart]:
    """The charts of operations."""
    return [chart for chart in section.charts if chart.operation]


def layers(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All single layers of a chart."""
    for layer in spec.get("layer", []):
        yield layer
        yield from layers(layer)


def test_an_operation_has_time_and_bandwidth_side_by_side(frozen: Frozen) -> None:
    """Both charts hold a point per size and backend, with its interval in seconds or bytes/s; a
    line shows the limit, and the tooltip its source."""
    ((time, bandwidth),) = a_section(a_run(*a_sweep())).rows
    assert [chart.name for chart in (time, bandwidth)] == [
        "all_reduce-time", "all_reduce-bandwidth",
    ]  # fmt: skip
    first = next(p for p in values(time) if (p["backend"], p["_x"]) == ("mpi", 4096))
    assert first["_y"] == 4e-4
    assert (first["_low"], first["_high"]) == pytest.approx((3.96e-4, 4.04e-4))
    rate = next(p for p in values(bandwidth) if (p["backend"], p["_x"]) == ("mpi", 4096))
    assert rate["_y"] == pytest.approx(4096 / 4e-4)
    assert rate["_low"] == pytest.approx(4096 / 4.04e-4)
    assert {(p["_reference"], p["limit"]) for p in values(bandwidth)} == {(2e9, LIMIT.source)}
    drawn = [layer["encoding"].get("y", {}) for layer in layers(bandwidth.spec or {})]
    assert "_reference" in [each.get("field") for each in drawn]
    frozen.text(time.caption)


def test_without_two_sizes_there_is_the_table_only() -> None:
    """A barrier has no size, and a device's clock may show no time: a logarithmic axis has no place
    for either."""
    barrier = a_result(a_case(operation="barrier", nbytes=0, count=0, reduce_op=None))
    zero, big = (a_result(a_case(nbytes=n), summary=a_summary(0.0)) for n in (4096, 2**20))
    for results in ((barrier,), (zero, big)):
        (time,) = charts(a_section(a_run(*results)))
        assert time.spec is None
        assert len(time.table.rows) == len(results)
