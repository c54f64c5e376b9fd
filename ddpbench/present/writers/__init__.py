"""Writers: each shows any document. One entry of WRITERS adds a format of `--format`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpbench.present.document import Document
from ddpbench.present.writers import markdown, text
from ddpbench.records.table import Table
from ddpbench.records.terminal_text import escape

if TYPE_CHECKING:
    import pandas as pd


def write_csv(document: Document) -> str:
    """Return a line of names, and one line per case: unrounded, an unknown value empty."""
    values = document.values
    rows = [[escape(x) if isinstance(x, str) else x for x in row] for row in values.rows]
    return str(make_frame(replace(values, rows=tuple(map(tuple, rows)))).to_csv(index=False))


def make_frame(values: Table) -> pd.DataFrame:
    """Return the rows of a table as a DataFrame of objects."""
    import pandas as pd

    names = [column.heading for column in values.columns]
    frame: pd.DataFrame = pd.DataFrame(list(values.rows), columns=names, dtype=object)
    return frame


def write_json(document: Document) -> str:
    """Return the data as they are. Raises ValueError for numbers that JSON lacks."""
    return json.dumps(document.data, indent=1, allow_nan=False) + "\n"


WRITERS: dict[str, Callable[[Document], str]] = {
    "table": text.write,
    "csv": write_csv,
    "json": write_json,
    "markdown": markdown.write,
}
