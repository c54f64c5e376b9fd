"""The verdict on tests as lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ddpbench.render.comparison import change_cells, side_cells
from ddpbench.render.style import TERMINAL
from ddpbench.verdicts.comparison import ONLY_NEW
from ddpbench.verdicts.regression import Row, counts

HEADS = ["test", "saved in", "base", "95 %", "new", "95 %", "change", "95 % of it", "margin",
         "verdict", "why"]  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """What to know before believing it; the tests that have a base, a row each; those that have
    none, by name; what it comes to."""
    cells = [_cells(row) for row in rows if row.base is not None]
    unknown = [row.test for row in rows if row.base is None]
    words = ", ".join(f"{count} {name}" for name, count in counts(rows).items())
    notes = [
        f"NOTE: {name}, {row.test}: {warning}"
        for row in rows
        for name, side in (("base", row.base), ("new", row.new))
        for warning in (side.warnings if side else ())
    ]
    blocks = [
        *notes,
        TERMINAL.table(cells, HEADS) if cells else "",
        f"{ONLY_NEW}, nothing saved to compare with: {', '.join(unknown)}" if unknown else "",
        f"{len(rows)} test{'' if len(rows) == 1 else 's'} measured: {words}",
    ]
    return "\n".join(block for block in blocks if block)


def _cells(row: Row) -> list[str]:
    assert row.base is not None
    return [
        row.test,
        row.base.source,
        *side_cells(row.base.case, row.base.side),
        *side_cells(row.new.case, row.new.side),
        *change_cells(row.shift),
        f"±{row.margin * 100:.3g} %",
        row.verdict,
        row.why,
    ]
