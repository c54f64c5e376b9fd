"""The verdict on each operation, reduce operation and dtype, and which verdicts are findings.

A refusal of the backend is information. A crash, a hang or a wrong result is a finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ddpbench.records.schema import Finding
from ddpbench.records.table import Table, TableColumn

OK, UNSUPPORTED, WRONG, CRASH, HANG = "ok", "unsupported", "wrong", "crash", "hang"
PARALLEL = "parallel"  # the form of a combination that is a way of parallel training
FEW = 3  # combinations that a finding names besides the first
FIRST_WORDS = 4  # of a reason; reasons that differ only later are shown as one


@dataclass(frozen=True)
class Combination:
    """What one call tries; an operation that moves no data has no dtype."""

    operation: str
    form: str  # "tensor" or "list", as `Case` has it; PARALLEL
    reduce_op: str | None
    dtype: str | None

    @property
    def name(self) -> str:
        """Return the combination in words: "all_reduce max of int8"."""
        words = [_called(asdict(self)), self.reduce_op, self.dtype and f"of {self.dtype}"]
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class Verdict:
    """The outcome of a combination, on one rank or on all."""

    outcome: str  # OK, UNSUPPORTED, …
    why: str = ""  # one line; empty for OK
    wrong: dict[str, Any] = field(default_factory=dict)  # rank, index, elements, expected, got


Tried = Sequence[tuple[Combination, Verdict]]


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


def list_rows(tried: Tried) -> list[dict[str, Any]]:
    """Return a record for each combination: operation, form, reduce_op, dtype, outcome, why."""
    return [{**asdict(each), "outcome": v.outcome, "why": v.why} for each, v in tried]


class Outcome(NamedTuple):
    """How an outcome is shown and, unless it is information only, found."""

    cell: str
    words: str  # after a number
    severity: str = ""
    code: str = ""
    predicate: str = ""
    next_step: str = ""


OUTCOMES = {
    OK: Outcome("ok", "work"),
    UNSUPPORTED: Outcome("–", "are not supported"),
    WRONG: Outcome(
        "WRONG",
        "give a wrong result",
        "error",
        "wrong-result",
        "gives a wrong result",
        "do not call it on this set-up, because no error is raised; report it to the backend",
    ),
    CRASH: Outcome(
        "CRASH",
        "crash",
        "warning",
        "operation-crashes",
        "crashes instead of raising an error",
        "never call it on this set-up: it ends the whole job",
    ),
    HANG: Outcome(
        "HANG",
        "hang",
        "warning",
        "operation-hangs",
        "hangs instead of raising an error",
        "never call it on this set-up: the job would wait until its timeout",
    ),
}
UNTRIED = "?"  # the cell of what was not tried


def find_bad(backend: str, tried: Tried) -> tuple[Finding, ...]:
    """Return a finding for each operation and form that gives a wrong result, crashes or hangs.

    It describes the first such combination in full and names the others.
    """
    found = []
    for outcome, bad in OUTCOMES.items():
        groups: dict[tuple[str, str], list[tuple[Combination, Verdict]]] = {}
        for combination, verdict in tried:
            if verdict.outcome == outcome and bad.code:
                key = (combination.operation, combination.form)
                groups.setdefault(key, []).append((combination, verdict))
        for (first, verdict), *others in groups.values():
            names = [" ".join(filter(None, (c.reduce_op, c.dtype))) for c, _ in others]
            more = f"; so do {', '.join(names[:FEW])}" if names else ""
            more += f" and {len(names) - FEW} more of its combinations" if names[FEW:] else ""
            sentence = f"{first.name} on {backend} {bad.predicate} ({verdict.why}){more}"
            place = {"backend": backend, **asdict(first), **verdict.wrong}
            found.append(Finding(bad.severity, bad.code, sentence, bad.next_step, place))
    return tuple(found)


# --- tables: operation and reduce op by dtype, with reasons; ways of parallel training ------------

Row = Mapping[str, Any]  # of figures["verdicts"], as `list_rows` makes them


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
        for number, (line, ops) in enumerate(equal.items()):
            lines.append(("" if number else called, " ".join(ops), *line))
    # "f32", "u8", …: ten columns fit a terminal.
    short = [d.replace("float", "f").replace("uint", "u").replace("int", "i") for d in dtypes]
    left = (TableColumn("operation", "left"), TableColumn("reduce op", "left"))
    columns = (*left, *map(TableColumn, short))
    return Table(title, columns, tuple(lines), tuple(_list_reasons(calls)))


def _list_reasons(calls: Sequence[Row]) -> list[str]:
    """Return a line for each reason: "– float16, int8; reduce, all_reduce: RuntimeError: …".

    Reasons with the same first words are one, because they differ in the names of dtypes and ops.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in calls:
        if row["outcome"] != OK:
            words = row["why"].split()[:FIRST_WORDS]
            groups.setdefault((row["outcome"], *words), []).append(row)
    lines = []
    for (outcome, *_), group in groups.items():
        dtypes = dict.fromkeys(row["dtype"] for row in group if row["dtype"])
        operations = dict.fromkeys(map(_called, group))
        names = "; ".join(filter(None, (", ".join(dtypes), ", ".join(operations))))
        lines.append(f"{OUTCOMES[outcome].cell} {names}: {group[0]['why']}")
    return lines


def _called(row: Row) -> str:
    return str(row["operation"]) + (" (list)" if row["form"] == "list" else "")
