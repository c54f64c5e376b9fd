"""The values of a document as CSV: one row per case, unrounded; an empty cell is unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpbench.present.document import Document
from ddpbench.records.table import Table
from ddpbench.records.terminal_text import escape

if TYPE_CHECKING:
    import pandas as pd


def write(document: Document) -> str:
    """Return a line of names, and one line per row, with control characters escaped."""
    values = document.values
    rows = [[escape(x) if isinstance(x, str) else x for x in row] for row in values.rows]
    return str(make_frame(replace(values, rows=tuple(map(tuple, rows)))).to_csv(index=False))


def make_frame(values: Table) -> pd.DataFrame:
    """Return the rows of a table as a DataFrame of objects."""
    import pandas as pd

    names = [column.heading for column in values.columns]
    frame: pd.DataFrame = pd.DataFrame(list(values.rows), columns=names, dtype=object)
    return frame
