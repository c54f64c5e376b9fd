"""The data of a document as JSON."""

from __future__ import annotations

import json

from ddpbench.present.document import Document


def write(document: Document) -> str:
    """Return the data as they are. Raises ValueError for numbers that JSON lacks."""
    return json.dumps(document.data, indent=1, allow_nan=False) + "\n"
