"""Columns of a run of collectives: µs and GB/s are made here only.

One entry of COLUMNS adds a column.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ddpbench.catalog.sizes import readable
from ddpbench.present.columns import (
    Column,
    Value,
    build_interval_and_faster,
    by_name,
    flags_column,
    format_number,
    scale_known,
    text_column,
)
from ddpbench.records.schema import EVENTS, EXIT_ENTRY, LAUNCH_HIDDEN, Result

if TYPE_CHECKING:
    from ddpbench.analysis.lines import Line

Number = Callable[["Line"], "float | None"]
BETWEEN_PAIRS = ("send_recv", "bidirectional")  # other benchmarks time something else


def _is_osu(result: Result) -> bool:
    """Return whether OSU measures such a case in the same way: one call between two barriers."""
    case = result.case
    between = case.issue == "isolated" and case.start == "barrier" and not case.async_op
    one_call = result.calls == 1 and case.time_definition in (EXIT_ENTRY, EVENTS)
    return between and one_call and _is_of_all(result)


def _is_nccl_tests(result: Result) -> bool:
    """Return whether nccl-tests measures such a case in the same way: calls in flight."""
    return result.case.issue == "pipelined" and _is_of_all(result)


def _is_of_all(result: Result) -> bool:
    return result.case.group == "world" and result.case.operation not in BETWEEN_PAIRS


def _mean_seconds(results: Sequence[Result], is_alike: Callable[[Result], bool]) -> float | None:
    """Return the mean over calls and ranks of exit - entry, median over launches.

    OSU and nccl-tests define their times like this. None if the benchmark measures otherwise.
    """
    alike = [r.summary for r in results if r.summary and is_alike(r)]
    means = [s.overall_mean_seconds for s in alike if s.overall_mean_seconds is not None]
    return statistics.median(means) if means else None


def _check(line: Line) -> str:
    if any(r.wrong for r in line.results):
        return "WRONG"
    return "ok" if any(r.checks for r in line.results) else "-"


def _limit_rate(line: Line) -> float | None:
    rates = [r.limit.bytes_per_second for r in line.results if r.limit]
    return sum(rates) / len(rates) / 1e9 if rates else None


def _modes(line: Line) -> str | None:
    """Format both modes with their shares, "402.1:68% 4100:32%"; None unless there are two."""
    return " ".join(f"{format_number(m.seconds * 1e6)}:{m.share:.0%}" for m in line.modes) or None


def _microseconds(seconds: Iterable[float]) -> str | None:
    """Format times of launches, in µs: "4.9 5.2"."""
    return " ".join(format_number(value * 1e6) for value in seconds) or None


def _faults(line: Line) -> float | None:
    return max(((r.page_faults or 0) / r.calls for r in line.results if r.calls), default=None)


def _extra(name: str, value: Callable[[Line], Value], meaning: str, **more: Any) -> Column[Line]:
    """Build a column that a table shows with --columns only. more: of Column."""
    return Column(name, value, meaning=meaning, **{"default": False, **more})


def _case(name: str, meaning: str, field: str = "") -> Column[Line]:
    """Build a column of a field of the case that a table's title shows."""
    return _extra(name, lambda line: getattr(line.case, field or name), meaning)


def _time(name: str, seconds: Number, meaning: str, **more: Any) -> Column[Line]:
    """Build a column of a time. more: of Column."""
    return _extra(name, lambda line: scale_known(seconds(line), 1e6), meaning, unit="µs", **more)


def _statistic(
    name: str, meaning: str, over_launches: Callable[[list[float]], float] = statistics.median
) -> Column[Line]:
    """Build the column of a time in the summary of each launch, over launches."""
    return _time(name, _over_launches(f"{name}_seconds", over_launches), meaning)


def _over_launches(
    field: str, combine: Callable[[list[float]], float] = statistics.median
) -> Number:
    def seconds(line: Line) -> float | None:
        values = [getattr(r.summary, field) for r in line.results if r.summary]
        known = [value for value in values if value is not None]
        return combine(known) if known else None

    return seconds


def _bound(name: str) -> Number:
    return lambda line: getattr(line.interval, name, None)


def _percentile(name: str) -> Column[Line]:
    meaning = f"{name[1:]} % of the calls were faster; unknown with too few repetitions"
    return _time(name, lambda line: line.percentiles.get(name), meaning)


COLUMNS: dict[str, Column[Line]] = by_name(
    _case("op", "operation", "operation"),
    Column(
        "size",
        lambda line: line.case.nbytes,
        lambda line: readable(line.case.nbytes),
        meaning="total buffer in bytes, as in nccl-tests; 1 KiB = 1024 bytes",
    ),
    _case("count", "elements; of one rank if the buffer has a block per rank"),
    _case("type", "data type", "dtype"),
    _case("redop", "reduce operation", "reduce_op"),
    _case("root", "rank that sends to all, or that receives the result"),
    _case("form", "tensor, or list: a list of tensors, one per rank"),
    _extra(
        "place",
        lambda line: "in" if line.case.in_place else "out",
        "in or out: whether the result replaces the input",
    ),
    _case(
        "group",
        "subgroups: world (all ranks), host (the ranks of each host), cross (one rank of each)",
    ),
    text_column("backend", lambda line: line.case.backend, "backend"),
    _case("provider", "implementation of the backend"),
    _time(
        "time",
        lambda line: line.seconds,
        'time of one call, as the line "how" defines it',
        default=True,
    ),
    *build_interval_and_faster("time"),
    _time("low", _bound("low"), "lower end of the 95 % interval of the time"),
    _time("high", _bound("high"), "upper end of the 95 % interval of the time"),
    *map(_percentile, ("p90", "p99", "p99.9")),
    _statistic("mean", "mean over the calls"),
    _statistic("min", "shortest call", min),
    _statistic("max", "longest call", max),
    _statistic("rank_mean", "time of a call, mean over ranks"),
    _statistic("rank_min", "time of a call on the fastest rank"),
    _time(
        "osu",
        lambda line: _mean_seconds(line.results, _is_osu),
        "as OSU prints it: mean over calls and ranks of calls between barriers",
    ),
    _time(
        "nccl_tests",
        lambda line: _mean_seconds(line.results, _is_nccl_tests),
        "as nccl-tests prints it: time of the calls in flight / their number, mean over ranks",
    ),
    _statistic("last_in", "from the last rank's entry to the last exit"),
    _statistic("global", "from the first rank's entry to the last exit"),
    _time(
        "skew",
        lambda line: line.skew,
        "from the first rank's entry to the last rank's, median; unknown if the hosts' clocks may "
        "differ by more than 5 % of the time",
    ),
    _time(
        "launch",
        _over_launches("launch_seconds"),
        "until the slowest rank's call returned to the host, median; the device was busy "
        "meanwhile, so the time does not include it",
        default=True,
        applies=lambda line: line.case.time_definition in LAUNCH_HIDDEN,
    ),
    _time(
        "cold",
        lambda line: next((r.cold_seconds for r in line.results), None),
        "first call of the first launch",
    ),
    _extra(
        "algbw",
        lambda line: line.algbw and line.algbw / 1e9,
        "size / time; GB = 10⁹ bytes",
        unit="GB/s",
    ),
    _extra(
        "busbw",
        lambda line: line.busbw and line.busbw / 1e9,
        "size / time × bus factor of the operation (nccl-tests); GB = 10⁹ bytes",
        unit="GB/s",
        default=True,
    ),
    Column(
        "limit",
        lambda line: line.fraction,
        lambda line: "-" if line.fraction is None else f"{line.fraction * 100:.1f}",
        unit="%",
        meaning="busbw / the limit of the links between the ranks",
    ),
    _extra("limit_rate", _limit_rate, "the limit of the links between the ranks", unit="GB/s"),
    text_column("check", _check, "whether the results were right"),
    _extra(
        "repetitions",
        lambda line: sum(r.summary.repetitions for r in line.results if r.summary),
        "repetitions of all launches",
    ),
    _extra("launches", lambda line: len(line.results), "launches"),
    _extra(
        "medians",
        lambda line: _microseconds(line.medians),
        "median of each launch, sorted",
        unit="µs",
    ),
    _extra(
        "modes",
        _modes,
        "both modes of the calls' times with their shares, if there are two",
        unit="µs",
    ),
    _extra(
        "handoffs",
        lambda line: _microseconds(line.handoffs),
        "round trip of a cache line between the ranks' cores, of the launches that measured it",
        unit="µs",
    ),
    _extra("faults", _faults, "page faults per call, in the launch with most"),
    flags_column(),
    _extra("reason", lambda line: line.reason, "why it was not measured"),
)
