"""Columns of a run of collectives: µs and GB/s are made here only.

One entry of COLUMNS adds a column.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddpbench.analysis import peers
from ddpbench.catalog.sizes import readable
from ddpbench.present.columns import (
    Column,
    digits,
    extra_column,
    format_half_width,
    scaled,
    text_column,
)
from ddpbench.records.schema import LAUNCH_HIDDEN

if TYPE_CHECKING:
    from ddpbench.analysis.lines import Line
    from ddpbench.records.schema import Result

Number = Callable[["Line"], float | None]


def _check(line: Line) -> str:
    if any(r.wrong for r in line.results):
        return "WRONG"
    return "ok" if any(r.checks for r in line.results) else "-"


def _limit_rate(line: Line) -> float | None:
    rates = [r.limit.bytes_per_second for r in line.results if r.limit]
    return sum(rates) / len(rates) / 1e9 if rates else None


def _flags(line: Line) -> str:
    """Format the flags; those that state a difference or a number show it."""
    details = {
        "launches": lambda: _ends(line.medians),
        "cores": lambda: _ends(line.handoffs),
        "faults": lambda: f"({max((r.page_faults or 0) / r.calls for r in line.results):.0f})",
        "modes": lambda: f"({_modes(line)})",
    }
    return " ".join(name + (details[name]() if name in details else "") for name in line.flags)


def _ends(seconds: list[float]) -> str:
    """Format the least and the largest of sorted times, in µs."""
    return f"({digits(seconds[0] * 1e6)}…{digits(seconds[-1] * 1e6)})"


def _modes(line: Line) -> str | None:
    """Format both usual times with their shares, "402.1:68% 4100:32%"; None if there is one."""
    return " ".join(f"{digits(m.seconds * 1e6)}:{m.share:.0%}" for m in line.modes) or None


def _percentile(name: str) -> Number:
    return lambda line: scaled(line.percentiles.get(name), 1e6)


def _bound(name: str) -> Number:
    return lambda line: getattr(line.interval, name) * 1e6 if line.interval else None


def _statistic(
    name: str, over_launches: Callable[[list[float]], float] = statistics.median
) -> Number:
    def microseconds(line: Line) -> float | None:
        values = [getattr(r.summary, name) for r in line.results if r.summary]
        known = [seconds for seconds in values if seconds is not None]
        return over_launches(known) * 1e6 if known else None

    return microseconds


def _other_tool(measures_alike: Callable[[Result], bool]) -> Number:
    return lambda line: scaled(peers.seconds(line.results, measures_alike), 1e6)


COLUMNS: dict[str, Column[Line]] = {
    "op": extra_column("op", lambda line: line.case.operation),
    "size": Column("size", lambda line: line.case.nbytes, lambda line: readable(line.case.nbytes)),
    "count": Column("count", lambda line: line.case.count),
    "type": extra_column("type", lambda line: line.case.dtype),
    "redop": extra_column("redop", lambda line: line.case.reduce_op),
    "root": extra_column("root", lambda line: line.case.root),
    "form": extra_column("form", lambda line: line.case.form),
    "place": extra_column("place", lambda line: "in" if line.case.in_place else "out"),
    "group": extra_column("group", lambda line: line.case.group),
    "backend": text_column("backend", lambda line: line.case.backend),
    "provider": extra_column("provider", lambda line: line.case.provider),
    "time": Column("time µs", lambda line: scaled(line.seconds, 1e6)),
    "interval": Column("95 %", lambda line: line.half_width, format_half_width),
    "low": extra_column("low µs", _bound("low")),
    "high": extra_column("high µs", _bound("high")),
    "p90": extra_column("p90 µs", _percentile("p90")),
    "p99": Column("p99 µs", _percentile("p99")),
    "p99.9": extra_column("p99.9 µs", _percentile("p99.9")),
    "mean": extra_column("mean µs", _statistic("mean_seconds")),
    "min": extra_column("min µs", _statistic("min_seconds", min)),
    "max": extra_column("max µs", _statistic("max_seconds", max)),
    "rank_mean": extra_column("t_mean µs", _statistic("rank_mean_seconds")),
    "rank_min": extra_column("t_min µs", _statistic("rank_min_seconds")),
    "osu": extra_column("osu µs", _other_tool(peers.of_osu)),
    "nccl_tests": extra_column("nccl-tests µs", _other_tool(peers.of_nccl_tests)),
    "last_in": extra_column("last in µs", _statistic("last_in_seconds")),
    "global": extra_column("global µs", _statistic("global_seconds")),
    "skew": Column(
        "skew µs",
        lambda line: scaled(line.skew, 1e6),
        applies=lambda line: line.case.time_definition not in LAUNCH_HIDDEN,
    ),
    "launch": Column(
        "launch µs",
        _statistic("launch_seconds"),
        applies=lambda line: line.case.time_definition in LAUNCH_HIDDEN,
    ),
    "cold": extra_column(
        "cold µs", lambda line: scaled(next((r.cold_seconds for r in line.results), None), 1e6)
    ),
    "algbw": Column("algbw GB/s", lambda line: line.algbw and line.algbw / 1e9),
    "busbw": Column("busbw GB/s", lambda line: line.busbw and line.busbw / 1e9),
    "limit": Column(
        "% limit",
        lambda line: line.fraction,
        lambda line: "-" if line.fraction is None else f"{line.fraction * 100:.1f}",
    ),
    "limit_rate": extra_column("limit GB/s", _limit_rate),
    "check": text_column("check", _check),
    "repetitions": extra_column(
        "n", lambda line: sum(r.summary.repetitions for r in line.results if r.summary)
    ),
    "launches": extra_column("launches", lambda line: len(line.results)),
    "medians": extra_column(
        "medians µs", lambda line: " ".join(digits(m * 1e6) for m in line.medians)
    ),
    "modes": extra_column("modes µs", _modes),
    "flags": Column("flags", lambda line: " ".join(line.flags), _flags, left=True),
    "reason": extra_column("reason", lambda line: line.reason),
}
