"""Writers: each shows any document. One entry of WRITERS adds a format of `--format`."""

from __future__ import annotations

import json
from collections.abc import Callable

from ddpbench.present.document import Document
from ddpbench.present.writers import csv, markdown, text


def write_json(document: Document) -> str:
    """Return the data as they are. Raises ValueError for numbers that JSON lacks."""
    return json.dumps(document.data, indent=1, allow_nan=False) + "\n"


WRITERS: dict[str, Callable[[Document], str]] = {
    "table": text.write,
    "csv": csv.write,
    "json": write_json,
    "markdown": markdown.write,
}
