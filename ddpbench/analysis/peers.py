"""The figures that other benchmarks print, by exactly their definitions, from ddpbench's stamps.

Both are a mean over calls and over ranks of (exit - entry) by the host's clock. OSU's calls are one
at a time, each between two barriers, and no barrier is timed. Those of nccl-tests follow each other
with one wait at the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from ddpbench.records.schema import Result

BETWEEN_PAIRS = ("send_recv", "bidirectional")  # of ranks, where the others time something else


def of_osu(result: Result) -> bool:
    """Whether OSU measures such a case likewise: a blocking collective of all ranks."""
    case = result.case
    between = case.issue == "isolated" and case.start == "barrier" and not case.async_op
    one_call = result.calls == 1 and case.time_definition == "exit-entry"
    return between and one_call and _of_all(result)


def of_nccl_tests(result: Result) -> bool:
    """Whether nccl-tests measures such a case likewise: calls in flight."""
    return result.case.issue == "pipelined" and _of_all(result)


def _of_all(result: Result) -> bool:
    return result.case.group == "world" and result.case.operation not in BETWEEN_PAIRS


def seconds(results: Sequence[Result], measured_so: Callable[[Result], bool]) -> float | None:
    """The figure of one call: the median over launches; None where the case is not measured so."""
    means = [
        r.summary.overall_mean_seconds
        for r in results
        if r.summary and r.summary.overall_mean_seconds is not None and measured_so(r)
    ]
    return statistics.median(means) if means else None
