"""Columns of tables and CSV files: name, unit, value and format."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ddpbench.analysis import flags
from ddpbench.records.schema import Case, StepCase
from ddpbench.records.wording import explain_unknown

RowT = TypeVar("RowT")
Value = float | int | str | None
HOST_COUNTS_WIDTH = 24  # characters of "4+4+2+2"


class UnknownColumn(Exception):
    """A requested column that this kind of run does not have."""


@dataclass(frozen=True)
class Column(Generic[RowT]):
    """A column of a table, of the CSV and of the JSON."""

    name: str
    value: Callable[[RowT], Value]
    text: Callable[[RowT], str] | None = None  # None: the value with four digits
    unit: str = ""  # "": a word or a count
    meaning: str = ""  # one line for legends and `--columns help`
    default: bool = True  # whether a table shows it without --columns
    left: bool = False  # align left, as for words
    # Whether the column applies to a row. A default column that applies to no row is left out.
    applies: Callable[[RowT], bool] = lambda _: True

    @property
    def heading(self) -> str:
        """Return the name with the unit: "time µs"."""
        return f"{self.name} {self.unit}".strip()

    def show(self, row: RowT) -> str:
        """Format one cell of a text table."""
        return self.text(row) if self.text else format_number(self.value(row))


def by_name(*columns: Column[RowT]) -> dict[str, Column[RowT]]:
    """Return columns by their names."""
    return {column.name: column for column in columns}


def text_column(name: str, text: Callable[[RowT], str], meaning: str = "") -> Column[RowT]:
    """Build a column of words, aligned left."""
    return Column(name, text, text, meaning=meaning, left=True)


def choose_columns(
    names: Collection[str] | None,
    columns: Mapping[str, Column[RowT]],
    rows: Sequence[RowT] = (),
) -> list[Column[RowT]]:
    """Return the columns of these names; None: the default ones that apply to any of these rows.

    "all" means all columns. Raises UnknownColumn for a name that is not in `columns`.
    """
    if names is None:
        default = [column for column in columns.values() if column.default]
        return [column for column in default if not rows or any(map(column.applies, rows))]
    if "all" in names:
        return list(columns.values())
    for name in names:
        if name not in columns:
            raise UnknownColumn(explain_unknown("column", name, [*columns, "all"]))
    return [columns[name] for name in names]


def scale_known(value: float | None, factor: float) -> float | None:
    """Multiply a value that may be unknown."""
    return None if value is None else value * factor


def format_number(value: Value) -> str:
    """Format four digits without exponent: 12345, 123.4, 1.234, 0.0123; below 0.001 two."""
    if value is None:
        return "-"
    if isinstance(value, (str, int)):
        return str(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    places = 3 - exponent if exponent >= 0 else 4 if exponent >= -3 else 1 - exponent
    return f"{value:.{max(0, places)}f}"


def format_ranks(case: Case | StepCase) -> str:
    """Format the number of ranks and their hosts: "4 ranks on 3 hosts (2+1+1)"."""
    counts = case.ranks_per_host
    ranks = f"{case.world_size} rank{'s' if case.world_size > 1 else ''}"
    if len(counts) < 2:
        return ranks
    each = f"{counts[0]} each" if len(set(counts)) == 1 else "+".join(map(str, counts))
    if len(each) > HOST_COUNTS_WIDTH:
        each = f"{min(counts)} to {max(counts)} each"
    return f"{ranks} on {len(counts)} hosts ({each})"


def format_subgroups(case: Case) -> str:
    """Format the kind of a case's subgroups, and how many work at once; "" for all ranks."""
    several = f", {case.groups} groups at once" if case.groups > 1 else ""
    places = {"host": "inside each host", "cross": "between hosts", "world": ""}
    return places.get(case.group, case.group) + several


def title_parts(case: Case) -> tuple[str, ...]:
    """Return the properties that the rows of a table share, the operation first."""
    return (
        case.operation,
        "" if case.form == "tensor" else "list of tensors",
        case.dtype if case.nbytes else "",
        case.reduce_op or "",
        "" if case.root is None else f"root {case.root}",
        ("in place" if case.in_place else "out of place") if case.nbytes else "",
        "async" if case.async_op else "",
        format_ranks(case),
        format_subgroups(case),
        case.device,
    )


def format_half_width(line: flags.AnyLine) -> str:
    """Format the relative half-width of a line's interval: "±1.2%"."""
    return "-" if line.half_width is None else f"±{line.half_width * 100:.1f}%"


def build_interval_and_faster(what: str) -> tuple[Column[Any], Column[Any]]:
    """Build the columns of the interval of `what`, and of the lead over other backends."""
    interval: Column[Any] = Column(
        "interval",
        lambda line: line.half_width,
        format_half_width,
        unit="±",
        meaning=f"half the width of the 95 % interval of the {what} / its middle",
    )
    faster: Column[Any] = Column(
        "faster",
        lambda line: line.faster,
        lambda line: f"{line.faster:#.3g}".rstrip(".") if line.faster else "",
        unit="×",
        meaning="time of the second-fastest backend / time of this one; empty if intervals overlap",
        applies=lambda line: line.faster is not None,
    )
    return interval, faster


def flags_column() -> Column[Any]:
    """Build the column of flags, which tables show as marks: "~ M"."""

    def text(line: flags.AnyLine) -> str:
        from ddpbench.analysis import lines, step_lines  # load numpy

        known: dict[str, flags.Flag[Any]] = {**lines.FLAGS, **step_lines.FLAGS}
        return " ".join(known[name].mark or name for name in line.flags)

    meaning = "remarks, as marks that the lines below the tables explain"
    return Column("flags", lambda line: " ".join(line.flags), text, meaning=meaning, left=True)


def explain(
    shown: Sequence[flags.AnyLine],
    columns: Sequence[Column[Any]],
    known: Mapping[str, flags.Flag[Any]],
) -> list[str]:
    """Explain the columns with units and, if there is the column `flags`, the raised flags."""
    legend = [f"{column.heading}: {column.meaning}" for column in columns if column.unit]
    if not any(column.name == "flags" for column in columns):
        return legend
    raised = {flag for line in shown for flag in line.flags}
    return legend + [
        f"{f'{flag.mark} = ' if flag.mark else ''}{name}: {flag.legend}"
        for name, flag in known.items()
        if name in raised
    ]
