"""Writers: each shows any document. One entry of WRITERS adds a format of `--format`."""

from __future__ import annotations

from collections.abc import Callable

from ddpbench.present.document import Document
from ddpbench.present.writers import csv, json, markdown, text

WRITERS: dict[str, Callable[[Document], str]] = {
    "table": text.write,
    "csv": csv.write,
    "json": json.write,
    "markdown": markdown.write,
}
