"""The verdict on each operation, reduce op and dtype, and which verdicts are findings.

A refusal of the backend is information. A crash, a hang or a wrong result is a finding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddpbench.records.schema import Finding
from ddpbench.records.table import Table, TableColumn

OK, UNSUPPORTED, WRONG, CRASH, HANG = "ok", "unsupported", "wrong", "crash", "hang"
PARALLEL = "parallel"  # the form of a combination that is a way of parallel training


@dataclass(frozen=True)
class Combination:
    """What one call tries; an operation that moves no data has no dtype."""

    operation: str
    form: str  # "tensor" or "list", as `Case` has it; PARALLEL
    reduce_op: str | None
    dtype: str | None

    @property
    def called(self) -> str:
        """Return the operation in words: "all_gather (list)"."""
        return self.operation + (" (list)" if self.form == "list" else "")

    @property
    def name(self) -> str:
        """Return the combination in words: "all_reduce max of int8"."""
        words = [self.called, self.reduce_op, self.dtype and f"of {self.dtype}"]
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a combination, on one rank or on all."""

    outcome: str  # OK, UNSUPPORTED, …
    why: str = ""  # one line; of all but OK
    wrong: dict[str, Any] = field(default_factory=dict)  # rank, index, elements, expected, got


FEW = 3  # combinations that a finding names besides the first
Tried = Sequence[tuple[Combination, Verdict]]


def agreed(everyones: Sequence[Verdict]) -> tuple[Verdict, bool]:
    """Combine the ranks' own verdicts; return whether only some ranks refused.

    After that the group may be out of step. everyones: in order of rank.
    """
    refused = [rank for rank, each in enumerate(everyones) if each.outcome == UNSUPPORTED]
    if refused:
        why = everyones[refused[0]].why
        apart = len(refused) < len(everyones)
        return Verdict(UNSUPPORTED, refused_by(refused, why) if apart else why), apart
    wrong = (each for each in everyones if each.outcome == WRONG)
    return next(wrong, Verdict(OK)), False


def refused_by(ranks: Sequence[int], why: str) -> str:
    """Return the reason if only some ranks refuse."""
    return f"in rank {', '.join(map(str, ranks))} only: {why}"


def breaking(verdict: Verdict) -> Verdict:
    """Return the same verdict, with the remark that nothing works in the group afterwards."""
    return replace(verdict, why=f"{verdict.why}; then its group is unusable")


def rows(tried: Tried) -> list[dict[str, Any]]:
    """Return a record for each combination: operation, form, reduce_op, dtype, outcome, why."""
    return [{**asdict(each), "outcome": v.outcome, "why": v.why} for each, v in tried]


# outcome → severity, code, predicate, next step
BAD = {
    WRONG: (
        "error",
        "wrong-result",
        "gives a wrong result",
        "do not call it on this set-up, because no error is raised; report it to the backend",
    ),
    CRASH: (
        "warning",
        "operation-crashes",
        "crashes instead of raising an error",
        "never call it on this set-up: it ends the whole job",
    ),
    HANG: (
        "warning",
        "operation-hangs",
        "hangs instead of raising an error",
        "never call it on this set-up: the job would wait until its timeout",
    ),
}


def findings(backend: str, tried: Tried) -> tuple[Finding, ...]:
    """Return a finding for each operation and form that gives a wrong result, crashes or hangs.

    It describes the first such combination in full and names the others.
    """
    alike: dict[tuple[str, str], list[tuple[Combination, Verdict]]] = {}
    for each, verdict in tried:
        if verdict.outcome in BAD:
            alike.setdefault((verdict.outcome, each.called), []).append((each, verdict))
    found = []
    for outcome in BAD:
        found += [_finding(backend, same) for (kind, _), same in alike.items() if kind == outcome]
    return tuple(found)


def _finding(backend: str, same: Tried) -> Finding:
    (first, verdict), *others = same
    severity, code, said, next_step = BAD[verdict.outcome]
    names = [" ".join(filter(None, (c.reduce_op, c.dtype))) for c, _ in others]
    more = f"; likewise {', '.join(names[:FEW])}" if names else ""
    more += f" and {len(names) - FEW} more of its combinations" if len(names) > FEW else ""
    return Finding(
        severity,
        code,
        f"{first.name} on {backend} {said} ({verdict.why}){more}",
        next_step,
        {"backend": backend, **asdict(first), **verdict.wrong},
    )


# --- tables: operation and reduce op by dtype, with reasons; ways of parallel training ------------

# outcome → cell
CELLS = {"ok": "ok", "unsupported": "–", "wrong": "WRONG", "crash": "CRASH", "hang": "HANG"}
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

Row = Mapping[str, Any]  # of `rows`


def build_tables(figures: Mapping[str, Any], backend: str) -> tuple[Table, ...]:
    """Return the tables; none of what was not tried. The reasons are the legend of the first."""
    tried: Sequence[Row] = figures.get("verdicts", [])
    calls = [verdict for verdict in tried if verdict["form"] != PARALLEL]
    ways = [verdict for verdict in tried if verdict["form"] == PARALLEL]
    tables = [_tabulate_calls(calls, backend)] if calls else []
    if ways:
        columns = tuple(TableColumn(name, "left") for name in ("way", "one step", "reason"))
        rows = tuple((v["operation"], CELLS[v["outcome"]], v["why"]) for v in ways)
        tables.append(Table(f"parallel training on {backend}", columns, rows))
    return tuple(tables)


def _tabulate_calls(verdicts: Sequence[Row], backend: str) -> Table:
    dtypes = list(dict.fromkeys(each["dtype"] for each in verdicts if each["dtype"]))
    columns = (
        TableColumn("operation", "left"),
        TableColumn("reduce op", "left"),
        # "f32", "u8", …: ten columns fit a terminal.
        *(
            TableColumn(dtype.replace("float", "f").replace("uint", "u").replace("int", "i"))
            for dtype in dtypes
        ),
    )
    title = f"what {backend} can do"
    return Table(title, columns, tuple(_make_rows(verdicts, dtypes)), tuple(_reasons(verdicts)))


def _make_rows(verdicts: Sequence[Row], dtypes: Sequence[str]) -> list[tuple[str, ...]]:
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


def _reasons(verdicts: Sequence[Row]) -> list[str]:
    """Return a line for each reason: its dtypes, operations and reduce ops, unless it is all."""
    groups: dict[tuple[str, str], list[Row]] = {}
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


def _without_names(verdict: Row) -> str:
    """Return the reason without the names and numbers of this combination, so that more match."""
    own = [verdict[key] for key in ("operation", "dtype", "reduce_op") if verdict[key]]
    names = "|".join(name for word in own for name in (word, ALIASES.get(word, word)))
    unnamed = re.sub(rf"\b({names})\b", "…", verdict["why"], flags=re.IGNORECASE)
    return re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?", "…", unnamed)


def _some(key: str, group: Sequence[Row], verdicts: Sequence[Row]) -> list[str]:
    """Return the different values of a key in a group; none if it has all that there are."""
    own, known = (dict.fromkeys(v[key] for v in some if v[key]) for some in (group, verdicts))
    return [] if len(own) == len(known) else list(own)


def _called(verdict: Row) -> str:
    return str(verdict["operation"]) + (" (list)" if verdict["form"] == "list" else "")
