"""Columns of a run of DDP steps: ms, MB and samples per second are made here.

One entry of STEP_COLUMNS adds a column.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddpbench.analysis import spans
from ddpbench.present.columns import (
    Column,
    Value,
    extra_column,
    format_half_width,
    scaled,
    text_column,
)

if TYPE_CHECKING:
    from ddpbench.analysis.step_lines import StepLine
    from ddpbench.records.schema import Figure, Interval, Part

Values = Callable[["StepLine"], Value]


def ms(seconds: float | None, step: float | None) -> str:
    """Format milliseconds with as many places as give a step of `step` seconds four digits."""
    if seconds is None:
        return "-"
    places = 3 - math.floor(math.log10(step * 1e3)) if step else 3
    return f"{seconds * 1e3:.{min(max(places, 0), 4)}f}"


def percent(share: float | None) -> str:
    """Format a share in % with one place."""
    return "-" if share is None else f"{share * 100:.1f}"


def bounded(part: Part, step: float | None) -> tuple[str, str]:
    """Format the value of a part and its interval."""
    return uncertain(part, ms(part.figure.value, step)), span(part.figure.interval, step)


def span(interval: Interval | None, step: float | None) -> str:
    """Format an interval in milliseconds, with the places of the step."""
    return f"[{ms(interval.low, step)} … {ms(interval.high, step)}]" if interval else "-"


def uncertain(part: Part, text: str) -> str:
    """Put the text in parentheses if the part may be 0: its value is noise."""
    interval = part.figure.interval
    exact = interval is not None and interval.low == interval.high
    return text if part.resolved or exact else f"({text})"


def with_backend(line: StepLine, rows: list[list[str]]) -> list[list[str]]:
    """Put the name of the backend before the first of its rows."""
    return [["" if i else line.case.backend, *row] for i, row in enumerate(rows)]


def _case(name: str) -> Values:
    def value(line: StepLine) -> Value:
        field: Any = getattr(line.case, name)
        if type(field) is int and field == 0:
            return None  # not told
        return " ".join(map(str, field)) if isinstance(field, tuple) else field

    return value


def _bound(name: str) -> Values:
    return lambda line: getattr(line.interval, name) * 1e3 if line.interval else None


def _summary(name: str) -> Values:
    return lambda line: None if line.summary is None else getattr(line.summary, name)


def _samples_per_second(line: StepLine) -> float | None:
    return (line.summary.samples_per_second or None) if line.summary else None


def _figure(figure: Figure | None, name: str) -> float | None:
    """Return `value`, or `low` or `high` of the interval; None if it is unknown."""
    source = figure if name == "value" else figure and figure.interval
    return None if source is None else float(getattr(source, name))


def _phase(name: str) -> Column[StepLine]:
    def seconds(line: StepLine) -> float | None:
        phase = line.phase(name)
        return phase.slowest.value if phase else None

    return Column(
        f"{name} ms",
        lambda line: scaled(seconds(line), 1e3),
        lambda line: ms(seconds(line), line.seconds),
    )


def _part(column: str, part_name: str) -> dict[str, Column[StepLine]]:
    """Build the columns of a part of the budget: its value and the ends of its interval."""

    def number(name: str) -> Values:
        def milliseconds(line: StepLine) -> float | None:
            part = line.part(part_name)
            return scaled(_figure(part.figure, name), 1e3) if part else None

        return milliseconds

    def text(line: StepLine) -> str:
        part = line.part(part_name)
        return bounded(part, line.seconds)[0] if part else "-"

    return {
        f"{column}_ms": extra_column(f"{column} ms", number("value"), text),
        f"{column}_low_ms": extra_column(f"{column} low", number("low")),
        f"{column}_high_ms": extra_column(f"{column} high", number("high")),
    }


def _operation_parts() -> dict[str, Column[StepLine]]:
    columns: dict[str, Column[StepLine]] = {}
    for names in (spans.EXPOSED_OF, spans.HIDDEN_OF):
        for part in names.values():
            columns |= _part(part.replace(" ", "_"), part)
    return columns


def _peak(line: StepLine) -> float | None:
    return (line.summary.peak_nbytes / 1e6 or None) if line.summary else None


def _late_rank(line: StepLine) -> int | None:
    part = line.part("waiting for rank")
    return part.rank if part is not None and part.resolved else None


def _speed_up(name: str) -> Values:
    return lambda line: _figure(line.summary.speed_up, name) if line.summary else None


def _timer(name: str) -> Column[StepLine]:
    return extra_column(
        f"DDP's {name} ms",
        lambda line: scaled(line.summary.timers.get(name), 1e3) if line.summary else None,
    )


def _observer(line: StepLine) -> float | None:
    observer = line.summary.observer if line.summary else None
    return observer.figure.value * 1e3 if observer else None


def _slowest(name: str) -> Values:
    """Read a field of the forward phase: from backward on, the ranks wait for each other."""
    return lambda line: getattr(line.phase("forward"), name, None)


def _slowest_text(line: StepLine) -> str:
    phase = line.phase("forward")
    return f"{phase.slowest_rank} ({phase.slowest_share * 100:.0f} %)" if phase else "-"


def _replicas_equal(line: StepLine) -> bool | None:
    replicas = line.replicas
    unknown = replicas is None or (replicas.unproved and not replicas.failed)
    return None if replicas is None or unknown else replicas.equal


def _replicas_equal_text(line: StepLine) -> str:
    replicas = line.replicas
    if replicas is None:
        return "-"
    if replicas.failed:
        return "NaN" if replicas.equal else "NO"
    return "yes" if replicas.ok else "unknown"


def _verify_ms(line: StepLine) -> float | None:
    cost = line.replicas.cost if line.replicas else None
    return cost.value * 1e3 if cost else None


def _last_epoch(name: str) -> Values:
    def value(line: StepLine) -> Value:
        epochs = next((r.epochs for r in line.results if r.epochs), ())
        field: Value = getattr(epochs[-1], name) if epochs else None
        return field

    return value


def _fields(*names: str) -> dict[str, Column[StepLine]]:
    """Build one column for each of these fields of a case."""
    return {name: extra_column(name.replace("_", " "), _case(name)) for name in names}


STEP_COLUMNS: dict[str, Column[StepLine]] = {
    **_fields("workload", "settings", "parallel", "mesh", "prefetch", "reshard_after_forward"),
    "backend": text_column("backend", lambda line: line.case.backend),
    **_fields("provider", "device", "world_size", "ranks_per_host", "threads", "parameters"),
    **_fields("parameter_nbytes", "batch", "accumulate", "optimizer", "amp", "comm_hook"),
    **_fields("bucket_cap_mb", "gradient_as_bucket_view", "static_graph"),
    **_fields("find_unused_parameters"),
    "step_ms": Column(
        "step ms",
        lambda line: scaled(line.seconds, 1e3),
        lambda line: ms(line.seconds, line.seconds),
    ),
    "interval": Column("95 %", lambda line: line.half_width, format_half_width),
    "low_ms": extra_column("low ms", _bound("low")),
    "high_ms": extra_column("high ms", _bound("high")),
    "samples_per_second": Column("samples/s", _samples_per_second),
    **{f"{name}_ms": _phase(name) for name in ("forward", "backward", "optimizer")},
    "slowest_rank": Column("slowest rank", _slowest("slowest_rank"), _slowest_text),
    "slowest_share": extra_column("share", _slowest("slowest_share")),
    "cold_ms": extra_column(
        "cold ms", lambda line: scaled(next((r.cold_seconds for r in line.results), None), 1e3)
    ),
    **_part("compute", "compute"),
    **_part("copies", "bucket copies"),
    **_part("exposed", "exposed communication"),
    **_part("transfer", "exposed transfer"),
    **_part("overhead", "communication overhead"),
    **_part("hidden", "hidden communication"),
    **_part("communication", "communication"),
    **_operation_parts(),
    **_part("prefetch_saves", spans.SAVES),
    **_part("prefetch_would_save", spans.WOULD_SAVE),
    "peak_mb": extra_column("peak MB", _peak),
    **_part("waiting", "waiting for rank"),
    "late_rank": extra_column("late rank", _late_rank),
    "speed_up": extra_column("speed-up", _speed_up("value")),
    "speed_up_low": extra_column("speed-up low", _speed_up("low")),
    "speed_up_high": extra_column("speed-up high", _speed_up("high")),
    **{
        f"ddp_{name}_ms": _timer(name)
        for name in ("forward", "backward", "communication", "overlap")
    },
    "observer_ms": extra_column("timing hook ms", _observer),
    "buckets": extra_column(
        "buckets", lambda line: len(line.summary.buckets) if line.summary else None
    ),
    "verified": extra_column(
        "verified", lambda line: sum(r.replicas.verified for r in line.results if r.replicas)
    ),
    "replicas_equal": Column("equal", _replicas_equal, _replicas_equal_text),
    "verify_ms": extra_column("verify ms", _verify_ms),
    "verify_share": extra_column(
        "verify share", lambda line: line.replicas.share if line.replicas else None
    ),
    "epochs": extra_column("epochs", _last_epoch("number")),
    "train_loss": extra_column("train loss", _last_epoch("train_loss")),
    "validation_loss": extra_column("validation loss", _last_epoch("validation_loss")),
    "rounds": extra_column("rounds", _summary("rounds")),
    "in_a_row": extra_column("in a row", _summary("in_a_row")),
    "launches": extra_column("launches", lambda line: len(line.results)),
    "flags": text_column("flags", lambda line: " ".join(line.flags)),
    "reason": extra_column("reason", lambda line: line.reason),
}
