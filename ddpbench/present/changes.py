"""Changes between two sides: the verdicts on compared runs, and on tests of a pytest session."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ddpbench.present.case_labels import format_time, label_parts, name_case
from ddpbench.present.document import Chart, Document, Section, make_table, tabulate_rows
from ddpbench.records.schema import Finding
from ddpbench.records.wording import counted
from ddpbench.verdicts.comparison import Comparison, exit_code
from ddpbench.verdicts.matching import AnyCase, Side, Source
from ddpbench.verdicts.regression import JudgedTest, Measured
from ddpbench.verdicts.rows import COMPARED, ONLY_BASE, ONLY_NEW, Row, count_verdicts
from ddpbench.verdicts.verdict import INCOMPARABLE, INVALID, MOST, Shift

SHOWN = 8  # texts that one line lists
TITLE = "ddpbench: NEW compared with BASE"
SEVERITIES = {INVALID: "error", INCOMPARABLE: "warning", ONLY_BASE: "warning", ONLY_NEW: "warning"}


def build_document(comparison: Comparison) -> Document:
    """Return the verdicts, and their values: seconds, and changes as fractions (0.03: 3 % longer).

    The data of JSON also have the identity of each case, differences of the environments and notes.
    """
    rows = [_list_values(row) for row in comparison.rows]
    values = make_table("", rows[0], [list(row.values()) for row in rows])
    base, new = comparison.base, comparison.new
    data = {
        "base": {"name": base.name, "runs": [run.id for run in base.runs]},
        "new": {"name": new.name, "runs": [run.id for run in new.runs]},
        "margin": comparison.rule.margin,
        "exit_code": exit_code(comparison, strict=False),
        "exit_code_strict": exit_code(comparison, strict=True),
        "counts": comparison.counts,
        "rows": [
            {**values, "identity": asdict(row.case)}
            for values, row in zip(rows, comparison.rows, strict=True)
        ],
        "differences": [asdict(difference) for difference in comparison.differences],
        "notes": comparison.notes,
    }
    return Document(TITLE, (build_section(comparison),), values, data)


def build_section(comparison: Comparison) -> Section:
    """Return the section on the verdicts."""
    names, shared = _name_cases(comparison)
    rows = [row for row in comparison.rows if row.verdict not in (ONLY_BASE, ONLY_NEW)]
    counts = ", ".join(f"{count} {name}" for name, count in comparison.counts.items())
    changes = [
        describe_change(
            {"case": names[row.case]}, row, drift=f"±{row.drift * 100:.1f} %" if row.drift else ""
        )
        for row in rows
    ]
    charts = []
    if rows:
        charts.append(list_changes("verdicts-changes", "case", changes))
    charts += [*_list_differences("verdicts-differences", comparison)]
    return Section(
        "verdicts",
        "Verdicts",
        f"{counted(len(rows), 'case')} compared: {counts}; "
        f"margin ±{comparison.rule.margin * 100:g} %.",
        tuple(_describe(comparison, shared)),
        tuple(_find(comparison, names)),
        tuple((chart,) for chart in charts),
    )


def _name_cases(comparison: Comparison) -> tuple[dict[AnyCase, str], str]:
    """Return the label of each case without the parts that all share, and these parts."""
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
    """Yield the two sides, and the shared properties of all cases."""
    yield f"BASE: {_describe_side(comparison.base)}"
    yield f"NEW: {_describe_side(comparison.new)}"
    if shared:
        yield f"All cases: {shared}"


def _describe_side(source: Source) -> str:
    """Format the name of a side, its number of launches, and when they began."""
    backends = [launch.backend for run in source.runs for launch in run.launches]
    launches = counted(max(map(backends.count, backends), default=0), "launch")
    each = " per backend" if len(set(backends)) > 1 else ""
    runs = f" of {len(source.runs)} runs" if len(source.runs) > 1 else ""
    started = min(run.started for run in source.runs)  # "" if the log of another tool omits it
    return f"{source.name}, {launches}{each}{runs}{f', from {started}' if started else ''}"


def _find(comparison: Comparison, names: Mapping[AnyCase, str]) -> Iterator[Finding]:
    """Yield reasons why a comparison is void, doubtful or incomplete, and next steps."""
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
    if text := format_noticeable(comparison.rows):
        yield Finding("note", "sensitivity", text)


def _list_some(texts: Sequence[str], gap: str = ", ") -> str:
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return gap.join([*texts[:SHOWN], *more])


def _advise(comparison: Comparison) -> Iterator[Finding]:
    """Yield how to settle the INCONCLUSIVE rows."""
    needed = [row.needed for row in comparison.rows if row.needed is not None]
    few = [launches for launches in needed if launches <= MOST]
    more = "use a longer --max-time"
    if few and not comparison.rule.paired:
        more = f"run with --launches {max(few)}"
    for count, why, next_step in (
        (len(few), f"needs about {max(few, default=0)} launches per side", more),
        (
            len(needed) - len(few),
            f"needs more than {MOST} launches per side",
            "measure on a quieter host, or with another --margin",
        ),
    ):
        if count:
            sentence = f"{count} INCONCLUSIVE: {why}"
            yield Finding("note", "inconclusive", sentence, next_step)


def _list_differences(name: str, comparison: Comparison) -> Iterator[Chart]:
    """Yield the table of differences of the environments, if there are any."""
    rows = [(d.name, _list_some(d.base), _list_some(d.new)) for d in comparison.differences]
    headings = ("what differs", "base", "new")
    caption = "Facts and settings that differ between BASE and NEW. One of them may be the cause."
    if rows:
        table = make_table("", headings, rows, left=headings)
        yield Chart(name, "Other differences", caption, table)


def _list_values(row: Row) -> dict[str, Any]:
    shift = row.shift
    return {
        "case": name_case(row.case),
        "verdict": row.verdict,
        **_list_side_values("base", row.base),
        **_list_side_values("new", row.new),
        "change": math.expm1(shift.estimate) if shift else None,
        "change_low": math.expm1(shift.low) if shift else None,
        "change_high": math.expm1(shift.high) if shift else None,
        "margin": row.margin if row.verdict in COMPARED else None,
        "drift": row.drift or None,
        "launches_needed": row.needed,
        "noticeable": row.noticeable,
        "why": row.why,
    }


def _list_side_values(name: str, side: Side | None) -> dict[str, Any]:
    interval = side.interval if side else None
    return {
        f"{name}_seconds": side.seconds if side else None,
        f"{name}_low_seconds": interval.low if interval else None,
        f"{name}_high_seconds": interval.high if interval else None,
        f"{name}_launches": len(side.times) if side else 0,
    }


# --- tests


def build_tests(measured: Mapping[str, Measured], rows: Sequence[JudgedTest]) -> Section:
    """Return the section of a session.

    measured: test → its measurement. rows: the verdicts.
    """
    names = {test: test.rpartition("::")[2] for test in measured}  # without files, if distinct
    if len(set(names.values())) < len(names):
        names = {test: test for test in measured}
    verdicts = ", ".join(f"{count} {name}" for name, count in count_verdicts(rows).items())
    changes = [_describe_test(names[row.test], row) for row in rows if row.saved is not None]
    charts = [list_changes("tests-changes", "test", changes)] if changes else []
    return Section(
        "tests",
        "Tests",
        f"{counted(len(names), 'test')} measured{f': {verdicts}' if verdicts else ''}.",
        findings=tuple(_find_of_tests(names, measured, rows)),
        rows=tuple((chart,) for chart in charts),
    )


def _describe_test(name: str, row: JudgedTest) -> dict[str, str]:
    saved = row.saved or row.measured
    versions = (saved.torch, row.measured.torch)
    more = {
        "saved in": saved.source,
        "torch": " → ".join(dict.fromkeys(filter(None, versions))),
        "margin": f"±{row.margin * 100:.3g} %",
    }
    return describe_change({"test": name}, row, **more)


def _find_of_tests(
    names: Mapping[str, str], measured: Mapping[str, Measured], rows: Sequence[JudgedTest]
) -> Iterator[Finding]:
    """Yield warnings about times, and tests without verdicts."""
    bases = {row.test: row.saved for row in rows if row.saved is not None}
    for side, every in (("base", bases), ("new", measured)):
        for test, one in every.items():
            for warning in one.warnings:
                yield Finding("warning", "conditions", f"{side}, {names[test]}: {warning}")
    if unknown := [names[row.test] for row in rows if row.saved is None]:
        sentence = f"{ONLY_NEW}, no saved run to compare with: {', '.join(unknown)}"
        yield Finding("note", "not-compared", sentence)
    if text := format_noticeable(rows):
        yield Finding("note", "sensitivity", text)


# --- a change


def format_shift(shift: Shift | None) -> dict[str, str]:
    """Return the cells of a change: "+12.3 %", and of its interval: "+10.1 % … +14.5 %"."""
    if shift is None:
        return {"change": "-", "range of change": "-"}
    ends = (shift.estimate, shift.low, shift.high)
    change, low, high = (f"{math.expm1(end) * 100:+.1f} %" for end in ends)
    return {"change": change, "range of change": f"{low} … {high}"}


def describe_change(label: Mapping[str, str], row: Row, **more: str) -> dict[str, str]:
    """Return a row of the table.

    label: the first cell. more: cells before the verdict.
    """
    return {
        **label,
        "base": _format_side(row, row.base),
        "new": _format_side(row, row.new),
        **format_shift(row.shift),
        **more,
        "verdict": row.verdict,
        "why": row.why,
    }


def _format_side(row: Row, side: Side | None) -> str:
    """Format a time and its interval: "1000 µs ±1.2 %"."""
    if side is None:
        return "-"
    interval = f" ±{side.interval.half_width * 100:.1f} %" if side.interval else ""
    return f"{format_time(row.case, side.seconds)}{interval}"


def list_changes(name: str, head: str, changes: Sequence[Mapping[str, str]]) -> Chart:
    """Return the table of changes. head: heading of the labels. changes: of `describe_change`."""
    return Chart(name, f"Change of each {head}", "", tabulate_rows("", changes))


def format_noticeable(rows: Sequence[Row]) -> str:
    """State how large a change a comparison could have noticed; "" if no row has a change."""
    changes = [row.noticeable for row in rows if row.shift]
    known = [
        f"{change * 100:.0f}" if change < 10 else "over 1000"
        for change in sorted(change for change in changes if change is not None)
    ]
    if not known:
        few = "this comparison could not have noticed any change: too few launches"
        return few if changes else ""
    several = known[0] != known[-1]
    shown = f"{known[0]} to {known[-1]} %, depending on the case" if several else f"{known[0]} %"
    return f"this comparison could have noticed a change of {shown}"
