"""The decision on settings: a gain is recommended only if later blocks confirm it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stored_steps import a_step_case, a_step_result, a_step_run, a_step_summary

from ddpbench.records.schema import Figure, Run, StepResult
from ddpbench.verdicts import tuning
from ddpbench.verdicts.tuning import CONFIRMING, SCREENING

LAST = SCREENING + CONFIRMING
EVERY = range(LAST)
NOISE = np.random.default_rng(0).normal(1, 0.003, (LAST, 8))


def measured(changes: dict[str, Any], milliseconds: float, blocks: Any = EVERY) -> list[StepResult]:
    """Return the results of a setting whose step takes this time, with noise, per block."""
    summary, case, column = a_step_summary(), a_step_case(**changes), len(str(changes)) % 8
    return [
        a_step_result(
            case,
            summary=replace(summary, step=Figure(milliseconds * 1e-3 * NOISE[block, column], None)),
            block=block,
        )
        for block in blocks
    ]


def a_tuned_run(*results: list[StepResult]) -> Run:
    return a_step_run(*(result for each in results for result in each), command="tune")


def test_a_confirmed_gain_is_recommended_with_the_line_of_python() -> None:
    run = a_tuned_run(
        measured({}, 100),
        measured({"bucket_cap_mb": 4.0}, 90),
        measured({"static_graph": True}, 99.5, range(2)),
    )
    (found,) = tuning.list_findings(run)
    assert (found.severity, found.code) == ("note", "faster-setting")
    assert found.next_step == "DistributedDataParallel(model, bucket_cap_mb=4)"
    assert found.place == {"workload": "mlp", "backend": "gloo", "bucket_cap_mb": 4.0}
    (verdict,) = tuning.judge_runs(run)
    figure = verdict.changes["bucket_cap_mb=4"]
    assert figure.value == pytest.approx(-0.1, abs=0.01)
    assert figure.interval is not None
    assert figure.interval.low < -0.1 < figure.interval.high


@pytest.mark.parametrize("milliseconds", [99.5, 100, 108])
def test_without_a_clear_gain_the_defaults_stay(milliseconds: float) -> None:
    """The largest gain that the intervals leave open is stated."""
    run = a_tuned_run(measured({}, 100), measured({"bucket_cap_mb": 4.0}, milliseconds))
    (found,) = tuning.list_findings(run)
    assert found.code == "keep-defaults"
    (verdict,) = tuning.judge_runs(run)
    assert verdict.best is None
    assert verdict.most is not None
    assert max(0, 1 - milliseconds / 100) <= verdict.most < 0.02


def test_the_blocks_that_chose_a_finalist_do_not_judge_it() -> None:
    lucky = measured({"bucket_cap_mb": 4.0}, 50, range(SCREENING))
    run = a_tuned_run(
        measured({}, 100), lucky, measured({"bucket_cap_mb": 4.0}, 100, range(SCREENING, LAST))
    )
    assert [found.code for found in tuning.list_findings(run)] == ["keep-defaults"]


@pytest.mark.parametrize("blocks", [1, SCREENING, SCREENING + 5])
def test_too_few_blocks_decide_nothing(blocks: int) -> None:
    run = a_tuned_run(
        measured({}, 100, range(blocks)), measured({"bucket_cap_mb": 4.0}, 50, range(blocks))
    )
    (found,) = tuning.list_findings(run)
    assert (found.code, "--max-time" in found.next_step) == ("undecided", True)


def test_accumulation_is_compared_per_micro_batch() -> None:
    run = a_tuned_run(measured({}, 100), measured({"accumulate": 4}, 320))
    (found,) = tuning.list_findings(run)
    assert found.code == "faster-setting"
    assert "changes the numbers" in found.sentence
    (verdict,) = tuning.judge_runs(run)
    assert verdict.changes["accumulate=4"].value == pytest.approx(-0.2, abs=0.02)


def test_a_refused_setting_has_its_reason_and_no_change() -> None:
    refused = StepResult(a_step_case(static_graph=True), 0, reason="torch refuses it: …")
    run = a_tuned_run(measured({}, 100), measured({"bucket_cap_mb": 4.0}, 90), [refused])
    (verdict,) = tuning.judge_runs(run)
    assert [s.reason for s in verdict.settings] == [None, None, "torch refuses it: …"]
    assert "static_graph=True" not in verdict.changes


def test_settings_are_ranked_by_the_same_blocks_as_the_default() -> None:
    """A setting that was dropped early is compared in the blocks in which it was measured."""
    drifting = [replace(r, summary=replace(r.summary, step=Figure(0.2, None)))  # type: ignore[type-var]
                for r in measured({}, 100, [2])]  # fmt: skip
    results = [
        *measured({}, 100, range(2)), *drifting,
        *measured({"bucket_cap_mb": 4.0}, 104, range(2)),
        *measured({"bucket_cap_mb": 1.0}, 98, [0]),
    ]  # fmt: skip
    labels = [setting.label for setting in tuning.rank_settings(results)]
    assert labels == ["bucket_cap_mb=1", "bucket_cap_mb=4"]
