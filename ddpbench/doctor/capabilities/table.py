"""What a backend supports as tables: operation and reduce op by dtype, the reasons below; ways of
parallel training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddpbench.doctor.capabilities.verdicts import PARALLEL
from ddpbench.records.table import Table, TableColumn

# outcome → cell
CELLS = {"ok": "ok", "unsupported": "–", "wrong": "WRONG", "crash": "CRASH", "hang": "HANG"}
UNTRIED = "?"
# Other names by which torch's messages call a dtype or a reduce op.
ALIASES = {
    "float32": ("float",),
    "float64": ("double",),
    "float16": ("half",),
    "int8": ("char",),
    "int32": ("int",),
    "int64": ("long",),
    "uint8": ("byte",),
    "prod": ("product",),
}

Verdict = Mapping[str, Any]


def build_tables(figures: Mapping[str, Any], backend: str) -> tuple[Table, ...]:
    """Return the tables; none of what was not tried. The reasons are the legend of the first."""
    tried: Sequence[Verdict] = figures.get("verdicts", [])
    calls = [verdict for verdict in tried if verdict["form"] != PARALLEL]
    ways = [verdict for verdict in tried if verdict["form"] == PARALLEL]
    tables = [_tabulate_calls(calls, backend)] if calls else []
    return (*tables, *([_tabulate_ways(ways, backend)] if ways else []))


def _tabulate_ways(verdicts: Sequence[Verdict], backend: str) -> Table:
    columns = (
        TableColumn("way", "left"),
        TableColumn("one step", "left"),
        TableColumn("reason", "left"),
    )
    rows = tuple((v["operation"], CELLS[v["outcome"]], v["why"]) for v in verdicts)
    return Table(f"parallel training on {backend}", columns, rows)


def _tabulate_calls(verdicts: Sequence[Verdict], backend: str) -> Table:
    dtypes = list(dict.fromkeys(each["dtype"] for each in verdicts if each["dtype"]))
    columns = (
        TableColumn("operation", "left"),
        TableColumn("reduce op", "left"),
        *(TableColumn(_abbreviated(dtype)) for dtype in dtypes),
    )
    title = f"what {backend} can do"
    return Table(title, columns, tuple(_rows(verdicts, dtypes)), tuple(_reasons(verdicts)))


def _rows(verdicts: Sequence[Verdict], dtypes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a row for each operation and form, and for the reduce ops with equal cells."""
    outcomes: dict[str, dict[str, dict[str, str]]] = {}  # operation → reduce op → dtype → cell
    for verdict in verdicts:
        by_op = outcomes.setdefault(_called(verdict), {})
        row = by_op.setdefault(verdict["reduce_op"] or "", {})
        row[verdict["dtype"] or ""] = CELLS[verdict["outcome"]]
    rows = []
    for called, by_op in outcomes.items():
        equal: dict[tuple[str, ...], list[str]] = {}
        for reduce_op, row in by_op.items():
            cells = tuple(row.get(dtype, row.get("", UNTRIED)) for dtype in dtypes)
            equal.setdefault(cells, []).append(reduce_op)
        for number, (cells, ops) in enumerate(equal.items()):
            rows.append(("" if number else called, " ".join(ops), *cells))
    return rows


def _reasons(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line for each reason: its dtypes, operations and reduce ops, unless it is all."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict["outcome"] != "ok":
            key = (verdict["outcome"], _without_names(verdict))
            groups.setdefault(key, []).append(verdict)
    lines = []
    for (outcome, _), group in groups.items():
        ops = _some("reduce_op", group, verdicts)
        words = [
            CELLS[outcome],
            *_some("dtype", group, verdicts),
            ", ".join(dict.fromkeys(map(_called, group))),
            *([f"({' '.join(ops)})"] if ops else []),
        ]
        lines.append(f"{' '.join(words)}: {group[0]['why']}")
    return lines


def _without_names(verdict: Verdict) -> str:
    """Return the reason without the names and numbers of this combination, so that more match."""
    own = [verdict[key] for key in ("operation", "dtype", "reduce_op") if verdict[key]]
    names = "|".join(name for word in own for name in (word, *ALIASES.get(word, ())))
    unnamed = re.sub(rf"\b({names})\b", "…", verdict["why"], flags=re.IGNORECASE)
    return re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?", "…", unnamed)


def _some(key: str, group: Sequence[Verdict], verdicts: Sequence[Verdict]) -> list[str]:
    """Return the different values of a key in a group; none if it has all that there are."""
    own, known = (dict.fromkeys(v[key] for v in some if v[key]) for some in (group, verdicts))
    return [] if len(own) == len(known) else list(own)


def _called(verdict: Verdict) -> str:
    return str(verdict["operation"]) + (" (list)" if verdict["form"] == "list" else "")


def _abbreviated(dtype: str) -> str:
    """Shorten "float32" to "f32" and "uint8" to "u8", so that ten columns fit a terminal."""
    return dtype.replace("float", "f").replace("uint", "u").replace("int", "i")
