"""A document as one HTML file with everything in it.

This module imports none of the packages of the extra `report` at its top.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpbench.present.document import Chart, Document, ReportRun, Section, format_cell
from ddpbench.records import store
from ddpbench.records.table import Table
from ddpbench.records.wording import install_extra

if TYPE_CHECKING:
    import jinja2

NAME = "report.html"  # in the folder of a run
PACKAGES = ("altair", "jinja2", "vl_convert")  # of the extra `report`
DIGITS = 5  # significant ones of every float of a chart
# A next step is a command, or ends with one after a colon.
COMMAND = re.compile(r"(?:^|(?<=: ))(?:python3? -m ddpbench|ddpbench (?=[a-z])|torchrun )[^;]*$")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def explain_missing(wanted: str) -> str | None:
    """Return the sentence on a missing package; None if there is none. Imports no package.

    wanted: the option or command that needs the package, such as "--report-file".
    """
    missing = next((name for name in PACKAGES if find_spec(name) is None), None)
    return missing and f"{wanted} needs {missing}: {install_extra('report')}"


def explain_unusable(output: Path, what: str = "page", name: str = NAME) -> str | None:
    """Return the sentence on a path that cannot become a file; None if it can.

    what: the content of the file, in words. name: an example of its name.
    """
    if output.is_dir():
        return f"{output} is a folder: name a file for the {what}, such as {output / name}"
    if output.exists() and not output.is_file():
        return f"{output} is not a regular file: choose another file for the {what}"
    if output.parent.exists() and not output.parent.is_dir():
        return f"{output.parent} is not a folder: choose another file for the {what}"
    return None


def make(runs: Sequence[ReportRun], verdicts: Sequence[Section] = (), title: str = "") -> str:
    """Return a page, as `build_page`. Raises InvalidRun for values that cannot be shown."""
    from ddpbench.present.formats import build_page

    with store.refuse_impossible_values(" or ".join(run.label for run in runs) or title):
        return write(build_page(runs, verdicts, title))


def save(
    output: Path, runs: Sequence[ReportRun], verdicts: Sequence[Section] = (), title: str = ""
) -> None:
    """Write a page atomically, and the folders above it. Raises OSError, and as `make`."""
    page = make(runs, verdicts, title)
    output.parent.mkdir(parents=True, exist_ok=True)
    store.replace_file(output, page.encode())


def write(document: Document) -> str:
    """Return HTML that makes no requests."""
    from ddpbench.present.theme import CONFIG, backend_swatches

    templates = _environment()
    charts = [chart for section in document.sections for chart in section.charts]
    scripts = (_bundle_vega(), templates.get_template("page.js").render())
    return templates.get_template("page.html").render(
        document=document,
        backends=backend_swatches(_list_backends(charts)),
        operations=[(name,) for name in dict.fromkeys(chart.operation for chart in charts) if name],
        config=CONFIG,
        scripts=scripts,
        # Source expressions of a content security policy that allows these scripts alone.
        hashes=[
            f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts
        ],
    )


@cache
def _bundle_vega() -> str:
    """Return the JavaScript that draws the charts. Bundling takes a second."""
    from vl_convert import javascript_bundle

    return javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _environment() -> jinja2.Environment:
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("ddpbench.present.writers", "templates"),
        autoescape=jinja2.select_autoescape(("html",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "embedded": json_in_html,
        "table": table_data,
        "command": split_command,
        "options": keep_options,
        "command_line": shlex.join,
    }
    return templates


def json_in_html(value: Any) -> str:
    """Return JSON for a <script>: floats rounded, without characters that end the element."""
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


def table_data(table: Table) -> dict[str, Any]:
    """Return a table as the page's template shows it: classes and text of cells."""
    headings = [column.heading for column in table.columns]
    rows = [[*map(format_cell, row, table.columns)] for row in table.rows]
    return {
        "headed": any(headings),
        "columns": [[column.heading, column.align] for column in table.columns],
        # Position of the column whose backends can be hidden.
        "backend": headings.index("backend") if "backend" in headings else None,
        "rows": [["–" if text == "-" else text for text in row] for row in rows],
        "legend": table.legend,
    }


def _list_backends(charts: Iterable[Chart]) -> set[str]:
    """Return the backends that readers can hide: the values of the charts' parameters."""
    parameters = [p for chart in charts for p in (chart.spec or {}).get("params", ())]
    return {name for p in parameters if p["name"] == "backends" for name in p["value"]}


def split_command(text: str) -> tuple[str, str]:
    """Split a next step into the words before its command, and the command; "" if it has none."""
    found = COMMAND.search(text)
    return (text[: found.start()], found.group()) if found else (text, "")


def keep_options(text: str) -> Any:
    """Return HTML of a text in which no line ends inside an option."""
    import markupsafe

    escaped = str(markupsafe.escape(text))
    return markupsafe.Markup(OPTION.sub(r'<span class="option">\g<0></span>', escaped))
