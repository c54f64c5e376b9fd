"""Short titles of cases: what tells them apart."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

from ddpbench.records.schema import Case
from ddpbench.render.column import format_ranks, format_subgroups

Kind = tuple[str, ...]


def kind(case: Case) -> Kind:
    """Return what the cases of one chart have in common, the operation first."""
    return (
        case.operation,
        "" if case.form == "tensor" else "list of tensors",
        case.dtype if case.nbytes else "",
        case.reduce_op or "",
        "" if case.root is None else f"root {case.root}",
        ("in place" if case.in_place else "out of place") if case.nbytes else "",
        "async" if case.async_op else "",
        format_ranks(case),
        format_subgroups(case),
        case.device,
    )


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
