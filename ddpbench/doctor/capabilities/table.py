"""What a backend can do as a table: operation and reduce op by dtype, the reasons below."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddpbench.records.schema import Examination
from ddpbench.render.style import Style

# outcome → cell; what was not tried has none
CELLS = {"ok": "ok", "unsupported": "–", "wrong": "WRONG", "crash": "CRASH", "hang": "HANG"}
UNTRIED = "?"
# By these names, too, torch tells of a dtype or a reduce op.
ALIASES = {
    "float32": ("float",), "float64": ("double",), "float16": ("half",), "int8": ("char",),
    "int32": ("int",), "int64": ("long",), "uint8": ("byte",), "prod": ("product",),
}  # fmt: skip

Verdict = Mapping[str, Any]


def blocks(examination: Examination, style: Style) -> list[str]:
    """The table, and why what does not work does not; nothing where nothing was tried."""
    verdicts: Sequence[Verdict] = examination.figures.get("verdicts", [])
    if not verdicts:
        return []
    dtypes = list(dict.fromkeys(each["dtype"] for each in verdicts if each["dtype"]))
    heads = ["operation", "reduce op", *map(_abbreviated, dtypes)]
    title = f"what {examination.backend} can do"
    shown = [style.block(title, style.table(_cells(verdicts, dtypes), heads, heads[:2]), 1)]
    if reasons := _reasons(verdicts):
        shown.append(style.gap.join(reasons))
    return shown


def _cells(verdicts: Sequence[Verdict], dtypes: Sequence[str]) -> list[list[str]]:
    """A row for each operation and form, and the reduce ops that are alike in it."""
    outcomes: dict[str, dict[str, dict[str, str]]] = {}  # called → reduce op → dtype → cell
    for each in verdicts:
        row = outcomes.setdefault(_called(each), {}).setdefault(each["reduce_op"] or "", {})
        row[each["dtype"] or ""] = CELLS[each["outcome"]]
    cells = []
    for called, by_op in outcomes.items():
        alike: dict[tuple[str, ...], list[str]] = {}
        for reduce_op, row in by_op.items():
            values = tuple(row.get(dtype, row.get("", UNTRIED)) for dtype in dtypes)
            alike.setdefault(values, []).append(reduce_op)
        for place, (values, ops) in enumerate(alike.items()):
            cells.append([called if place == 0 else "", " ".join(ops), *values])
    return cells


def _reasons(verdicts: Sequence[Verdict]) -> list[str]:
    """One line a reason: the dtypes, operations and reduce ops that it holds for; all, unsaid."""
    same: dict[tuple[str, str], list[Verdict]] = {}
    for each in verdicts:
        if each["outcome"] != "ok":
            same.setdefault((each["outcome"], _without_names(each)), []).append(each)
    lines = []
    for (outcome, _), group in same.items():
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
    """Its reason without names and numbers of the very combination: many are alike then."""
    mine = [verdict[key] for key in ("operation", "dtype", "reduce_op") if verdict[key]]
    names = "|".join(name for each in mine for name in (each, *ALIASES.get(each, ())))
    unnamed = re.sub(rf"\b({names})\b", "…", verdict["why"], flags=re.IGNORECASE)
    return re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?", "…", unnamed)


def _some(key: str, group: Sequence[Verdict], everything: Sequence[Verdict]) -> list[str]:
    """The different values of a key in a group; none where it has all that there are."""
    mine, known = (dict.fromkeys(e[key] for e in es if e[key]) for es in (group, everything))
    return [] if len(mine) == len(known) else list(mine)


def _called(verdict: Verdict) -> str:
    return str(verdict["operation"]) + (" (list)" if verdict["form"] == "list" else "")


def _abbreviated(dtype: str) -> str:
    """ "float32" → "f32", "bfloat16" → "bf16", "uint8" → "u8": ten columns fit a terminal."""
    return dtype.replace("float", "f").replace("uint", "u").replace("int", "i")
