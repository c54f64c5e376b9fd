"""Columns of a run of DDP steps: ms, MB and samples per second are made here.

One entry of STEP_COLUMNS adds a column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ddpbench.present.columns import (
    Column,
    Value,
    build_interval_and_faster,
    by_name,
    flags_column,
    scale_known,
    text_column,
)

if TYPE_CHECKING:
    from ddpbench.analysis.step_lines import StepLine
    from ddpbench.records.schema import Part

Values = Callable[["StepLine"], Any]


def format_ms(seconds: float | None, step: float | None) -> str:
    """Format milliseconds with as many places as give a step of `step` seconds four digits."""
    if seconds is None:
        return "-"
    places = 3 - math.floor(math.log10(step * 1e3)) if step else 3
    return f"{seconds * 1e3:.{min(max(places, 0), 4)}f}"


def format_percent(share: float | None) -> str:
    """Format a share in % with one place."""
    return "-" if share is None else f"{share * 100:.1f}"


def format_part(part: Part, step: float | None) -> tuple[str, str]:
    """Format the value of a part and its interval."""
    bounds = part.figure.interval
    ends = [format_ms(end, step) for end in (bounds.low, bounds.high)] if bounds else []
    interval = f"[{' … '.join(ends)}]" if ends else "-"
    return mark_noise(part, format_ms(part.figure.value, step)), interval


def mark_noise(part: Part, text: str) -> str:
    """Put the text in parentheses if the part may be 0: its value is noise."""
    interval = part.figure.interval
    exact = interval is not None and interval.low == interval.high
    return text if part.resolved or exact else f"({text})"


def _extra(name: str, value: Values, meaning: str, unit: str = "") -> Column[StepLine]:
    """Build a column that a table shows with --columns only."""
    return Column(name, value, unit=unit, meaning=meaning, default=False)


def _ms(name: str, seconds: Values, meaning: str, *, default: bool = False) -> Column[StepLine]:
    """Build a column of a time in ms, with the places of the step."""
    return Column(
        name,
        lambda line: scale_known(seconds(line), 1e3),
        lambda line: format_ms(seconds(line), line.seconds),
        unit="ms",
        meaning=meaning,
        default=default,
    )


def _read(path: str, of: Values = lambda line: line) -> Values:
    """Return a function that reads attributes, such as "summary.speed_up.value", or None."""

    def read(line: StepLine) -> Any:
        value = of(line)
        for name in path.split("."):
            value = getattr(value, name, None)  # None has no attributes
        return value

    return read


def _known(path: str) -> Values:
    """Return a function that reads a number; 0 is unknown."""
    return lambda line: _read(path)(line) or None


def _part(name: str, part_name: str) -> Iterator[Column[StepLine]]:
    """Yield the columns of a part of the budget: its value and the ends of its interval."""

    def text(line: StepLine) -> str:
        part = line.part(part_name)
        return format_part(part, line.seconds)[0] if part else "-"

    figure = _read("figure", lambda line: line.part(part_name))
    yield replace(_ms(name, _read("value", figure), f"{part_name}, per step"), text=text)
    for end, where in (("low", "lower"), ("high", "upper")):
        meaning = f"{where} end of the 95 % interval of {name}"
        yield _ms(f"{name}_{end}", _read(f"interval.{end}", figure), meaning)


def _fields(**meanings: str) -> Iterator[Column[StepLine]]:
    """Yield a column for each of these fields of a case."""

    def read(name: str, line: StepLine) -> Value:
        field: Any = getattr(line.case, name)
        if type(field) is int and field == 0:
            return None  # unknown
        return " ".join(map(str, field)) if isinstance(field, tuple) else field

    for name, meaning in meanings.items():
        yield _extra(name, partial(read, name), meaning)


def _phase(name: str, column: str, more: str = "") -> Column[StepLine]:
    seconds = _read("slowest.value", lambda line: line.phase(name))
    return _ms(column, seconds, f"{name} on the slowest rank, median{more}", default=True)


def _late_rank(line: StepLine) -> int | None:
    part = line.part("waiting for rank")
    return part.rank if part is not None and part.resolved else None


def _slowest_text(line: StepLine) -> str:
    phase = line.phase("forward")
    return f"{phase.slowest_rank} ({phase.slowest_share * 100:.0f} %)" if phase else "-"


def _replicas_equal(line: StepLine) -> bool | None:
    replicas = line.replicas
    if replicas is None or (replicas.unproved and not replicas.failed):
        return None
    return replicas.equal


def _replicas_equal_text(line: StepLine) -> str:
    replicas = line.replicas
    if replicas is None:
        return "-"
    if replicas.failed:
        return "NaN" if replicas.equal else "NO"
    return "yes" if replicas.ok else "unknown"


STEP_COLUMNS: dict[str, Column[StepLine]] = by_name(
    *_fields(
        workload="trained model",
        settings="settings of the workload",
        parallel="kind of parallel training: ddp, fsdp, …",
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
        broadcast_buffers="DDP's broadcast_buffers",
    ),
    _ms(
        "step",
        lambda line: line.seconds,
        "time of K steps in a row / K, median over rounds",
        default=True,
    ),
    *build_interval_and_faster("step"),
    _ms("low", _read("interval.low"), "lower end of the 95 % interval of the step"),
    _ms("high", _read("interval.high"), "upper end of the 95 % interval of the step"),
    Column(
        "samples",
        _known("summary.samples_per_second"),
        unit="/s",
        meaning="samples of all ranks per second",
    ),
    _phase("forward", "forward", ", with zero_grad"),
    _phase("backward", "backward"),
    _phase("optimizer", "optim"),
    Column(
        "slowest_rank",
        _read("slowest_rank", lambda line: line.phase("forward")),
        _slowest_text,
        meaning="rank most often slowest in forward, and its share of the steps; in backward, "
        "ranks wait for each other",
        default=False,
    ),
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
    *(
        column
        for kind in ("exposed", "hidden")
        for operation in ("all_gather", "reduce_scatter", "all_reduce")
        for column in _part(f"{kind}_{operation}", f"{kind} {operation}")
    ),
    *_part("prefetch_saves", "prefetch saves"),
    *_part("prefetch_would_save", "prefetch would save"),
    _extra(
        "peak",
        lambda line: (line.summary.peak_nbytes / 1e6 or None) if line.summary else None,
        "peak of the memory of tensors on a GPU",
        unit="MB",
    ),
    *_part("waiting", "waiting for rank"),
    _extra("late_rank", _late_rank, "rank that the others wait for"),
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
        _read("replicas.cost.value"),
        "time of a comparison of the replicas",
    ),
    _extra("rounds", _known("summary.rounds"), "rounds of all launches"),
    _extra("in_a_row", _known("summary.in_a_row"), "K: steps in a row"),
    _extra("launches", lambda line: len(line.results), "launches"),
    flags_column(),
    _extra("reason", lambda line: line.reason, "why it was not measured"),
)
