"""The verdicts of a comparison: how much each case changed, and what else differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ddpbench.present.columns import Column
from ddpbench.present.comparison.changes import (
    Change,
    draw_changes,
    format_noticeable,
    list_changes,
    shift_estimate,
    shift_interval,
)
from ddpbench.present.comparison.labels import label, label_parts
from ddpbench.present.document import Chart, Document, Section, make_table, tabulate_rows
from ddpbench.records.schema import Finding
from ddpbench.records.wording import counted
from ddpbench.verdicts.comparison import (
    ONLY_BASE,
    ONLY_NEW,
    Comparison,
    Row,
    exit_code,
    explain_other_machine,
)
from ddpbench.verdicts.many_pairs import DRIFT
from ddpbench.verdicts.matching import AnyCase, Side, Source
from ddpbench.verdicts.verdict import INCOMPARABLE, INCONCLUSIVE, INVALID, MOST

Names = Mapping[AnyCase, str]
SHOWN = 8  # texts that one line lists
TITLE = "ddpbench: NEW compared with BASE"
SEVERITIES = {INVALID: "error", INCOMPARABLE: "warning", ONLY_BASE: "warning", ONLY_NEW: "warning"}


def build_document(comparison: Comparison) -> Document:
    """Return the verdicts, and their values: seconds, and changes as fractions (0.03: 3 % longer).

    The data have the identity of each case, differences of the environments, and notes as well.
    """
    rows = [_values(row) for row in comparison.rows]
    values = make_table("", rows[0], [list(row.values()) for row in rows])
    data = _data(comparison, rows)
    return Document(TITLE, (build_section(comparison),), values, data)


def build_section(comparison: Comparison, number: int = 1, *, drawn: bool = False) -> Section:
    """Return the section on the verdicts of one comparison.

    number: from 1, of those in one document. drawn: whether the changes are a chart.
    """
    rows = [row for row in comparison.rows if row.verdict not in (ONLY_BASE, ONLY_NEW)]
    counts = ", ".join(f"{count} {name}" for name, count in comparison.counts.items())
    cases = counted(len(rows), "case")
    name, (names, shared) = _name(number), _name_cases(comparison)
    blocks = [
        _list_changes(f"{name}-changes", comparison, rows, names, drawn) if rows else None,
        _list_parts(f"{name}-parts", rows, names),
        _list_differences(f"{name}-differences", comparison),
    ]
    return Section(
        name,
        "Verdicts",
        f"{cases} compared: {counts}; margin ±{comparison.rule.margin * 100:g} %.",
        tuple(_describe(comparison, shared)),
        tuple(_find(comparison, names)),
        tuple((block,) for block in blocks if block),
    )


def explain_missing(base: str, new: str, why: str, number: int = 1) -> Section:
    """Return the section on two runs that cannot be compared."""
    return Section(_name(number), "Verdicts", f"No verdicts on {new} compared with {base}: {why}.")


def _name(number: int) -> str:
    return "verdicts" if number == 1 else f"verdicts-{number}"


def _name_cases(comparison: Comparison) -> tuple[dict[AnyCase, str], str]:
    """Return the name of each case without the parts that all of them share, and these parts."""
    cases = {row.case: label_parts(row.case) for row in comparison.rows}
    alike = len(cases) > 1 and len({len(parts) for parts in cases.values()}) == 1
    parts = list(zip(*cases.values(), strict=True)) if alike else []
    shared = {i: texts[0] for i, texts in enumerate(parts) if i > 1 and len({*texts}) == 1}
    names = {
        case: " ".join(part for i, part in enumerate(parts) if i not in shared and part)
        for case, parts in cases.items()
    }
    return names, ", ".join(filter(None, shared.values()))


def _describe(comparison: Comparison, shared: str) -> Iterator[str]:
    """Yield the two sides, what all cases have in common, and what the times are."""
    yield f"BASE: {_describe_side(comparison.base)}"
    yield f"NEW: {_describe_side(comparison.new)}"
    if shared:
        yield f"All cases: {shared}"
    kinds = dict.fromkeys(row.base.statistic for row in comparison.rows if row.base and row.new)
    if kinds:
        yield f"Times: {' or '.join(kinds)} of each launch, median over launches"


def _describe_side(source: Source) -> str:
    """Format the name of a side, its number of launches, and when they began."""
    backends = [launch.backend for run in source.runs for launch in run.launches]
    launches = counted(max(map(backends.count, backends), default=0), "launch")
    each = " per backend" if len(set(backends)) > 1 else ""
    runs = f" of {len(source.runs)} runs" if len(source.runs) > 1 else ""
    started = min(run.started for run in source.runs)  # "" if the log of another tool omits it
    return f"{source.name}, {launches}{each}{runs}{f', from {started}' if started else ''}"


def _find(comparison: Comparison, names: Names) -> Iterator[Finding]:
    """Yield what makes a comparison void, doubtful or incomplete, and what would settle it."""
    if other := explain_other_machine(comparison):
        yield Finding("error", "other-machine", other)
    uncompared: dict[tuple[str, str], list[str]] = {}
    for row in comparison.rows:
        if row.verdict in SEVERITIES:
            uncompared.setdefault((row.verdict, row.why), []).append(names[row.case])
    for (verdict, why), cases in uncompared.items():
        where = "in the other: " if verdict in (ONLY_BASE, ONLY_NEW) else ""
        reason = f" ({where}{why})" if why else ""
        sentence = f"{verdict}: {_list_some(cases, '; ')}{reason}"
        yield Finding(SEVERITIES[verdict], "not-compared", sentence)
    for note in comparison.notes:
        yield Finding("note", "conditions", note)
    yield from _advise(comparison)
    if text := format_noticeable([row.noticeable for row in comparison.rows if row.shift]):
        yield Finding("note", "sensitivity", text)


def _list_some(texts: Sequence[str], gap: str = ", ") -> str:
    """Return the first texts in one line, and how many more there are."""
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return gap.join([*texts[:SHOWN], *more])


def _advise(comparison: Comparison) -> Iterator[Finding]:
    """Yield what would settle the INCONCLUSIVE rows."""
    rows = [row for row in comparison.rows if row.verdict == INCONCLUSIVE and not row.withheld]
    few = [row.needed for row in rows if row.needed is not None and row.needed <= MOST]
    drifting = sum(row.withheld == DRIFT for row in comparison.rows)
    if few:
        launches = f"run with --launches {max(few)}"
        more = "use a longer --max-time" if comparison.rule.paired else launches
        yield _unsettled(len(few), f"needs about {max(few)} launches per side", more)
    if drifting:
        why = (
            "beyond the margin, but two runs of identical code this far apart in time may differ "
            "as much"
        )
        yield _unsettled(drifting, why, "measure the two in turns, with `ab`")
    if many := len(rows) - len(few):
        why = f"needs more than {MOST} launches per side"
        yield _unsettled(many, why, "measure on a quieter host, or with another --margin")


def _unsettled(count: int, why: str, next_step: str) -> Finding:
    return Finding("note", "inconclusive", f"{count} INCONCLUSIVE: {why}", next_step)


def _list_changes(
    name: str, comparison: Comparison, rows: Sequence[Row], names: Names, drawn: bool
) -> Chart:
    """Return the table of all rows that both sides have, with a chart if one is drawn."""
    changes = [Change(names[row.case], row.case, row.base, row.new, row) for row in rows]
    drifts = {row.case: f"±{row.drift * 100:.1f} %" for row in rows if row.drift}
    drift = Column[Change]("drift", lambda change: drifts.get(change.case, ""))
    chart = list_changes(name, "case", changes, drift)
    return draw_changes(chart, changes, comparison.rule.confidence) if drawn else chart


def _list_parts(name: str, rows: Sequence[Row], names: Names) -> Chart | None:
    """Return the table of the parts of all steps; None if there are no steps."""
    cells = [
        {
            "case": names[row.case],
            "part of a step": part.name,
            "base": f"{part.base_seconds * 1e3:.4g} ms",
            "new": f"{part.new_seconds * 1e3:.4g} ms",
            "change": shift_estimate(part.shift),
            "range of change": shift_interval(part.shift),
            "verdict": part.verdict,
        }
        for row in rows
        for part in row.parts
    ]
    return Chart(name, "Parts of each step", "", tabulate_rows("", cells)) if cells else None


def _list_differences(name: str, comparison: Comparison) -> Chart | None:
    """Return the table of what differs between the environments; None if nothing does."""
    rows = [(d.name, _list_some(d.base), _list_some(d.new)) for d in comparison.differences]
    headings = ("what differs", "base", "new")
    caption = "Facts and settings that differ between BASE and NEW. One of them may be the cause."
    table = make_table("", headings, rows, left=headings)
    return Chart(name, "Other differences", caption, table, remarkable=0) if rows else None


def _data(comparison: Comparison, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    base, new, rule = comparison.base, comparison.new, comparison.rule
    return {
        "base": {"name": base.name, "runs": [run.id for run in base.runs]},
        "new": {"name": new.name, "runs": [run.id for run in new.runs]},
        "margin": rule.margin,
        "exit_code": exit_code(comparison, strict=False),
        "exit_code_strict": exit_code(comparison, strict=True),
        "counts": comparison.counts,
        "rows": [
            {**values, "identity": asdict(row.case), "parts": [asdict(p) for p in row.parts]}
            for values, row in zip(rows, comparison.rows, strict=True)
        ],
        "differences": [asdict(difference) for difference in comparison.differences],
        "notes": comparison.notes,
    }


def _values(row: Row) -> dict[str, Any]:
    return {
        "case": label(row.case),
        "verdict": row.verdict,
        **_side_values("base", row.base),
        **_side_values("new", row.new),
        "change": math.expm1(row.shift.estimate) if row.shift else None,
        "change_low": math.expm1(row.shift.low) if row.shift else None,
        "change_high": math.expm1(row.shift.high) if row.shift else None,
        "statistic": row.base.statistic if row.base and row.new else None,
        "margin": row.margin or None,
        "drift": row.drift or None,
        "launches_needed": row.needed,
        "noticeable": row.noticeable,
        "why": row.why,
    }


def _side_values(name: str, side: Side | None) -> dict[str, Any]:
    interval = side.interval if side else None
    return {
        f"{name}_seconds": side.seconds if side else None,
        f"{name}_low_seconds": interval.low if interval else None,
        f"{name}_high_seconds": interval.high if interval else None,
        f"{name}_launches": len(side.times) if side else 0,
    }
