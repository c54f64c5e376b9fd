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
    by_name,
    compared,
    digits,
    scaled,
    show_flags,
    text_column,
)
from ddpbench.records.schema import LAUNCH_HIDDEN

if TYPE_CHECKING:
    from ddpbench.analysis.lines import Line
    from ddpbench.records.schema import Case, Result

Number = Callable[["Line"], float | None]


def _check(line: Line) -> str:
    if any(r.wrong for r in line.results):
        return "WRONG"
    return "ok" if any(r.checks for r in line.results) else "-"


def _limit_rate(line: Line) -> float | None:
    rates = [r.limit.bytes_per_second for r in line.results if r.limit]
    return sum(rates) / len(rates) / 1e9 if rates else None


def _flags(line: Line) -> str:
    from ddpbench.analysis.lines import FLAGS  # loads numpy

    return show_flags(line, FLAGS)


def _modes(line: Line) -> str | None:
    """Format both usual times with their shares, "402.1:68% 4100:32%"; None if there is one."""
    return " ".join(f"{digits(m.seconds * 1e6)}:{m.share:.0%}" for m in line.modes) or None


def _microseconds(seconds: list[float]) -> str | None:
    """Format times of launches, in µs: "4.9 5.2"."""
    return " ".join(digits(value * 1e6) for value in seconds) or None


def _faults(line: Line) -> float | None:
    return max(((r.page_faults or 0) / r.calls for r in line.results if r.calls), default=None)


def _case(name: str, meaning: str) -> Column[Line]:
    """Build a column of a field of the case that a table's title shows."""
    field = {"op": "operation", "type": "dtype", "redop": "reduce_op"}.get(name, name)

    def value(line: Line) -> str | int | None:
        found: str | int | None = getattr(line.case, field)
        return found

    return Column(name, value, meaning=meaning, default=False)


def _time(
    name: str, seconds: Number, meaning: str, *, default: bool = False,
    applies: Callable[[Case], bool] = lambda _: True,
) -> Column[Line]:  # fmt: skip
    """Build a column of a time; only those whose table needs them are shown by default."""
    return Column(
        name, lambda line: scaled(seconds(line), 1e6), unit="µs", meaning=meaning,
        default=default, applies=lambda line: applies(line.case),
    )  # fmt: skip


def _statistic(
    name: str, over_launches: Callable[[list[float]], float] = statistics.median
) -> Number:
    def seconds(line: Line) -> float | None:
        values = [getattr(r.summary, name) for r in line.results if r.summary]
        known = [value for value in values if value is not None]
        return over_launches(known) if known else None

    return seconds


def _percentile(name: str) -> Column[Line]:
    meaning = f"{name[1:]} % of the calls were faster; unknown with too few repetitions"
    return _time(name, lambda line: line.percentiles.get(name), meaning)


def _bound(name: str) -> Number:
    return lambda line: getattr(line.interval, name) if line.interval else None


def _other_tool(measures_alike: Callable[[Result], bool]) -> Number:
    return lambda line: peers.seconds(line.results, measures_alike)


def _rate(name: str, value: Number, meaning: str, *, default: bool = False) -> Column[Line]:
    return Column(name, value, unit="GB/s", meaning=meaning, default=default)


COLUMNS: dict[str, Column[Line]] = by_name(
    _case("op", "operation"),
    Column(
        "size",
        lambda line: line.case.nbytes,
        lambda line: readable(line.case.nbytes),
        meaning="total buffer in bytes, as in nccl-tests; 1 KiB = 1024 bytes",
    ),
    _case("count", "elements, of one rank where the buffer has a block for each"),
    _case("type", "data type"),
    _case("redop", "reduce operation"),
    _case("root", "rank that sends to all, or that gets the result"),
    _case("form", "tensor, or list: a list of tensors, one for each rank"),
    Column(
        "place",
        lambda line: "in" if line.case.in_place else "out",
        meaning="in or out: whether the result replaces the input",
        default=False,
    ),
    _case("group", "who works together: world, host (the ranks of each), cross (one of each)"),
    text_column("backend", lambda line: line.case.backend, "backend"),
    _case("provider", "implementation of the backend"),
    _time(
        "time",
        lambda line: line.seconds,
        'time of one call; "how" above states from where to where, and over what',
        default=True,
    ),
    *compared("time"),
    _time("low", _bound("low"), "lower end of the 95 % interval of the time"),
    _time("high", _bound("high"), "upper end of the 95 % interval of the time"),
    *map(_percentile, ("p90", "p99", "p99.9")),
    _time("mean", _statistic("mean_seconds"), "mean over the calls"),
    _time("min", _statistic("min_seconds", min), "shortest call"),
    _time("max", _statistic("max_seconds", max), "longest call"),
    _time("rank_mean", _statistic("rank_mean_seconds"), "time of a call, mean over ranks"),
    _time("rank_min", _statistic("rank_min_seconds"), "time of a call on the fastest rank"),
    _time(
        "osu",
        _other_tool(peers.of_osu),
        "as OSU prints it: mean over calls and ranks of calls between barriers",
    ),
    _time(
        "nccl_tests",
        _other_tool(peers.of_nccl_tests),
        "as nccl-tests prints it: time of the calls in flight / their number, mean over ranks",
    ),
    _time("last_in", _statistic("last_in_seconds"), "from the last rank's entry to the last exit"),
    _time("global", _statistic("global_seconds"), "from the first rank's entry to the last exit"),
    _time(
        "skew",
        lambda line: line.skew,
        "how long after the first rank the last rank entered, median; unknown if the hosts' "
        "clocks may differ by more than 5 % of the time",
        applies=lambda case: case.time_definition not in LAUNCH_HIDDEN,
    ),
    _time(
        "launch",
        _statistic("launch_seconds"),
        "how long the slowest rank's call took to return to the host, median; the device was kept "
        "busy meanwhile, so the time does not include it",
        default=True,
        applies=lambda case: case.time_definition in LAUNCH_HIDDEN,
    ),
    _time(
        "cold",
        lambda line: next((r.cold_seconds for r in line.results), None),
        "first call of the first launch",
    ),
    _rate("algbw", lambda line: line.algbw and line.algbw / 1e9, "size / time; GB = 10⁹ bytes"),
    _rate(
        "busbw",
        lambda line: line.busbw and line.busbw / 1e9,
        "size / time × bus factor of the operation (nccl-tests); GB = 10⁹ bytes",
        default=True,
    ),
    Column(
        "limit",
        lambda line: line.fraction,
        lambda line: "-" if line.fraction is None else f"{line.fraction * 100:.1f}",
        unit="%",
        meaning="busbw as a share of what the links between the ranks can carry",
    ),
    _rate("limit_rate", _limit_rate, "what the links between the ranks can carry"),
    text_column("check", _check, "whether the results were right"),
    Column(
        "repetitions",
        lambda line: sum(r.summary.repetitions for r in line.results if r.summary),
        meaning="repetitions of all launches",
        default=False,
    ),
    Column("launches", lambda line: len(line.results), meaning="launches", default=False),
    Column(
        "medians",
        lambda line: _microseconds(line.medians),
        unit="µs",
        meaning="median of each launch, sorted",
        default=False,
    ),
    Column(
        "modes",
        _modes,
        unit="µs",
        meaning="both usual times of the calls, with their shares, if there are two",
        default=False,
    ),
    Column(
        "handoffs",
        lambda line: _microseconds(line.handoffs),
        unit="µs",
        meaning="round trip of a cache line between the ranks' cores, of the launches that know it",
        default=False,
    ),
    Column(
        "faults", _faults, meaning="page faults of a call, in the launch with most", default=False
    ),
    Column(
        "flags",
        lambda line: " ".join(line.flags),
        _flags,
        meaning="remarks, as marks that are explained below the tables",
        left=True,
    ),
    Column("reason", lambda line: line.reason, meaning="why it was not measured", default=False),
)
