"""Short titles of kinds of cases: what tells them apart."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

Kind = tuple[str, ...]  # render.column.title_parts


def describe(of: Kind) -> str:
    """Return all parts but the operation: "float32, sum, in place, 2 ranks, cpu"."""
    return ", ".join(filter(None, of[1:]))


def titles(kinds: Iterable[Kind]) -> dict[Kind, str]:
    """Return a title for each: the operation, and the parts of which an operation has several."""
    distinct = list(dict.fromkeys(kinds))
    differs = []
    for part in zip(*distinct, strict=True):
        values = {(of[0], text) for of, text in zip(distinct, part, strict=True)}
        differs.append(len(values) > len({operation for operation, _ in values}))
    return {
        of: " ".join([of[0], *(text for text in compress(of, differs) if text)]) for of in distinct
    }
