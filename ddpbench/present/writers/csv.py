"""The values of a document as CSV: one row per case, unrounded; an empty cell is unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpbench.present.document import Document
from ddpbench.records.table import Table
from ddpbench.records.terminal_text import escape

if TYPE_CHECKING:
    import pandas as pd


def write(document: Document) -> str:
    """Return a line of names, and one for each row."""
    frame = make_frame(document.values)
    printable = frame.map(lambda cell: escape(cell) if isinstance(cell, str) else cell)
    return str(printable.to_csv(index=False))


def make_frame(values: Table) -> pd.DataFrame:
    """Return the rows of a table as a DataFrame of objects."""
    import pandas as pd

    names = [column.heading for column in values.columns]
    frame: pd.DataFrame = pd.DataFrame(list(values.rows), columns=names, dtype=object)
    return frame
