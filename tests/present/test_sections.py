"""Charts of collectives, of the doctor's links and of a DDP step on a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from frozen import Frozen
from stored_runs import a_case, a_result, a_run, a_summary
from stored_steps import a_step_result, a_step_run, a_step_summary, step_samples

from ddpbench.analysis import steps
from ddpbench.measure.rounds import step_columns
from ddpbench.present.collectives import sections as collectives
from ddpbench.present.document import Chart, ReportRun, Section
from ddpbench.present.examinations import draw_links
from ddpbench.present.steps import sections as step
from ddpbench.records.schema import Limit, Result, Run, StepCase


def values(chart: Chart) -> list[dict[str, Any]]:
    """The rows of a chart's data."""
    assert chart.spec is not None
    return list(chart.spec["datasets"]["data"])


# --- collectives


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


def charts_of(section: Section) -> list[Chart]:
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
        (time,) = charts_of(a_section(a_run(*results)))
        assert time.spec is None
        assert len(time.table.rows) == len(results)


# --- links: matrices of what each rank or host sends to each other one


def figures(ranks: int, hosts: int = 1, *again: dict[str, Any], **other: Any) -> dict[str, Any]:
    """What the doctor stores of links at about 1 GB/s, half of that when all send at once."""
    rate = np.random.default_rng(0).uniform(0.9e9, 1.1e9, (ranks, ranks)).tolist()
    return {
        "ends": [[rank, f"host{rank * hosts // ranks}"] for rank in range(ranks)],
        "kind": "ranks", "pairs": ranks * (ranks - 1) // 2, "rounds": ranks, "seconds": 0.1,
        "halved": False, "again": list(again),
        "cells": [[a, b, rate[a][b], rate[a][b] / 2, 5e-5]
                  for a in range(ranks) for b in range(ranks) if a != b],
        **other,
    }  # fmt: skip


def slow(kind: str, one: list[int], other: list[int], ways: str = "both") -> dict[str, Any]:
    """A confirmed suspect, as the doctor stores it."""
    return {"kind": kind, "one": one, "other": other, "ways": ways, "confirmed": True}


def outlined(chart: Chart) -> set[tuple[str, str]]:
    """The ways that a chart outlines."""
    return {(cell["from"], cell["to"]) for cell in values(chart) if cell["_marked"]}


@pytest.mark.parametrize(
    ("suspect", "ways"),
    [
        (slow("rank", [0], [3], "receives"), {("3", "0")}),
        (slow("rank", [2], [], "sends"), {("2", "0"), ("2", "1"), ("2", "3")}),
        (slow("host", [0], [2]), {(a, b) for a in "01" for b in "23"}
         | {(b, a) for a in "01" for b in "23"}),
        ({**slow("rank", [0], [3]), "confirmed": False}, set()),
    ],
)  # fmt: skip
def test_what_the_doctor_confirmed_is_outlined(
    suspect: dict[str, Any], ways: set[tuple[str, str]]
) -> None:
    """A link, one direction, an end, or all ranks of two hosts; the table says "slow" there."""
    names = {str(r): f"{r} host{r // 2}" for r in range(4)}
    bandwidth, latency = draw_links(figures(4, 2, suspect), "", "gloo")
    assert outlined(bandwidth) == {(names[a], names[b]) for a, b in ways}
    assert ("Outlined" in bandwidth.caption) == bool(ways)
    marked = [cell for row in bandwidth.table.rows for cell in row if str(cell).endswith("slow")]
    assert len(marked) == len(ways)
    assert outlined(latency) == set()


# --- a step: its timeline by rank, its budget and its buckets


def a_report(run: Run, label: str = "a run", **samples: Any) -> ReportRun:
    """A run of the page whose samples are those of `step_samples` with these arguments."""
    report = ReportRun(label, run, Path())
    columns = [
        pd.DataFrame(step_columns(result.case.key, result.launch, step_samples(**samples)))
        for result in run.steps
    ]
    vars(report)["samples"] = pd.concat(columns)  # as if read from the folder
    return report


def charts(*runs: ReportRun) -> dict[str, Chart]:
    """The charts of these runs' section by name."""
    made = [chart for run in runs for chart in next(step.build_sections(run, drawn=True)).charts]
    assert len({chart.name for chart in made}) == len(made)
    return {chart.name: chart for chart in made}


def spans(chart: Chart) -> pd.DataFrame:
    """What a chart draws."""
    return pd.DataFrame(values(chart))


def lane(chart: Chart, rank: int) -> pd.DataFrame:
    """What a timeline draws of one rank, by what it is."""
    drawn = spans(chart)
    return drawn[drawn["of"] == f"rank {rank}"].set_index("span")


LATE = {"late": (1, 12.0), "noise": 0.001}


def late_run(case: StepCase | None = None, **more: Any) -> ReportRun:
    """A run in which the forward of rank 1 takes 12 ms longer."""
    summary = a_step_summary(**LATE, **more)
    return a_report(a_step_run(a_step_result(case, summary=summary)), **LATE, **more)


def test_a_timeline_has_the_times_of_each_rank() -> None:
    """Forward, backward until the last handover, the wait for it, and the optimizer follow each
    other, with the medians of the samples."""
    chart = charts(late_run())["step-mlp-gloo"]
    early, late = lane(chart, 0), lane(chart, 1)
    assert early.loc["forward", "_end"] == pytest.approx(15e-3, rel=0.01)
    assert late.loc["forward", "_end"] == pytest.approx(27e-3, rel=0.01)
    for own in (early, late):
        phases = own[own["_phase"] != "transfer"]
        assert list(phases["_phase"]) == ["forward", "backward", "blocked", "optimizer"]
        assert list(phases["_begin"])[1:] == list(phases["_end"])[:-1]
    assert early.loc["blocked", "_begin"] == pytest.approx((15 + 43.2) * 1e-3, rel=0.01)


def test_the_parts_of_a_budget_adjoin(frozen: Frozen) -> None:
    """Compute, copies and exposed communication add up to the step; the exposed communication is
    covered by transfer and overhead, and hidden communication ends where it begins."""
    summary = a_step_summary()
    report = ReportRun("a", a_step_run(a_step_result(summary=summary)))
    chart = charts(report)["step-mlp-budget"]
    bars = spans(chart).set_index("part of a step")
    chain = bars.loc[[steps.COMPUTE, steps.COPIES, steps.EXPOSED]]
    assert chain["_begin"].iloc[0] == 0
    assert list(chain["_begin"])[1:] == pytest.approx(list(chain["_end"])[:-1])
    assert chain["_end"].iloc[-1] == pytest.approx(bars.loc["= step", "_end"])
    exposed = bars.loc[steps.EXPOSED]
    assert bars.loc[steps.TRANSFER, "_begin"] == pytest.approx(exposed["_begin"])
    assert bars.loc[steps.OVERHEAD, "_end"] == pytest.approx(exposed["_end"])
    assert bars.loc[steps.HIDDEN, "_end"] == pytest.approx(exposed["_begin"])
    known = bars[bars["_low"].notna()]
    for part in summary.budget:
        if part.name in known.index and part.figure.interval and part.name != steps.HIDDEN:
            shown = known.loc[part.name]
            assert shown["_low"] == pytest.approx(shown["_begin"] + part.figure.interval.low)
    frozen.text(chart.caption)
