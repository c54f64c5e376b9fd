"""The figures of other benchmarks, computed from ddpbench's stamps by their exact definitions.

Both are a mean over calls and ranks of (exit - entry) by the host's clock. OSU makes one call at a
time, each between two barriers that are not timed. nccl-tests makes calls back to back, with one
wait at the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from ddpbench.records.schema import EVENTS, EXIT_ENTRY, Result

BETWEEN_PAIRS = ("send_recv", "bidirectional")  # other benchmarks time something else


def of_osu(result: Result) -> bool:
    """Whether OSU measures such a case in the same way: a blocking collective of all ranks."""
    case = result.case
    between = case.issue == "isolated" and case.start == "barrier" and not case.async_op
    one_call = result.calls == 1 and case.time_definition in (EXIT_ENTRY, EVENTS)
    return between and one_call and _of_all(result)


def of_nccl_tests(result: Result) -> bool:
    """Whether nccl-tests measures such a case in the same way: calls in flight."""
    return result.case.issue == "pipelined" and _of_all(result)


def _of_all(result: Result) -> bool:
    return result.case.group == "world" and result.case.operation not in BETWEEN_PAIRS


def seconds(results: Sequence[Result], measures_alike: Callable[[Result], bool]) -> float | None:
    """Return seconds per call, median over launches; None if the benchmark measures otherwise."""
    means = [
        r.summary.overall_mean_seconds
        for r in results
        if r.summary and r.summary.overall_mean_seconds is not None and measures_alike(r)
    ]
    return statistics.median(means) if means else None
