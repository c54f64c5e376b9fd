"""From results to lines: what a row shows, which flags it raises, which backend is faster."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stored_runs import a_case, a_result, a_run, a_summary

from ddpbench.analysis import lines
from ddpbench.analysis.flags import find_fastest
from ddpbench.analysis.lines import Line
from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.records.schema import Limit, Result, Wrong

# --- one launch -----------------------------------------------------------------------------------


def only(*results: Result, **other: Any) -> Line:
    """The one line of a run of these results."""
    (line,) = lines.lines(a_run(*results, **other))
    return line


def test_a_line_of_one_launch_shows_that_launch() -> None:
    """Time, interval, percentiles and skew are the launch's own; algbw = S / t, busbw = algbw ×
    factor, and the share of the limit is busbw over the limit."""
    case = a_case(nbytes=8_000_000)
    result = a_result(case, bus_factor=1.5, limit=Limit(24e9, "memcpy"))
    line = only(result)
    assert (line.case, line.results, line.reason) == (case, (result,), None)
    assert line.seconds == 1e-3
    assert line.interval == a_summary().interval
    assert line.half_width == pytest.approx(0.01)
    assert line.percentiles == {"p50": 1e-3, "p90": 2e-3, "p99": 3e-3}
    assert line.skew == 1e-3 / 64
    assert line.algbw == pytest.approx(8e9)
    assert line.busbw == pytest.approx(12e9)
    assert line.fraction == pytest.approx(0.5)
    assert line.flags == ()


# --- several launches -----------------------------------------------------------------------------


def launches(seconds: list[float], **other: Any) -> list[Result]:
    """The same case in so many launches."""
    return [a_result(launch=n, summary=a_summary(s), **other) for n, s in enumerate(seconds)]


def test_five_launches_have_a_centre_and_no_interval() -> None:
    """The centre is the median of the launches' medians, not their mean; an interval within one
    launch is not passed off as one over launches."""
    line = only(*launches([5e-3, 1e-3, 2e-3, 9e-3, 3e-3]))
    assert (line.seconds, line.interval, line.half_width) == (3e-3, None, None)
    assert "imprecise" in line.flags


def test_six_launches_have_an_interval_from_the_least_to_the_largest() -> None:
    """The exact 95 % interval of a median of six is their whole range."""
    line = only(*launches([6e-3, 1e-3, 2e-3, 4e-3, 3e-3, 5e-3]))
    assert line.seconds == 3.5e-3
    assert line.interval is not None
    assert (line.interval.low, line.interval.high) == (1e-3, 6e-3)
    assert line.interval.of == "median of 6 launches"


def test_percentiles_over_launches_are_those_all_launches_have() -> None:
    """A percentile is the median of the launches' own; one that a launch lacks is not shown."""
    results = launches([1e-3, 2e-3, 4e-3])
    few = a_summary(3e-3, percentiles_seconds={"p50": 3e-3})
    assert only(*results).percentiles == {"p50": 2e-3, "p90": 4e-3, "p99": 6e-3}
    assert only(*results, a_result(launch=3, summary=few)).percentiles == {"p50": 2.5e-3}


# --- flags ----------------------------------------------------------------------------------------

WRONG = (Wrong(1, 5, 7, "3", "4"),)
HARD = Limit(4096 / 1e-3, "nominal")  # 4 KiB take 1 ms at least


@pytest.mark.parametrize(
    ("flag", "raising", "not_raising"),
    [
        ("WRONG", {"wrong": WRONG}, {"wrong": ()}),
        (
            "INVALID",
            {"hard_limit": replace(HARD, bytes_per_second=HARD.bytes_per_second * 0.99)},
            {"hard_limit": replace(HARD, bytes_per_second=HARD.bytes_per_second * 1.01)},
        ),
        (">limit", {"limit": Limit(4.09e6, "x")}, {"limit": Limit(4.1e6, "x")}),
        ("imprecise", {"summary": a_summary(width=0.026)}, {"summary": a_summary(width=0.024)}),
        (
            "skew",
            {"summary": a_summary(skew_seconds=1.01e-4)},
            {"summary": a_summary(skew_seconds=0.99e-4)},
        ),
        # Calls that were issued together: the skew of a repetition against the time of all.
        ("skew", {"calls": 20, "summary": a_summary(skew_seconds=2.1e-3)},
         {"calls": 20, "summary": a_summary(skew_seconds=1.9e-3)}),
        ("busy", {"others_share": 0.051}, {"others_share": 0.05}),
        ("batched", {"calls": 2, "batch": 2}, {"calls": 2, "batch": 1}),
        ("stopped", {"stop_reason": "interrupted"}, {"stop_reason": "time slice"}),
    ],
)  # fmt: skip
def test_each_flag_is_raised_alone_and_only_with_cause(
    flag: str, raising: dict[str, Any], not_raising: dict[str, Any]
) -> None:
    """On either side of its threshold a flag is raised, and no other with it, or is not; one
    launch with the cause is enough for what concerns the use of a row."""
    assert only(a_result(**raising)).flags == (flag,)
    assert only(a_result(**not_raising)).flags == ()
    if flag in ("WRONG", "INVALID", "busy", "batched", "stopped"):
        quiet = [a_result(launch=n) for n in range(5)]
        assert only(*quiet, a_result(launch=5, **raising)).flags == (flag,)


def test_launches_that_disagree_are_told_and_shown() -> None:
    """By half or more, and by more than their own intervals admit; not as calls of two kinds."""
    quick = [a_result(launch=n, summary=a_summary(1e-4)) for n in range(5)]
    slow = a_result(launch=5, summary=a_summary(5.5e-4))
    line = only(*quick, slow)
    assert line.flags == ("imprecise", "launches")
    assert COLUMNS["flags"].show(line) == "~ L"
    assert COLUMNS["medians"].show(line) == "100.0 " * 5 + "550.0"
    unsure = a_result(launch=5, summary=a_summary(5.5e-4, width=0.9))
    assert "launches" not in only(*quick, unsure).flags
    near = a_result(launch=5, summary=a_summary(1.49e-4))
    assert "launches" not in only(*quick, near).flags


def test_calls_of_two_kinds_are_shown_with_their_shares() -> None:
    """Of all launches together."""
    kinds = a_summary(quantiles_seconds=(4e-4,) * 14 + (4.1e-3,) * 7)
    line = only(*(a_result(launch=n, summary=kinds) for n in range(6)))
    assert line.flags == ("modes",)
    assert COLUMNS["flags"].show(line) == "M"
    assert COLUMNS["modes"].value(line) == "400.0:68% 4100:32%"
    assert COLUMNS["flags"].value(line) == "modes"


def test_over_launches_ten_percent_is_precise_enough() -> None:
    """What --precision asks is asked of one launch."""
    for spread, flags in ((0.09, ()), (0.11, ("imprecise",))):
        seconds = np.linspace(1 - spread, 1 + spread, 6) * 1e-3
        many = [a_result(launch=n, summary=a_summary(s)) for n, s in enumerate(seconds)]
        assert only(*many).flags == flags


# --- which is faster ------------------------------------------------------------------------------


def group(*times: tuple[float, float | None], **other: Any) -> list[Line]:
    """One line a backend: its time and the relative half-width of its interval."""
    names = ("gloo", "mpi", "nccl")
    return [
        only(a_result(a_case(backend=name), summary=a_summary(seconds, width), **other))
        for name, (seconds, width) in zip(names, times, strict=False)
    ]


def name_fastest(lines: list[Line]) -> str | None:
    fastest = find_fastest(lines)
    return fastest and fastest.case.backend


def test_the_faster_backend_is_the_one_whose_interval_lies_below_all_others() -> None:
    """Apart: the lower one. Touching, overlapping or alone: none, however different the medians."""
    apart = group((1.0, 0.02), (1.1, 0.02), (0.9, 0.02))
    assert name_fastest(apart) == "nccl"
    assert name_fastest(apart[:2]) == "gloo"
    assert find_fastest(apart[:1]) is find_fastest([]) is None
    assert find_fastest(group((1.0, 0.05), (1.1, 0.05))) is None
    assert find_fastest(group((1.0, 0.0), (1.0, 0.0))) is None
    assert find_fastest(group((1.0, 0.01), (1.02, 0.0099), (5.0, 0.01))) is None


@pytest.mark.parametrize(
    "cause", [{"wrong": WRONG}, {"hard_limit": replace(HARD, bytes_per_second=1.0)}]
)
def test_a_line_that_must_not_be_used_is_never_the_faster_one(cause: dict[str, Any]) -> None:
    """A wrong result or an impossible time beats no other backend, and is beaten by none."""
    good, bad = group((2.0, 0.01)), group((1.0, 0.01), **cause)
    assert find_fastest([*good, *bad]) is None
    slow = group((9.0, 0.01), **cause)
    assert find_fastest([*good, *slow]) is None
