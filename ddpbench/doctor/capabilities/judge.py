"""The verdict on each operation, reduce operation and dtype, and which verdicts are findings.

A refusal of the backend is information. A crash, a hang or a wrong result is a finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddpbench.records.schema import Finding
from ddpbench.records.table import Table, TableColumn

OK, UNSUPPORTED, WRONG, CRASH, HANG = "ok", "unsupported", "wrong", "crash", "hang"
FIRST_WORDS = 4  # of a reason; reasons that differ only later are shown as one


@dataclass(frozen=True)
class Combination:
    """What one call tries; an operation that moves no data has no dtype."""

    operation: str
    form: str  # "tensor" or "list", as `Case` has it
    reduce_op: str | None
    dtype: str | None


@dataclass(frozen=True)
class Verdict:
    """The outcome of a combination, on one rank or on all."""

    outcome: str  # OK, UNSUPPORTED, …
    why: str = ""  # one line; empty for OK
    wrong: dict[str, Any] = field(default_factory=dict)  # rank, index, elements, expected, got


Row = Mapping[str, Any]  # the fields of a combination and of its verdict


def combine_verdicts(verdicts: Sequence[Verdict]) -> tuple[Verdict, bool]:
    """Combine the ranks' own verdicts; return whether only some ranks refused.

    After that the group may be out of step. verdicts: in order of rank.
    """
    refused = [rank for rank, verdict in enumerate(verdicts) if verdict.outcome == UNSUPPORTED]
    if len(refused) == len(verdicts):
        return verdicts[0], False
    if refused:
        return refused_by(refused, verdicts[refused[0]].why), True
    return next((each for each in verdicts if each.outcome == WRONG), Verdict(OK)), False


def refused_by(ranks: Sequence[int], why: str) -> Verdict:
    """Return the verdict if only these ranks refuse."""
    return Verdict(UNSUPPORTED, f"in rank {', '.join(map(str, ranks))} only: {why}")


class Outcome(NamedTuple):
    """How an outcome is shown and, unless it is information only, found."""

    cell: str
    severity: str = ""
    code: str = ""
    predicate: str = ""
    next_step: str = ""


OUTCOMES = {
    OK: Outcome("ok"),
    UNSUPPORTED: Outcome("–"),
    WRONG: Outcome(
        "WRONG",
        "error",
        "wrong-result",
        "gives a wrong result",
        "do not call it on this set-up, because no error is raised; report it to the backend",
    ),
    CRASH: Outcome(
        "CRASH",
        "warning",
        "operation-crashes",
        "crashes instead of raising an error",
        "never call it on this set-up: it ends the whole job",
    ),
    HANG: Outcome(
        "HANG",
        "warning",
        "operation-hangs",
        "hangs instead of raising an error",
        "never call it on this set-up: the job would wait until its timeout",
    ),
}
UNTRIED = "?"  # the cell of what was not tried


def find_bad(backend: str, rows: Sequence[Row]) -> tuple[Finding, ...]:
    """Return a finding for each operation and form that gives a wrong result, crashes or hangs.

    It describes the first such combination in full and counts the others.
    """
    found = []
    for outcome, bad in OUTCOMES.items():
        groups: dict[str, list[Row]] = {}
        for row in rows:
            if row["outcome"] == outcome and bad.code:
                groups.setdefault(_name_operation(row), []).append(row)
        for name, (first, *others) in groups.items():
            dtype = first["dtype"] and f"of {first['dtype']}"
            called = " ".join(filter(None, (name, first["reduce_op"], dtype)))
            more = f"; also {len(others)} more of its combinations" if others else ""
            sentence = f"{called} on {backend} {bad.predicate} ({first['why']}){more}"
            place = {key: first[key] for key in ("operation", "form", "reduce_op", "dtype")}
            place = {"backend": backend, **place, **first["wrong"]}
            found.append(Finding(bad.severity, bad.code, sentence, bad.next_step, place))
    return tuple(found)


# --- the table: operation and reduce op by dtype, with reasons ------------------------------------


def count_outcomes(rows: Sequence[Row]) -> str:
    """Return "221 ok, 70 unsupported"."""
    counts = Counter(row["outcome"] for row in rows)
    return ", ".join(f"{counts[name]} {name}" for name in OUTCOMES if counts[name])


def build_table(rows: Sequence[Row], title: str) -> Table:
    """Return a row for each operation and form, and for the reduce ops with equal cells."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows if row["dtype"]))
    cells: dict[str, dict[str, dict[str, str]]] = {}  # operation → reduce op → dtype → cell
    for row in rows:
        by_dtype = cells.setdefault(_name_operation(row), {}).setdefault(row["reduce_op"] or "", {})
        by_dtype[row["dtype"] or ""] = OUTCOMES[row["outcome"]].cell
    lines: list[tuple[str, ...]] = []
    for name, by_op in cells.items():
        equal: dict[tuple[str, ...], list[str]] = {}
        for reduce_op, by_dtype in by_op.items():
            line = tuple(by_dtype.get(dtype, by_dtype.get("", UNTRIED)) for dtype in dtypes)
            equal.setdefault(line, []).append(reduce_op)
        for number, (line, ops) in enumerate(equal.items()):
            lines.append(("" if number else name, " ".join(ops), *line))
    # "f32", "u8", …: ten columns fit a terminal.
    short = [d.replace("float", "f").replace("uint", "u").replace("int", "i") for d in dtypes]
    left = (TableColumn("operation", "left"), TableColumn("reduce op", "left"))
    columns = (*left, *map(TableColumn, short))
    return Table(title, columns, tuple(lines), tuple(_list_reasons(rows)))


def _list_reasons(rows: Sequence[Row]) -> list[str]:
    """Return a line for each reason: "– float16, int8; reduce, all_reduce: RuntimeError: …".

    Reasons with the same first words are one, because they differ in the names of dtypes and ops.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["outcome"] != OK:
            words = row["why"].split()[:FIRST_WORDS]
            groups.setdefault((row["outcome"], *words), []).append(row)
    lines = []
    for (outcome, *_), group in groups.items():
        dtypes = dict.fromkeys(row["dtype"] for row in group if row["dtype"])
        operations = dict.fromkeys(map(_name_operation, group))
        names = "; ".join(filter(None, (", ".join(dtypes), ", ".join(operations))))
        lines.append(f"{OUTCOMES[outcome].cell} {names}: {group[0]['why']}")
    return lines


def _name_operation(row: Row) -> str:
    return str(row["operation"]) + (" (list)" if row["form"] == "list" else "")
