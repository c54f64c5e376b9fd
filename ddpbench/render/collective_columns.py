"""A run as rows of displayed values: the only place where µs and GB/s are made.

One entry of COLUMNS adds a column.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddpbench.analysis import peers
from ddpbench.catalog.sizes import readable

if TYPE_CHECKING:
    from ddpbench.analysis.lines import Line
    from ddpbench.records.schema import Case, Result, StepCase


class UnknownColumn(Exception):
    """A column was asked for that this kind of run does not have."""


T = TypeVar("T")
MOST_EACH = 24  # characters of "4+4+2+2"


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column: its head in a text table, its name in CSV, what it shows, whether by default."""

    head: str
    value: Callable[[T], float | int | str | None]
    shown: Callable[[T], str] | None = None  # as text, where the plain value does not do
    default: bool = True


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def _gigabytes(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e9


def ranks(case: Case | StepCase) -> str:
    """How many, and where they are: "4 ranks on 3 hosts (2+1+1)"."""
    count, hosts = case.world_size, case.ranks_per_host
    told = f"{count} rank{'s' if count > 1 else ''}"
    if len(hosts) < 2:
        return told
    each = f"{hosts[0]} each" if len(set(hosts)) == 1 else "+".join(map(str, hosts))
    if len(each) > MOST_EACH:
        each = f"{min(hosts)} to {max(hosts)} each"
    return f"{told} on {len(hosts)} hosts ({each})"


def at_once(case: Case) -> str:
    """Where the group is of which a row tells, and how many there are; "": it is all ranks."""
    several = f", {case.groups} groups at once" if case.groups > 1 else ""
    words = {"host": "inside each host", "cross": "between hosts", "world": ""}
    return words.get(case.group, case.group) + several


def digits(value: float | int | str | None) -> str:
    """Four digits, no exponent: 12345, 123.4, 1.234, 0.1234, 0.0123; below 0.001 two, 0.00012."""
    if value is None:
        return "-"
    if isinstance(value, (str, int)):
        return str(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    places = 3 - exponent if exponent >= 0 else 4 if exponent >= -3 else 1 - exponent
    return f"{value:.{max(0, places)}f}"


def _percentile(name: str) -> Callable[[Line], float | None]:
    return lambda line: _microseconds(line.percentiles.get(name))


def _first(line: Line, name: str) -> float | None:
    return next((getattr(r, name) for r in line.results), None)


def _check(line: Line) -> str:
    if any(r.wrong for r in line.results):
        return "WRONG"
    return "ok" if any(r.checks for r in line.results) else "-"


def _limit_rate(line: Line) -> float | None:
    rates = [r.limit.bytes_per_second for r in line.results if r.limit]
    return _gigabytes(sum(rates) / len(rates)) if rates else None


def _interval(line: Line) -> str:
    return "-" if line.half_width is None else f"±{line.half_width * 100:.1f}%"


def _flags(line: Line) -> str:
    """Their names; where launches or repetitions differ, by how much."""
    details = {
        "launches": lambda: _ends(line.medians),
        "cores": lambda: _ends(line.handoffs),
        "faults": lambda: f"({max((r.page_faults or 0) / r.calls for r in line.results):.0f})",
        "modes": lambda: f"({_modes(line)})",
    }
    return " ".join(name + (details[name]() if name in details else "") for name in line.flags)


def _ends(seconds: list[float]) -> str:
    """The least and the largest, in µs."""
    return f"({digits(seconds[0] * 1e6)}…{digits(seconds[-1] * 1e6)})"


def _modes(line: Line) -> str | None:
    """ "402.1:68% 4100:32%"; None: there is one."""
    return " ".join(f"{digits(m.seconds * 1e6)}:{m.share:.0%}" for m in line.modes) or None


def _bound(name: str) -> Callable[[Line], float | None]:
    return lambda line: (
        None if line.interval is None else _microseconds(getattr(line.interval, name))
    )


def _statistic(
    name: str, over_launches: Callable[[list[float]], float] = statistics.median
) -> Callable[[Line], float | None]:
    def value(line: Line) -> float | None:
        found = [getattr(r.summary, name) for r in line.results if r.summary]
        known = [seconds for seconds in found if seconds is not None]
        return _microseconds(over_launches(known)) if known else None

    return value


def _as_peers(measured_so: Callable[[Result], bool]) -> Callable[[Line], float | None]:
    return lambda line: _microseconds(peers.seconds(line.results, measured_so))


COLUMNS: dict[str, Column[Line]] = {
    "op": Column("op", lambda line: line.case.operation, default=False),
    "size": Column("size", lambda line: line.case.nbytes, lambda line: readable(line.case.nbytes)),
    "count": Column("count", lambda line: line.case.count),
    "type": Column("type", lambda line: line.case.dtype, default=False),
    "redop": Column("redop", lambda line: line.case.reduce_op, default=False),
    "root": Column("root", lambda line: line.case.root, default=False),
    "form": Column("form", lambda line: line.case.form, default=False),
    "place": Column("place", lambda line: "in" if line.case.in_place else "out", default=False),
    "group": Column("group", lambda line: line.case.group, default=False),
    "backend": Column("backend", lambda line: line.case.backend),
    "provider": Column("provider", lambda line: line.case.provider, default=False),
    "time": Column("time µs", lambda line: _microseconds(line.seconds)),
    "interval": Column("95 %", lambda line: line.half_width, _interval),
    "low": Column("low µs", _bound("low"), default=False),
    "high": Column("high µs", _bound("high"), default=False),
    "p90": Column("p90 µs", _percentile("p90"), default=False),
    "p99": Column("p99 µs", _percentile("p99")),
    "p99.9": Column("p99.9 µs", _percentile("p99.9"), default=False),
    "mean": Column("mean µs", _statistic("mean_seconds"), default=False),
    "min": Column("min µs", _statistic("min_seconds", min), default=False),
    "max": Column("max µs", _statistic("max_seconds", max), default=False),
    "rank_mean": Column("t_mean µs", _statistic("rank_mean_seconds"), default=False),
    "rank_min": Column("t_min µs", _statistic("rank_min_seconds"), default=False),
    "osu": Column("osu µs", _as_peers(peers.of_osu), default=False),
    "nccl_tests": Column("nccl-tests µs", _as_peers(peers.of_nccl_tests), default=False),
    "last_in": Column("last in µs", _statistic("last_in_seconds"), default=False),
    "global": Column("global µs", _statistic("global_seconds"), default=False),
    "skew": Column("skew µs", lambda line: _microseconds(line.skew)),
    "cold": Column(
        "cold µs", lambda line: _microseconds(_first(line, "cold_seconds")), default=False
    ),
    "algbw": Column("algbw GB/s", lambda line: _gigabytes(line.algbw)),
    "busbw": Column("busbw GB/s", lambda line: _gigabytes(line.busbw)),
    "limit": Column(
        "% limit",
        lambda line: line.fraction,
        lambda line: "-" if line.fraction is None else f"{line.fraction * 100:.1f}",
    ),
    "limit_rate": Column("limit GB/s", _limit_rate, default=False),
    "check": Column("check", _check),
    "repetitions": Column(
        "n",
        lambda line: sum(r.summary.repetitions for r in line.results if r.summary),
        default=False,
    ),
    "launches": Column("launches", lambda line: len(line.results), default=False),
    "medians": Column(
        "medians µs", lambda line: " ".join(digits(m * 1e6) for m in line.medians), default=False
    ),
    "modes": Column("modes µs", _modes, default=False),
    "flags": Column("flags", lambda line: " ".join(line.flags), _flags),
    "reason": Column("reason", lambda line: line.reason, default=False),
}


def chosen(
    columns: Iterable[str] | None, table: Mapping[str, Column[Any]] = COLUMNS, every: bool = False
) -> list[str]:
    """The columns asked for, or the default ones, or every one.

    Raises UnknownColumn for one that this table does not have.
    """
    names = list(columns or (name for name in table if every or table[name].default))
    for name in names:
        if name not in table:
            raise UnknownColumn(f"this run has no column {name!r}; it has {', '.join(table)}")
    return names


def text(line: T, name: str, table: Mapping[str, Column[T]] | None = None) -> str:
    """What a text table shows in this column."""
    column: Column[Any] = (table or COLUMNS)[name]
    return column.shown(line) if column.shown else digits(column.value(line))
