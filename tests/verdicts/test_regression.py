"""The verdict on tests, each against its own base: margins, identities, and several at once."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from frozen import Frozen
from stored_runs import a_case, launch_medians

from ddpbench.analysis import stats
from ddpbench.present.changes import build_tests
from ddpbench.verdicts import comparison, regression
from ddpbench.verdicts.matching import AnyCase, Side
from ddpbench.verdicts.regression import Measured


def measured(times: Sequence[float], case: AnyCase | None = None) -> Measured:
    """A test that measured launches of these medians."""
    side = Side(*stats.over_launches(np.array(times)), tuple(times), tuple(range(len(times))))
    return Measured(case or a_case(), side, ("the host was busy",), "0007")


def times(factor: float = 1.0, launches: int = 6, seed: int = 0) -> list[float]:
    """Launch medians around 1 ms times this factor."""
    return [float(t) for t in launch_medians(launches, 1e-3 * factor, 0.002, seed)]


def steady(base: Measured) -> list[Measured]:
    """A test's base after earlier sessions that were much the same: next to no drift."""
    return [*(replace(measured(times(seed=n)), case=base.case) for n in range(50, 58)), base]


@pytest.mark.parametrize(
    ("factor", "launches", "margin", "name"),
    [
        (1.0, 6, 0.03, "SAME"), (1.1, 6, 0.2, "SAME"), (1.1, 6, 0.03, "SLOWER"),
        (0.9, 6, 0.03, "FASTER"), (1.1, 4, 0.03, "INCONCLUSIVE"),
    ],
)  # fmt: skip
def test_each_verdict(factor: float, launches: int, margin: float, name: str) -> None:
    """The same launches times a factor; below five of them a side there is no verdict, and it says
    how many there should be."""
    base, new = times(launches=launches), times(factor, launches, seed=1)
    (row,) = regression.judge_tests({"t": steady(measured(base))}, {"t": measured(new)}, margin)
    assert (row.verdict, row.margin) == (name, margin)
    assert ("needs 6 per side" in row.why) == (launches == 4)


def test_what_sessions_drift_by_is_no_change(frozen: Frozen) -> None:
    """30 % is not claimed where nothing, or too little, is saved to learn from, nor where sessions
    differed as much; 30 % is where they were steady, and 80 % in any case."""
    base = measured(times())
    swaying = [measured(times(f, seed=n)) for n, f in enumerate((0.9, 1.1, 0.92, 1.08, 0.88, 1.09))]
    reasons = []
    for saved, name in (
        ([base], "INCONCLUSIVE"), ([*steady(base)[-4:]], "INCONCLUSIVE"),
        ([*swaying, base], "INCONCLUSIVE"), (steady(base), "SLOWER"),
    ):  # fmt: skip
        (row,) = regression.judge_tests({"t": saved}, {"t": measured(times(1.3, seed=1))}, 0.03)
        assert row.verdict == name
        reasons.append(row.why)
        (row,) = regression.judge_tests({"t": saved}, {"t": measured(times(1.8, seed=1))}, 0.03)
        assert row.verdict == "SLOWER"
    frozen.text("\n".join(reasons))


def test_another_identity_is_incomparable_and_named(frozen: Frozen) -> None:
    """Twice the bytes in the test of the same name: no ratio, but both values; what was not saved
    before has no verdict either. What matters first stands first."""
    other = a_case(nbytes=8192, count=2048)
    base = {name: steady(measured(times())) for name in ("a", "b", "z")}
    new = {
        "a": measured(times(seed=1)),
        "b": measured(times(2), other),
        "c": measured(times()),
        "z": measured(times(2, seed=1)),
    }
    rows = regression.judge_tests(base, new, 0.03)
    assert [(row.test, row.verdict) for row in rows] == [
        ("z", "SLOWER"), ("b", "INCOMPARABLE"), ("a", "SAME"), ("c", comparison.ONLY_NEW),
    ]  # fmt: skip
    assert rows[1].shift is None
    assert rows[1].why == "nbytes 4096 → 8192, count 1024 → 2048"
    section = build_tests(new, rows)
    assert rows[1].why in {cell for row in section.charts[0].table.rows for cell in row}
    frozen.text("\n".join([section.intro, *(found.sentence for found in section.findings)]))
