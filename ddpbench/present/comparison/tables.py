"""Formats of a comparison: one entry of FORMATS adds an output."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

from ddpbench.present.columns import MARKDOWN, TERMINAL, Column, Style, text_column
from ddpbench.present.comparison.labels import (
    SHOWN,
    format_difference,
    format_noticeable,
    label,
    label_parts,
    shift_estimate,
    shift_interval,
    side_interval,
    side_time,
)
from ddpbench.records.terminal_text import escaped
from ddpbench.records.wording import counted
from ddpbench.verdicts.comparison import (
    ONLY_BASE,
    ONLY_NEW,
    Comparison,
    Row,
    exit_code,
    explain_shortfall,
)
from ddpbench.verdicts.many_pairs import DRIFT
from ddpbench.verdicts.matching import Side, Source
from ddpbench.verdicts.verdict import INCONCLUSIVE, MOST, SAME


def table(comparison: Comparison) -> str:
    """Format both sides, their differences, the rows, and a summary."""
    sides = [f"BASE  {describe_side(comparison.base)}", f"NEW   {describe_side(comparison.new)}"]
    notes = [f"NOTE: {note}" for note in comparison.notes]
    blocks = [
        [*sides, *_common(comparison), *_times(comparison)],
        [*notes, *_differences(comparison)],
        [_table(comparison, compared_rows(comparison), TERMINAL)],
        [_parts(comparison, TERMINAL)],
        list_unmatched(comparison),
        [summarize(comparison), *_advice(comparison)],
    ]
    return "\n\n".join(text for block in blocks if (text := "\n".join(block))) + "\n"


def markdown(comparison: Comparison) -> str:
    """Format for a pull request: the summary first, SAME rows and environments folded."""
    rows = compared_rows(comparison)
    same = [row for row in rows if row.verdict == SAME]
    sides = [f"BASE: {describe_side(comparison.base)}", f"NEW: {describe_side(comparison.new)}"]
    sides += [*_differences(comparison), *list_unmatched(comparison)]
    blocks = [
        f"**ddpbench: {_counts(comparison)}** ({_margin(comparison)})",
        _bullets(explain(comparison)),
        _table(comparison, [row for row in rows if row.verdict != SAME], MARKDOWN),
        _folded(f"{len(same)} SAME", _table(comparison, same, MARKDOWN)),
        _folded("BASE, NEW, and other differences", _bullets(sides)),
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def csv(comparison: Comparison) -> str:
    """Format one row per case: seconds, and changes as fractions (0.03 is 3 % longer)."""
    import pandas as pd

    return str(pd.DataFrame([_values(row) for row in comparison.rows]).to_csv(index=False))


def as_json(comparison: Comparison) -> str:
    """Format rows with the identity of each case, differences of environments, and notes."""
    base, new, rule = comparison.base, comparison.new, comparison.rule
    document = {
        "base": {"name": base.name, "runs": [run.id for run in base.runs]},
        "new": {"name": new.name, "runs": [run.id for run in new.runs]},
        "margin": rule.margin,
        "exit_code": exit_code(comparison, strict=False),
        "exit_code_strict": exit_code(comparison, strict=True),
        "counts": comparison.counts,
        "rows": [
            {**_values(row), "identity": asdict(row.case), "parts": [asdict(p) for p in row.parts]}
            for row in comparison.rows
        ],
        "differences": [asdict(difference) for difference in comparison.differences],
        "notes": comparison.notes,
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "table": escaped(table),
    "csv": escaped(csv),
    "json": as_json,
    "markdown": escaped(markdown),
}


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>" if body else ""


def _shared_parts(comparison: Comparison) -> set[int]:
    labels = [label_parts(row.case) for row in comparison.rows]
    if len(labels) < 2 or len(set(map(len, labels))) > 1:
        return set()
    return {i for i, parts in enumerate(zip(*labels, strict=True)) if i > 1 and len({*parts}) == 1}


def _common(comparison: Comparison) -> list[str]:
    shared = _shared_parts(comparison)
    parts = label_parts(comparison.rows[0].case)
    common = [part for i, part in enumerate(parts) if i in shared and part]
    return [f"all   {', '.join(common)}"] if common else []


def _times(comparison: Comparison) -> list[str]:
    kinds = dict.fromkeys(row.base.statistic for row in comparison.rows if row.base and row.new)
    return [f"times {' or '.join(kinds)} of each launch, median over launches"] if kinds else []


def _label(row: Row, shared: Collection[int]) -> str:
    parts = label_parts(row.case)
    return " ".join(part for i, part in enumerate(parts) if i not in shared and part)


def describe_side(source: Source) -> str:
    """Format the name of a side, its number of launches, and when they began."""
    backends = [launch.backend for run in source.runs for launch in run.launches]
    count = max(map(backends.count, backends), default=0)
    launches = f"{count} launch{'es' if count != 1 else ''}"
    each = " per backend" if len(set(backends)) > 1 else ""
    runs = f" of {len(source.runs)} runs" if len(source.runs) > 1 else ""
    started = min(run.started for run in source.runs)  # "" if the log of another tool omits it
    return f"{source.name}   {launches}{each}{runs}{f', from {started}' if started else ''}"


def _differences(comparison: Comparison) -> list[str]:
    return [f"differs: {format_difference(each)}" for each in comparison.differences]


def compared_rows(comparison: Comparison) -> list[Row]:
    """Return the rows of cases that both sides have."""
    return [row for row in comparison.rows if row.verdict not in (ONLY_BASE, ONLY_NEW)]


def summarize(comparison: Comparison) -> str:
    """Format the number of cases of each verdict, and the margin."""
    return f"{_counts(comparison)}; {_margin(comparison)}"


def explain(comparison: Comparison) -> list[str]:
    """List what would settle INCONCLUSIVE rows, notes, and what all cases have in common."""
    lines = [*_advice(comparison), *comparison.notes, *_common(comparison), *_times(comparison)]
    return [*lines, *filter(None, [explain_shortfall(comparison)])]


def _table(comparison: Comparison, rows: Sequence[Row], style: Style) -> str:
    return style.rows(rows, columns(comparison), drop_empty=True) if rows else ""


def _parts(comparison: Comparison, style: Style) -> str:
    shared = _shared_parts(comparison)
    cells = [
        [
            "" if i else _label(row, shared),
            part.name,
            f"{part.base_seconds * 1e3:.4g} ms",
            f"{part.new_seconds * 1e3:.4g} ms",
            shift_estimate(part.shift),
            shift_interval(part.shift),
            part.verdict,
        ]
        for row in comparison.rows
        for i, part in enumerate(row.parts)
    ]
    headings = ["case", "part of a step", "base", "new", "change", "range of change", "verdict"]
    return style.table(cells, headings, ["case", "part of a step", "verdict"]) if cells else ""


def columns(comparison: Comparison) -> list[Column[Row]]:
    """Return the columns of a row, its name first; a table leaves out those that stay empty."""
    shared = _shared_parts(comparison)
    return [
        text_column("case", lambda row: _label(row, shared)),
        Column("base", lambda row: side_time(row.case, row.base)),
        Column("95 %", lambda row: side_interval(row.base)),
        Column("new", lambda row: side_time(row.case, row.new)),
        Column("95 %", lambda row: side_interval(row.new)),
        Column("change", lambda row: shift_estimate(row.shift)),
        Column("range of change", lambda row: shift_interval(row.shift)),
        Column("drift", lambda row: f"±{row.drift * 100:.1f} %" if row.drift else ""),
        text_column("verdict", lambda row: row.verdict),
        text_column("why", lambda row: row.why),
    ]


def _counts(comparison: Comparison) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in comparison.counts.items())
    return f"{counted(len(compared_rows(comparison)), 'case')} compared: {counts}"


def _margin(comparison: Comparison) -> str:
    return f"margin ±{comparison.rule.margin * 100:g} %"


def _advice(comparison: Comparison) -> list[str]:
    """State which change could have been noticed, and what would settle INCONCLUSIVE rows."""
    rows = [row for row in comparison.rows if row.verdict == INCONCLUSIVE and not row.withheld]
    few = [row.needed for row in rows if row.needed is not None and row.needed <= MOST]
    drifting = sum(row.withheld == DRIFT for row in comparison.rows)
    advice = [format_noticeable([row.noticeable for row in comparison.rows if row.shift])]
    if few:
        more = "give more --budget" if comparison.rule.paired else f"run with --launches {max(few)}"
        advice.append(f"{len(few)} INCONCLUSIVE: needs about {max(few)} launches per side: {more}")
    if drifting:
        advice.append(
            f"{drifting} INCONCLUSIVE: beyond the margin, but two runs of identical code this far "
            "apart in time may differ as much: measure the two in turns, with `ab`"
        )
    if len(rows) > len(few):
        advice.append(
            f"{len(rows) - len(few)} INCONCLUSIVE: needs more than {MOST} launches per side: "
            "measure on a quieter host, or with another --margin"
        )
    return [sentence for sentence in advice if sentence]


def list_unmatched(comparison: Comparison) -> list[str]:
    """List the cases that only one side has."""
    lines, shared = [], _shared_parts(comparison)
    for name in (ONLY_BASE, ONLY_NEW):
        cases = [
            _label(row, shared) + (f" (in the other: {row.why})" if row.why else "")
            for row in comparison.rows
            if row.verdict == name
        ]
        more = [f"and {len(cases) - SHOWN} more"] if len(cases) > SHOWN else []
        if cases:
            lines.append(f"{name}: {'; '.join([*cases[:SHOWN], *more])}")
    return lines


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
