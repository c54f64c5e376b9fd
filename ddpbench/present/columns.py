"""Columns of tables, and how their values are formatted.

Every table and CSV file is built from columns: name, unit, value and alignment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
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
    """A column of a table, of the CSV and of the JSON.

    name: everywhere; unit: of its values, "" for a word or a count; meaning: one line, which the
    legend of a table, `--columns help` and the page show.
    """

    name: str
    value: Callable[[RowT], Value]
    text: Callable[[RowT], str] | None = None  # default: the value with four digits
    unit: str = ""
    meaning: str = ""
    default: bool = True  # whether a table shows it without --columns
    left: bool = False  # words are aligned left, numbers right
    applies: Callable[[RowT], bool] = lambda _: True  # to a row; with no such row it is not shown

    @property
    def heading(self) -> str:
        """What stands above the column: "time µs"."""
        return f"{self.name} {self.unit}".strip()

    def show(self, row: RowT) -> str:
        """Format one cell of a text table."""
        return self.text(row) if self.text else digits(self.value(row))


def by_name(*columns: Column[RowT]) -> dict[str, Column[RowT]]:
    """Return columns by their names."""
    return {column.name: column for column in columns}


def text_column(name: str, text: Callable[[RowT], str], meaning: str = "") -> Column[RowT]:
    """Build a column of words, aligned left."""
    return Column(name, text, text, meaning=meaning, left=True)


def choose_names(
    names: Iterable[str] | None, columns: Mapping[str, Column[Any]], *, every: bool = False
) -> list[str]:
    """Return the requested column names, else the default ones, else every one.

    Raises UnknownColumn for a name that is not in `columns`.
    """
    chosen = list(names or (name for name in columns if every or columns[name].default))
    if "all" in chosen:
        return list(columns)
    for name in chosen:
        if name not in columns:
            raise UnknownColumn(explain_unknown("column", name, [*columns, "all"]))
    return chosen


def choose_columns(
    names: Iterable[str] | None,
    columns: Mapping[str, Column[RowT]],
    rows: Sequence[RowT],
    also: Container[str] = (),
) -> list[Column[RowT]]:
    """Return the requested columns, else the default ones that apply to any of these rows.

    also: columns that are treated as default ones.
    """
    if names is not None:
        return [columns[name] for name in choose_names(names, columns)]
    default = [column for column in columns.values() if column.default or column.name in also]
    return [column for column in default if not rows or any(map(column.applies, rows))]


def scaled(value: float | None, factor: float) -> float | None:
    """Multiply a value that may be unknown."""
    return None if value is None else value * factor


def digits(value: Value) -> str:
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
    """Format where the subgroup of a row works, and how many work at once; "" for all ranks."""
    several = f", {case.groups} groups at once" if case.groups > 1 else ""
    places = {"host": "inside each host", "cross": "between hosts", "world": ""}
    return places.get(case.group, case.group) + several


def title_parts(case: Case) -> tuple[str, ...]:
    """Return what the rows of one table have in common, the operation first; "" is left out."""
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


def compared(what: str) -> tuple[Column[Any], Column[Any]]:
    """Build the columns that tell how sure `what` is, and how much faster than other backends."""
    interval: Column[Any] = Column(
        "interval",
        lambda line: line.half_width,
        format_half_width,
        unit="±",
        meaning=f"half-width of the 95 % interval of the {what}",
    )
    faster: Column[Any] = Column(
        "faster",
        lambda line: line.faster,
        lambda line: f"{line.faster:#.3g}".rstrip(".") if line.faster else "",
        unit="×",
        meaning="how many times as long the next backend takes; empty unless the interval lies "
        "below those of all others",
        applies=lambda line: line.faster is not None,
    )
    return interval, faster


def flags_column() -> Column[Any]:
    """Build the column of flags, shown as marks: "~ M"."""

    def text(line: flags.AnyLine) -> str:
        from ddpbench.analysis import lines, step_lines  # load numpy

        known: dict[str, flags.Flag[Any]] = {**lines.FLAGS, **step_lines.FLAGS}
        return " ".join(known[name].mark or name for name in line.flags)

    meaning = "remarks, as marks that are explained below the tables"
    return Column("flags", lambda line: " ".join(line.flags), text, meaning=meaning, left=True)


def explain(
    shown: Sequence[flags.AnyLine],
    columns: Iterable[Column[Any]],
    known: Mapping[str, flags.Flag[Any]],
) -> list[str]:
    """Explain columns of figures, and the flags that these lines raise, if they are shown."""
    listed = list(columns)
    legend = [f"{column.heading}: {column.meaning}" for column in listed if column.unit]
    raised = {flag for line in shown for flag in line.flags}
    if not any(column.name == "flags" for column in listed):
        return legend
    return legend + [
        f"{f'{flag.mark} = ' if flag.mark else ''}{name}: {flag.legend}"
        for name, flag in known.items()
        if name in raised
    ]
