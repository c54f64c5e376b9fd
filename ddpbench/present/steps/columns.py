"""Columns of a run of DDP steps: ms, MB and samples per second are made here.

One entry of STEP_COLUMNS adds a column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ddpbench.analysis import spans
from ddpbench.present.columns import (
    Column,
    Value,
    build_interval_and_faster,
    by_name,
    flags_column,
    scaled,
    text_column,
)

if TYPE_CHECKING:
    from ddpbench.analysis.step_lines import StepLine
    from ddpbench.records.schema import Figure, Interval, Part

Values = Callable[["StepLine"], Value]
Seconds = Callable[["StepLine"], "float | None"]


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


def _extra(name: str, value: Values, meaning: str, unit: str = "") -> Column[StepLine]:
    """Build a column that a table shows with --columns only."""
    return Column(name, value, unit=unit, meaning=meaning, default=False)


def _ms(name: str, seconds: Seconds, meaning: str, *, default: bool = False) -> Column[StepLine]:
    """Build a column of a time in ms, with the places of the step."""
    return Column(
        name,
        lambda line: scaled(seconds(line), 1e3),
        lambda line: ms(seconds(line), line.seconds),
        unit="ms",
        meaning=meaning,
        default=default,
    )


def _figure(
    name: str,
    figure: Callable[[StepLine], Figure | None],
    meaning: str,
    build: Callable[[str, Seconds, str], Column[StepLine]] = _ms,
) -> Iterator[Column[StepLine]]:
    """Yield the columns of a figure: its value and the ends of its interval."""

    def end(of: str) -> Seconds:
        def read(line: StepLine) -> float | None:
            known = figure(line)
            interval = known.interval if known else None
            return float(getattr(interval, of)) if interval else None

        return read

    yield build(name, lambda line: known.value if (known := figure(line)) else None, meaning)
    yield build(f"{name}_low", end("low"), f"lower end of the 95 % interval of {name}")
    yield build(f"{name}_high", end("high"), f"upper end of the 95 % interval of {name}")


def _part(name: str, part_name: str) -> Iterator[Column[StepLine]]:
    """Yield the columns of a part of the budget."""

    def text(line: StepLine) -> str:
        part = line.part(part_name)
        return bounded(part, line.seconds)[0] if part else "-"

    def figure(line: StepLine) -> Figure | None:
        part = line.part(part_name)
        return part.figure if part else None

    value, *ends = _figure(name, figure, f"{part_name}, per step")
    yield from (replace(value, text=text), *ends)


def _operation_parts() -> Iterator[Column[StepLine]]:
    for names in (spans.EXPOSED_OF, spans.HIDDEN_OF):
        for part in names.values():
            yield from _part(part.replace(" ", "_"), part)


def _fields(**meanings: str) -> Iterator[Column[StepLine]]:
    """Yield a column for each of these fields of a case."""

    def read(name: str, line: StepLine) -> Value:
        field: Any = getattr(line.case, name)
        if type(field) is int and field == 0:
            return None  # not told
        return " ".join(map(str, field)) if isinstance(field, tuple) else field

    for name, meaning in meanings.items():
        yield _extra(name, partial(read, name), meaning)


def _summary(name: str) -> Values:
    """Read a number of the summary; 0 is unknown."""
    return lambda line: getattr(line.summary, name, None) or None


def _bound(name: str) -> Seconds:
    return lambda line: getattr(line.interval, name, None)


def _phase(name: str, column: str, more: str = "") -> Column[StepLine]:
    def seconds(line: StepLine) -> float | None:
        phase = line.phase(name)
        return phase.slowest.value if phase else None

    return _ms(column, seconds, f"{name} on the slowest rank, median{more}", default=True)


def _timer(name: str) -> Column[StepLine]:
    def seconds(line: StepLine) -> float | None:
        return line.summary.timers.get(name) if line.summary else None

    return _ms(f"ddp_{name}", seconds, f"{name} as DDP's own timers have it")


def _late_rank(line: StepLine) -> int | None:
    part = line.part("waiting for rank")
    return part.rank if part is not None and part.resolved else None


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


def _last_epoch(name: str) -> Values:
    return lambda line: next((getattr(r.epochs[-1], name) for r in line.results if r.epochs), None)


STEP_COLUMNS: dict[str, Column[StepLine]] = by_name(
    *_fields(
        workload="model that is trained",
        settings="settings of the workload",
        parallel="way of parallel training: ddp, fsdp, …",
        mesh="sizes of the device mesh",
        prefetch="whether fully_shard gathers the next layer early",
        reshard_after_forward="whether fully_shard frees a layer after its forward",
    ),
    text_column("backend", lambda line: line.case.backend, "backend"),
    *_fields(
        provider="implementation of the backend",
        device="device",
        world_size="ranks",
        ranks_per_host="ranks of each host",
        threads="threads of a rank",
        parameters="parameters of the model",
        parameter_nbytes="bytes of the parameters",
        batch="samples of a rank in a micro-batch",
        accumulate="micro-batches of a step",
        optimizer="optimizer",
        amp="data type of autocast",
        comm_hook="DDP's communication hook",
        bucket_cap_mb="DDP's bucket_cap_mb",
        gradient_as_bucket_view="DDP's gradient_as_bucket_view",
        static_graph="DDP's static_graph",
        find_unused_parameters="DDP's find_unused_parameters",
    ),
    _ms(
        "step",
        lambda line: line.seconds,
        "time of a step: of K steps in a row / K, median over rounds",
        default=True,
    ),
    *build_interval_and_faster("step"),
    _ms("low", _bound("low"), "lower end of the 95 % interval of the step"),
    _ms("high", _bound("high"), "upper end of the 95 % interval of the step"),
    Column(
        "samples",
        _summary("samples_per_second"),
        unit="/s",
        meaning="samples of all ranks per second",
    ),
    _phase("forward", "forward", ", with zero_grad"),
    _phase("backward", "backward"),
    _phase("optimizer", "optim"),
    Column(
        "slowest_rank",
        _slowest("slowest_rank"),
        _slowest_text,
        meaning="rank most often slowest in forward, and in how many of the steps; later, ranks "
        "wait for each other",
        default=False,
    ),
    _extra("slowest_share", _slowest("slowest_share"), "share of the steps in which it was"),
    _ms(
        "cold",
        lambda line: next((r.cold_seconds for r in line.results), None),
        "first step of the first launch",
    ),
    *_part("compute", "compute"),
    *_part("copies", "bucket copies"),
    *_part("exposed", "exposed communication"),
    *_part("transfer", "exposed transfer"),
    *_part("overhead", "communication overhead"),
    *_part("hidden", "hidden communication"),
    *_part("communication", "communication"),
    *_operation_parts(),
    *_part("prefetch_saves", spans.SAVES),
    *_part("prefetch_would_save", spans.WOULD_SAVE),
    _extra(
        "peak",
        lambda line: (line.summary.peak_nbytes / 1e6 or None) if line.summary else None,
        "most memory that tensors took on a GPU",
        unit="MB",
    ),
    *_part("waiting", "waiting for rank"),
    _extra("late_rank", _late_rank, "rank that the others wait for"),
    *_figure(
        "speed_up",
        lambda line: line.summary.speed_up if line.summary else None,
        "how many times faster a step without any communication is",
        partial(_extra, unit="×"),
    ),
    *map(_timer, ("forward", "backward", "communication", "overlap")),
    _ms(
        "observer",
        lambda line: x.figure.value if line.summary and (x := line.summary.observer) else None,
        "what timing the buckets or collectives adds to a step",
    ),
    _extra(
        "buckets", lambda line: len(line.summary.buckets) if line.summary else None, "DDP's buckets"
    ),
    _extra(
        "verified",
        lambda line: sum(r.replicas.verified for r in line.results if r.replicas),
        "steps after which the replicas were compared",
    ),
    Column(
        "equal", _replicas_equal, _replicas_equal_text, meaning="whether all replicas were equal"
    ),
    _ms(
        "verify",
        lambda line: x.cost.value if (x := line.replicas) and x.cost else None,
        "time of a comparison of the replicas",
    ),
    _extra(
        "verify_share",
        lambda line: line.replicas.share if line.replicas else None,
        "the same as a share of a step",
    ),
    _extra("epochs", _last_epoch("number"), "epochs of training"),
    _extra("train_loss", _last_epoch("train_loss"), "loss in the last epoch"),
    _extra("validation_loss", _last_epoch("validation_loss"), "validation loss after it"),
    _extra("rounds", _summary("rounds"), "rounds of all launches"),
    _extra("in_a_row", _summary("in_a_row"), "K: steps in a row"),
    _extra("launches", lambda line: len(line.results), "launches"),
    flags_column(),
    _extra("reason", lambda line: line.reason, "why it was not measured"),
)
