"""A DDP step on a page: its timeline by rank, its budget and its buckets."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from drawn import values
from frozen import Frozen
from stored_steps import (
    a_step_result,
    a_step_run,
    a_step_summary,
    step_samples,
)

from ddpbench.analysis import steps
from ddpbench.present.document import Chart, ReportRun
from ddpbench.present.steps import sections as step
from ddpbench.records.schema import Run, StepCase
from ddpbench.session.summary import step_columns


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
