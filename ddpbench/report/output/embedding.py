"""Charts, tables and commands as the page holds them: small, and safe between HTML tags."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ddpbench.records.table import Table, TableColumn
from ddpbench.render.doctor import format_cell
from ddpbench.report.chart import Chart

DIGITS = 5  # significant ones of every float of a chart
# A next step is a command, or ends with one after a colon.
COMMAND = re.compile(r"(?:^|(?<=: ))(?:python3? -m ddpbench|ddpbench (?=[a-z])|torchrun )[^;]*$")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
UNIT = re.compile(r"(?<=\d) (?=(?:%|[µmn]?s|[kMGT]i?B(?:/s)?|B)(?!\w))")


def json_in_html(value: Any) -> str:
    """Return JSON for a <script>: floats rounded, and nothing that could end the element."""
    import markupsafe

    text = json.dumps(_rounded(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return markupsafe.Markup(text)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value.item() if hasattr(value, "item") else value  # of numpy


def figure(chart: Chart) -> dict[str, Any]:
    """Return what the page's script reads of a chart: its spec, and the choices if it has any.

    Datasets become columns, which are half the size of rows.
    """
    spec = {name: part for name, part in (chart.spec or {}).items() if name != "datasets"}
    datasets = {
        name: _columns(rows) for name, rows in (chart.spec or {}).get("datasets", {}).items()
    }
    choices = [
        {"label": choice.label, "data": choice.data, "table": table_data(choice.table)}
        for choice in chart.choices
    ]
    return {"spec": spec, "datasets": {} if choices else datasets, "choices": choices}


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def table_data(table: Table) -> dict[str, Any]:
    """Return a table as the page's template and its script show it: classes and text of cells."""
    backend = next((i for i, c in enumerate(table.columns) if c.heading == "backend"), None)
    return {
        "headed": any(column.heading for column in table.columns),
        "columns": [[column.heading, column.align] for column in table.columns],
        "backend": backend,  # position of the column whose backends can be hidden
        "rows": [list(cells(row, table.columns)) for row in table.rows],
        "legend": table.legend,
    }


def cells(row: Sequence[Any], columns: Sequence[TableColumn]) -> Iterator[str]:
    """Format the cells of a row."""
    for value, column in zip(row, columns, strict=True):
        if value in (None, "-"):
            yield "–"
        elif isinstance(value, bool):
            yield "yes" if value else "no"
        else:
            yield format_cell(value, column)


def backends(charts: Iterable[Chart]) -> list[str]:
    """Return the backends that readers can hide: those of the charts' parameters."""
    return sorted(
        {
            backend
            for chart in charts
            for parameter in (chart.spec or {}).get("params", ())
            if parameter["name"] == "backends"
            for backend in parameter["value"]
        }
    )


def split_command(text: str) -> tuple[str, str]:
    """Split a next step into the words before its command, and the command; "" if it has none."""
    found = COMMAND.search(text)
    return (text[: found.start()], found.group()) if found else (text, "")


def keep_together(text: str, units: bool = True) -> Any:
    """Return HTML of a text in which no line ends inside an option, or between value and unit.

    units: off for a command, whose spaces stay as they are for pasting.
    """
    import markupsafe

    joined = UNIT.sub("\N{NO-BREAK SPACE}", text) if units else text
    options = OPTION.sub(r'<span class="option">\g<0></span>', str(markupsafe.escape(joined)))
    return markupsafe.Markup(options)


def command_line(words: Sequence[str]) -> str:
    """Return a command line that can be pasted into a shell."""
    return shlex.join(words)
