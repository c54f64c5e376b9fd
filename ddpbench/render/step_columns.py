"""A run of DDP steps as rows of displayed values: ms, MB and samples a second are made here.

One entry of STEP_COLUMNS adds a column.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddpbench.render.collective_columns import Column

if TYPE_CHECKING:
    from ddpbench.analysis.step_lines import StepLine
    from ddpbench.records.schema import Figure, Interval, Part

Value = Callable[["StepLine"], float | int | str | None]


def milliseconds(seconds: float | None) -> float | None:
    """For a column."""
    return None if seconds is None else seconds * 1e3


def ms(seconds: float | None, like: float | None) -> str:
    """Milliseconds with as many places as give a step of `like` seconds four digits."""
    if seconds is None:
        return "-"
    places = 3 - math.floor(math.log10(like * 1e3)) if like else 3
    return f"{seconds * 1e3:.{min(max(places, 0), 4)}f}"


def percent(share: float | None) -> str:
    """A share with one place."""
    return "-" if share is None else f"{share * 100:.1f}"


def bounded(part: Part, step: float | None) -> tuple[str, str]:
    """Value and interval; what is noise, for it may be 0, stands in parentheses."""
    value = ms(part.figure.value, step)
    return uncertain(part, value), span(part.figure.interval, step)


def span(interval: Interval | None, step: float | None) -> str:
    """An interval in milliseconds, with the places of the step."""
    if interval is None:
        return "-"
    return f"[{ms(interval.low, step)} … {ms(interval.high, step)}]"


def uncertain(part: Part, text: str) -> str:
    """What is shown of a part, in parentheses where it is noise."""
    interval = part.figure.interval
    exact = interval is not None and interval.low == interval.high
    return text if part.resolved or exact else f"({text})"


def named(line: StepLine, rows: list[list[str]]) -> list[list[str]]:
    """The rows of a backend, its name before the first."""
    return [["" if i else line.case.backend, *row] for i, row in enumerate(rows)]


def _case(name: str) -> Value:
    def value(line: StepLine) -> float | int | str | None:
        found: Any = getattr(line.case, name)
        return " ".join(map(str, found)) if isinstance(found, tuple) else found

    return value


def _summary(name: str) -> Value:
    return lambda line: None if line.summary is None else getattr(line.summary, name)


def _bound(figure: Figure | None, name: str) -> float | None:
    found = figure.interval if figure else None
    return None if found is None else float(getattr(found, name))


def _phase(name: str, head: str) -> Column[StepLine]:
    def seconds(line: StepLine) -> float | None:
        phase = line.phase(name)
        return None if phase is None else phase.slowest.value

    return Column(
        head,
        lambda line: milliseconds(seconds(line)),
        lambda line: ms(seconds(line), line.seconds),
    )


def _part(name: str, words: str) -> dict[str, Column[StepLine]]:
    """Value and bounds of a part of the budget; a low that is not above 0 is noise."""

    def figure(line: StepLine) -> Figure | None:
        part = line.part(words)
        return None if part is None else part.figure

    def value(line: StepLine) -> float | None:
        found = figure(line)
        return None if found is None else found.value * 1e3

    def shown(line: StepLine) -> str:
        part = line.part(words)
        return "-" if part is None else bounded(part, line.seconds)[0]

    def bound(which: str) -> Value:
        return lambda line: milliseconds(_bound(figure(line), which))

    return {
        f"{name}_ms": Column(f"{name} ms", value, shown, default=False),
        f"{name}_low_ms": Column(f"{name} low", bound("low"), default=False),
        f"{name}_high_ms": Column(f"{name} high", bound("high"), default=False),
    }


def _late_rank(line: StepLine) -> int | None:
    part = line.part("waiting for rank")
    return part.rank if part is not None and part.resolved else None


def _speed_up(which: str) -> Value:
    def value(line: StepLine) -> float | None:
        found = line.summary.speed_up if line.summary else None
        return found.value if found and which == "value" else _bound(found, which)

    return value


def _timer(name: str) -> Column[StepLine]:
    def value(line: StepLine) -> float | None:
        return milliseconds(line.summary.timers.get(name)) if line.summary else None

    return Column(f"DDP's {name} ms", value, default=False)


def _observer(line: StepLine) -> float | None:
    found = line.summary.observer if line.summary else None
    return None if found is None else found.figure.value * 1e3


def _slowest(name: str) -> Value:
    """Of the forward: from backward on the ranks wait for each other."""

    def value(line: StepLine) -> float | int | None:
        phase = line.phase("forward")
        found: float | int | None = None if phase is None else getattr(phase, name)
        return found

    return value


def _slowest_shown(line: StepLine) -> str:
    phase = line.phase("forward")
    return "-" if phase is None else f"{phase.slowest_rank} ({phase.slowest_share * 100:.0f} %)"


def _verified(line: StepLine) -> int:
    return sum(r.replicas.verified for r in line.results if r.replicas)


def _equal(line: StepLine) -> bool | None:
    found = line.replicas
    return None if found is None or (found.not_compared and not found.failed) else found.equal


def _equal_shown(line: StepLine) -> str:
    found = line.replicas
    if found is None:
        return "-"
    if found.failed:
        return "NaN" if found.equal else "NO"
    return "yes" if found.ok else "unknown"


def _cost(line: StepLine) -> float | None:
    cost = line.replicas.cost if line.replicas else None
    return None if cost is None else cost.value * 1e3


def _last_epoch(name: str) -> Value:
    def value(line: StepLine) -> float | int | None:
        epochs = next((r.epochs for r in line.results if r.epochs), ())
        found: float | int | None = getattr(epochs[-1], name) if epochs else None
        return found

    return value


def _rate(line: StepLine) -> float | None:
    return None if line.summary is None else line.summary.samples_per_second


def _options(*names: str) -> dict[str, Column[StepLine]]:
    return {name: Column(name.replace("_", " "), _case(name), default=False) for name in names}


def _half_width(line: StepLine) -> str:
    return "-" if line.half_width is None else f"±{line.half_width * 100:.1f}%"


STEP_COLUMNS: dict[str, Column[StepLine]] = {
    **_options("workload", "settings"),
    "backend": Column("backend", _case("backend")),
    **_options(
        "provider", "device", "world_size", "ranks_per_host", "threads", "parameters",
        "parameter_nbytes", "batch", "accumulate", "optimizer", "amp", "comm_hook",
        "bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters",
    ),
    "step_ms": Column(
        "step ms",
        lambda line: milliseconds(line.seconds),
        lambda line: ms(line.seconds, line.seconds),
    ),
    "interval": Column("95 %", lambda line: line.half_width, _half_width),
    "low_ms": Column(
        "low ms",
        lambda line: milliseconds(line.interval.low) if line.interval else None,
        default=False,
    ),
    "high_ms": Column(
        "high ms",
        lambda line: milliseconds(line.interval.high) if line.interval else None,
        default=False,
    ),
    "samples_per_second": Column("samples/s", _rate),
    "forward_ms": _phase("forward", "forward ms"),
    "backward_ms": _phase("backward", "backward ms"),
    "optimizer_ms": _phase("optimizer", "optimizer ms"),
    "slowest_rank": Column("slowest rank", _slowest("slowest_rank"), _slowest_shown),
    "slowest_share": Column("share", _slowest("slowest_share"), default=False),
    "cold_ms": Column(
        "cold ms",
        lambda line: milliseconds(next((r.cold_seconds for r in line.results), None)),
        default=False,
    ),
    **_part("compute", "compute"),
    **_part("copies", "bucket copies"),
    **_part("exposed", "exposed communication"),
    **_part("transfer", "exposed transfer"),
    **_part("overhead", "communication overhead"),
    **_part("hidden", "hidden communication"),
    **_part("communication", "communication"),
    **_part("waiting", "waiting for rank"),
    "late_rank": Column("late rank", _late_rank, default=False),
    "speed_up": Column("speed-up", _speed_up("value"), default=False),
    "speed_up_low": Column("speed-up low", _speed_up("low"), default=False),
    "speed_up_high": Column("speed-up high", _speed_up("high"), default=False),
    **{f"ddp_{name}_ms": _timer(name)
       for name in ("forward", "backward", "communication", "overlap")},
    "observer_ms": Column("timing hook ms", _observer, default=False),
    "buckets": Column(
        "buckets", lambda line: len(line.summary.buckets) if line.summary else None, default=False
    ),
    "verified": Column("verified", _verified, default=False),
    "replicas_equal": Column("equal", _equal, _equal_shown),
    "verify_ms": Column("verify ms", _cost, default=False),
    "verify_share": Column(
        "verify share",
        lambda line: line.replicas.share if line.replicas else None,
        default=False,
    ),
    "epochs": Column("epochs", _last_epoch("number"), default=False),
    "train_loss": Column("train loss", _last_epoch("train_loss"), default=False),
    "validation_loss": Column("validation loss", _last_epoch("validation_loss"), default=False),
    "rounds": Column("rounds", _summary("rounds"), default=False),
    "in_a_row": Column("in a row", _summary("in_a_row"), default=False),
    "launches": Column("launches", lambda line: len(line.results), default=False),
    "flags": Column("flags", lambda line: " ".join(line.flags)),
    "reason": Column("reason", lambda line: line.reason, default=False),
}  # fmt: skip
