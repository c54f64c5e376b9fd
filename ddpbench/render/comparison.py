"""From a comparison to text: one entry of FORMATS adds an output."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ddpbench.analysis.stats import half_width
from ddpbench.catalog.sizes import readable
from ddpbench.records.schema import Interval, StepCase
from ddpbench.records.visible import escaped
from ddpbench.render.collective_columns import at_once, digits
from ddpbench.render.style import MARKDOWN, TERMINAL, Style
from ddpbench.verdicts.comparison import ONLY_BASE, ONLY_NEW, Comparison, Row, exit_code
from ddpbench.verdicts.differences import Difference
from ddpbench.verdicts.matching import AnyCase, Side, Source
from ddpbench.verdicts.verdict import INCONCLUSIVE, MOST, SAME, Shift

HEADS = [
    "case", "base", "95 %", "new", "95 %", "change", "interval of it", "margin", "drift", "verdict",
    "why",
]  # fmt: skip
SHOWN = 8  # values of one difference, and cases that only one side has


def table(found: Comparison) -> str:
    """Who is compared, what differs beside, the rows, and what they come to."""
    blocks = [
        "\n".join(
            [
                f"BASE  {_named(found.base)}",
                f"NEW   {_named(found.new)}",
                *_common(found),
                *_times(found),
            ]
        ),
        "\n".join(_beside(found)),
        _table(found, [row for row in found.rows if _compared(row)], TERMINAL),
        "\n".join(_only(found)),
        "\n".join([f"{_counted(found)}; {_margin(found)}", *_advice(found), _noise(found)]),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def markdown(found: Comparison) -> str:
    """For a pull request: the summary first, what is not SAME, the rest folded away."""
    rows = [row for row in found.rows if _compared(row)]
    same = [row for row in rows if row.verdict == SAME]
    blocks = [
        f"**ddpbench: {_counted(found)}** ({_margin(found)})",
        "\n".join(f"- {line}" for line in [
            *_advice(found), *found.notes, _noise(found), *_common(found), *_times(found)]),
        _table(found, [row for row in rows if row.verdict != SAME], MARKDOWN),
        _folded(f"{len(same)} SAME", _table(found, same, MARKDOWN)),
        _folded("BASE, NEW, and what differs beside", "\n".join(f"- {line}" for line in [
            f"BASE: {_named(found.base)}", f"NEW: {_named(found.new)}",
            *_differences(found), *_only(found)])),
    ]  # fmt: skip
    return "\n\n".join(block for block in blocks if block) + "\n"


def csv(found: Comparison) -> str:
    """One row a case; seconds, and changes as fractions (0.03 is 3 % longer)."""
    import pandas as pd

    return str(pd.DataFrame([_values(row) for row in found.rows]).to_csv(index=False))


def as_json(found: Comparison) -> str:
    """The same, with the identity of each case, the environments' differences and the notes."""
    shown = {
        "base": {"name": found.base.name, "runs": [run.id for run in found.base.runs]},
        "new": {"name": found.new.name, "runs": [run.id for run in found.new.runs]},
        "margin": found.rule.margin,
        "calibration": found.rule.noise.name if found.rule.noise else None,
        "exit_code": exit_code(found, strict=False),
        "exit_code_strict": exit_code(found, strict=True),
        "counts": found.counts,
        "rows": [{**_values(row), "identity": asdict(row.case)} for row in found.rows],
        "differences": [asdict(each) for each in found.differences],
        "notes": found.notes,
    }
    return json.dumps(shown, indent=1, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "table": escaped(table),
    "csv": escaped(csv),
    "json": as_json,
    "markdown": escaped(markdown),
}


def label(case: AnyCase) -> str:
    """A case in words; --only looks for its texts here."""
    return " ".join(filter(None, _parts(case)))


def _parts(case: AnyCase) -> list[str]:
    """The words of a label; those at one place mean the same thing, "" is left out."""
    ranks = f"{case.world_size} rank{'s' if case.world_size > 1 else ''}"
    device = "" if case.device == "cpu" else case.device
    if isinstance(case, StepCase):
        settings = " ".join(case.settings)
        return [case.workload, settings, f"batch {case.batch}", case.optimizer, case.backend,
                device, ranks]  # fmt: skip
    return [
        case.operation,
        readable(case.nbytes) if case.nbytes else "",
        case.dtype if case.nbytes else "",
        case.reduce_op or "",
        "" if case.root is None else f"root {case.root}",
        "" if case.form == "tensor" else "list",
        ("in place" if case.in_place else "out of place") if case.nbytes else "",
        case.backend,
        device,
        ranks,
        at_once(case),
    ]


def _shared(found: Comparison) -> set[int]:
    """The places of words that all cases share: said once, above the table. Not the first two,
    which name the row."""
    parts = [_parts(row.case) for row in found.rows]
    if len(parts) < 2 or len({len(each) for each in parts}) > 1:
        return set()
    return {i for i, words in enumerate(zip(*parts, strict=True)) if len(set(words)) == 1 and i > 1}


def _common(found: Comparison) -> list[str]:
    shared = _shared(found)
    words = [w for i, w in enumerate(_parts(found.rows[0].case)) if i in shared and w]
    return [f"all   {', '.join(words)}"] if words else []


def _times(found: Comparison) -> list[str]:
    """What the times are of."""
    kinds = dict.fromkeys(row.base.statistic for row in found.rows if row.base and row.new)
    return [f"times {' or '.join(kinds)} of each launch, median over launches"] if kinds else []


def _label(found: Comparison, row: Row) -> str:
    shared = _shared(found)
    return " ".join(w for i, w in enumerate(_parts(row.case)) if i not in shared and w)


def _named(source: Source) -> str:
    """The name of a side, its launches, and when they were."""
    backends = [launch.backend for run in source.runs for launch in run.launches]
    count = max(map(backends.count, backends), default=0)
    runs = f" of {len(source.runs)} runs" if len(source.runs) > 1 else ""
    words = f"{count} launch{'es' if count != 1 else ''}"
    started = min(run.started for run in source.runs)  # "": another tool's log, that does not tell
    each = " a backend" if len(set(backends)) > 1 else ""
    return f"{source.name}   {words}{each}{runs}{f', from {started}' if started else ''}"


def _beside(found: Comparison) -> list[str]:
    return [f"NOTE: {note}" for note in found.notes] + _differences(found)


def _differences(found: Comparison) -> list[str]:
    return [f"differs: {difference(each)}" for each in found.differences]


def difference(found: Difference) -> str:
    """What differs in two environments: "torch: 2.12.0 → 2.13.0"."""
    return f"{found.name}: {_values_of(found.base)} → {_values_of(found.new)}"


def _values_of(values: Sequence[str]) -> str:
    more = f" and {len(values) - SHOWN} more" if len(values) > SHOWN else ""
    return ", ".join(values[:SHOWN]) + more


def _compared(row: Row) -> bool:
    return row.verdict not in (ONLY_BASE, ONLY_NEW)


def _table(found: Comparison, rows: Sequence[Row], style: Style) -> str:
    """The rows as a table; a column that is empty throughout is left out."""
    if not rows:
        return ""
    cells = [[*_cells(found, row)] for row in rows]
    used = [i for i in range(len(HEADS)) if any(row[i] for row in cells)]
    text = [[row[i].replace("|", "\\|") if style is MARKDOWN else row[i] for i in used]
            for row in cells]  # fmt: skip
    return style.table(text, [HEADS[i] for i in used])


def _cells(found: Comparison, row: Row) -> list[str]:
    return [
        _label(found, row),
        *side_cells(row.case, row.base),
        *side_cells(row.case, row.new),
        *change_cells(row.shift),
        f"±{row.margin * 100:.1f} %" if row.margin > found.rule.margin else "",
        f"±{row.drift * 100:.1f} %" if row.drift else "",
        row.verdict,
        row.why,
    ]


def side_cells(case: AnyCase, side: Side | None) -> tuple[str, str]:
    """A median, and the half-width of its interval."""
    if side is None:
        return "-", "-"
    return time(case, side.seconds), width(side.interval)


def change_cells(shift: Shift | None) -> tuple[str, str]:
    """The change and its interval."""
    if shift is None:
        return "-", "-"
    return percent(shift.estimate), f"{percent(shift.low)} … {percent(shift.high)}"


def time(case: AnyCase, seconds: float) -> str:
    """A median with its unit: a DDP step's in ms."""
    scale, unit = (1e3, "ms") if isinstance(case, StepCase) else (1e6, "µs")
    return f"{digits(seconds * scale)} {unit}"


def width(interval: Interval | None) -> str:
    """The relative half-width of an interval."""
    return f"±{half_width(interval) * 100:.1f} %" if interval else "-"


def percent(log_ratio: float) -> str:
    """A log ratio as a change: +12.3 %."""
    return f"{math.expm1(log_ratio) * 100:+.1f} %"


def _counted(found: Comparison) -> str:
    total = sum(map(_compared, found.rows))
    words = ", ".join(f"{count} {name}" for name, count in found.counts.items())
    return f"{total} case{'' if total == 1 else 's'} compared: {words}"


def _margin(found: Comparison) -> str:
    return f"margin ±{found.rule.margin * 100:g} %"


def _noise(found: Comparison) -> str:
    """Whether the machine's noise was minded; a row whose margin it is shows that margin."""
    if found.rule.noise is None:
        return "this machine's own noise is not known: python -m ddpbench calibrate measures it"
    return f"margins widened to this machine's noise where that is more: {found.rule.noise.name}"


def _advice(found: Comparison) -> list[str]:
    """What would decide the INCONCLUSIVE rows."""
    drifting = sum(row.drifts for row in found.rows)
    needed = [r.needed for r in found.rows if r.verdict == INCONCLUSIVE and not r.drifts]
    few = [launches for launches in needed if launches is not None and launches <= MOST]
    out = []
    if few:
        most = max(few)
        out.append(
            f"{len(few)} INCONCLUSIVE: needs about {most} launches a side: "
            + ("give more --budget" if found.rule.paired else f"run with --launches {most}")
        )
    if drifting:
        out.append(
            f"{drifting} INCONCLUSIVE: beyond the margin, but runs so far apart may differ as much "
            "with identical code: measure the two by turns, with `ab`"
        )
    if len(needed) > len(few):
        out.append(
            f"{len(needed) - len(few)} INCONCLUSIVE: more than {MOST} launches would be needed: "
            "measure on a quieter host, or with another --margin"
        )
    return out


def _only(found: Comparison) -> list[str]:
    """The cases that one side alone has."""
    out = []
    for name in (ONLY_BASE, ONLY_NEW):
        rows = [row for row in found.rows if row.verdict == name]
        shown = [_label(found, r) + (f" (in the other: {r.why})" if r.why else "") for r in rows]
        more = [f"and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
        if rows:
            out.append(f"{name}: {'; '.join([*shown[:SHOWN], *more])}")
    return out


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>" if body else ""


def _values(row: Row) -> dict[str, Any]:
    """A row for machines."""
    return {
        "case": label(row.case),
        "verdict": row.verdict,
        **_numbers("base", row.base),
        **_numbers("new", row.new),
        "change": math.expm1(row.shift.estimate) if row.shift else None,
        "change_low": math.expm1(row.shift.low) if row.shift else None,
        "change_high": math.expm1(row.shift.high) if row.shift else None,
        "statistic": row.base.statistic if row.base and row.new else None,
        "margin": row.margin or None,
        "drift": row.drift or None,
        "launches_needed": row.needed,
        "why": row.why,
    }


def _numbers(name: str, side: Side | None) -> dict[str, Any]:
    interval = side.interval if side else None
    return {
        f"{name}_seconds": side.seconds if side else None,
        f"{name}_low_seconds": interval.low if interval else None,
        f"{name}_high_seconds": interval.high if interval else None,
        f"{name}_launches": len(side.times) if side else 0,
    }
