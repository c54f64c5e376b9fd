"""Capabilities in the output: operation and reduce operation by dtype, and reasons; ways.

Rows are those of figures["verdicts"].
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddpbench.doctor.capabilities.judge import CRASH, HANG, OK, PARALLEL, UNSUPPORTED, WRONG
from ddpbench.records.table import Table, TableColumn


class Outcome(NamedTuple):
    """How an outcome is shown."""

    cell: str
    words: str  # after a number


OUTCOMES = {
    OK: Outcome("ok", "work"),
    UNSUPPORTED: Outcome("–", "are not supported"),
    WRONG: Outcome("WRONG", "give a wrong result"),
    CRASH: Outcome("CRASH", "crash"),
    HANG: Outcome("HANG", "hang"),
}
UNTRIED = "?"
# Other names by which torch's messages call a dtype or a reduce op.
ALIASES = {
    "float32": "float",
    "float64": "double",
    "float16": "half",
    "int8": "char",
    "int32": "int",
    "int64": "long",
    "uint8": "byte",
    "prod": "product",
}
Row = Mapping[str, Any]


def count_outcomes(rows: Sequence[Row]) -> str:
    """Return "221 work, 70 are not supported"."""
    counts = Counter(row["outcome"] for row in rows)
    shown = (name for name in OUTCOMES if counts[name] or name == OK)
    return ", ".join(f"{counts[name]} {OUTCOMES[name].words}" for name in shown)


def build_tables(figures: Mapping[str, Any], backend: str) -> tuple[Table, ...]:
    """Return the tables; none of what was not tried. The reasons are the legend of the first."""
    tried: Sequence[Row] = figures.get("verdicts", [])
    calls = [row for row in tried if row["form"] != PARALLEL]
    ways = [
        (row["operation"], OUTCOMES[row["outcome"]].cell, row["why"])
        for row in tried
        if row["form"] == PARALLEL
    ]
    tables = [_tabulate_calls(calls, f"what {backend} can do")] if calls else []
    if ways:
        columns = tuple(TableColumn(name, "left") for name in ("way", "one step", "reason"))
        tables.append(Table(f"parallel training on {backend}", columns, tuple(ways)))
    return tuple(tables)


def _tabulate_calls(calls: Sequence[Row], title: str) -> Table:
    """Return a row for each operation and form, and for the reduce ops with equal cells."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in calls if row["dtype"]))
    cells: dict[str, dict[str, dict[str, str]]] = {}  # operation → reduce op → dtype → cell
    for row in calls:
        by_dtype = cells.setdefault(_called(row), {}).setdefault(row["reduce_op"] or "", {})
        by_dtype[row["dtype"] or ""] = OUTCOMES[row["outcome"]].cell
    lines: list[tuple[str, ...]] = []
    for called, by_op in cells.items():
        equal: dict[tuple[str, ...], list[str]] = {}
        for reduce_op, by_dtype in by_op.items():
            line = tuple(by_dtype.get(dtype, by_dtype.get("", UNTRIED)) for dtype in dtypes)
            equal.setdefault(line, []).append(reduce_op)
        names = [called] + [""] * len(equal)
        lines += [
            (name, " ".join(ops), *line)
            for name, (line, ops) in zip(names, equal.items(), strict=False)
        ]
    # "f32", "u8", …: ten columns fit a terminal.
    short = [d.replace("float", "f").replace("uint", "u").replace("int", "i") for d in dtypes]
    left = (TableColumn("operation", "left"), TableColumn("reduce op", "left"))
    columns = (*left, *map(TableColumn, short))
    return Table(title, columns, tuple(lines), tuple(_list_reasons(calls)))


def _list_reasons(calls: Sequence[Row]) -> list[str]:
    """Return a line for each reason: its dtypes, operations and reduce ops, unless it is all."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in calls:
        if row["outcome"] != OK:
            groups.setdefault((row["outcome"], _without_names(row)), []).append(row)
    lines = []
    for (outcome, _), group in groups.items():
        ops = _some("reduce_op", group, calls)
        words = [
            OUTCOMES[outcome].cell,
            *_some("dtype", group, calls),
            ", ".join(dict.fromkeys(map(_called, group))),
            *([f"({' '.join(ops)})"] if ops else []),
        ]
        lines.append(f"{' '.join(words)}: {group[0]['why']}")
    return lines


def _without_names(row: Row) -> str:
    """Return the reason without the names and numbers of this combination, so that more match."""
    own = [row[key] for key in ("operation", "dtype", "reduce_op") if row[key]]
    names = "|".join(name for word in own for name in (word, ALIASES.get(word, word)))
    unnamed = re.sub(rf"\b({names})\b", "…", row["why"], flags=re.IGNORECASE)
    return re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?", "…", unnamed)


def _some(key: str, group: Sequence[Row], calls: Sequence[Row]) -> list[str]:
    """Return the different values of a key in a group; none if it has all that there are."""
    own, known = (dict.fromkeys(row[key] for row in some if row[key]) for some in (group, calls))
    return [] if len(own) == len(known) else list(own)


def _called(row: Row) -> str:
    return str(row["operation"]) + (" (list)" if row["form"] == "list" else "")
