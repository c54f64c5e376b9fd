"""The verdicts on tests as lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ddpbench.present.columns import TERMINAL, Column, text_column
from ddpbench.present.comparison.labels import (
    format_noticeable,
    shift_estimate,
    shift_interval,
    side_interval,
    side_time,
)
from ddpbench.records.wording import counted
from ddpbench.verdicts.comparison import ONLY_NEW
from ddpbench.verdicts.regression import Row, counts

COLUMNS: tuple[Column[Row], ...] = (
    text_column("test", lambda row: row.test),
    text_column("saved in", lambda row: row.base.source if row.base else ""),
    Column("base", lambda row: side_time(row.base.case, row.base.side) if row.base else "-"),
    Column("95 %", lambda row: side_interval(row.base.side if row.base else None)),
    Column("new", lambda row: side_time(row.new.case, row.new.side)),
    Column("95 %", lambda row: side_interval(row.new.side)),
    Column("change", lambda row: shift_estimate(row.shift)),
    Column("95 % of it", lambda row: shift_interval(row.shift)),
    text_column(
        "torch",
        lambda row: " → ".join(
            dict.fromkeys(side.torch for side in (row.base, row.new) if side and side.torch)
        ),
    ),
    Column("margin", lambda row: f"±{row.margin * 100:.3g} %"),
    text_column("verdict", lambda row: row.verdict),
    text_column("why", lambda row: row.why),
)


def table(rows: Sequence[Row]) -> str:
    """Format warnings, a row per test that has a base, the names of the others, and the counts."""
    compared = [row for row in rows if row.base is not None]
    unknown = [row.test for row in rows if row.base is None]
    verdicts = ", ".join(f"{count} {name}" for name, count in counts(rows).items())
    notes = [
        f"NOTE: {name}, {row.test}: {warning}"
        for row in rows
        for name, side in (("base", row.base), ("new", row.new))
        for warning in (side.warnings if side else ())
    ]
    blocks = [
        *notes,
        TERMINAL.rows(compared, COLUMNS) if compared else "",
        f"{ONLY_NEW}, no saved run to compare with: {', '.join(unknown)}" if unknown else "",
        f"{counted(len(rows), 'test')} measured: {verdicts}",
        format_noticeable([row.noticeable for row in rows if row.shift]),
    ]
    return "\n".join(filter(None, blocks))
