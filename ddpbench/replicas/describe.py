"""Sentences on differences: which tensors differ, between which ranks, and in which elements."""

from __future__ import annotations

import torch

from ddpbench.records.wording import list_all
from ddpbench.replicas.places import Places
from ddpbench.replicas.report import Detail, Difference, count_kind, ranks_text

SHOWN = 8  # ranks or sets of ranks in a sentence; the report has them all


def describe_fold(
    fold: list[Difference],
    example: Difference,
    totals: dict[str, int],
    *,
    places: Places,
    step: int | None,
    same_sides: bool,
) -> str:
    """Describe tensors that differ between the same ranks; else `same_sides` is False.

    totals: number of compared tensors of each kind.
    """
    details = ". ".join(_describe_detail(example, d) for d in example.details[:SHOWN])
    if len(fold) == 1:
        text = _describe_sides(_name_tensor(example), example, places)
        return text + (f". {details}" if details else "")
    names: dict[str, set[str]] = {}  # a tensor may differ in several ways, one for each shard
    for difference in fold:
        names.setdefault(difference.kind, set()).add(difference.name)
    parts = [f"{len(each)} of {count_kind(kind, totals[kind])}" for kind, each in names.items()]
    tensors = list_all(parts)
    sides = f"{tensors} differ between other ranks"
    if same_sides and example.minority and not places.known:
        sides = f"{tensors} differ in {ranks_text(example.minority)}"
    elif same_sides:
        sides = _describe_sides(tensors, example, places, verb="differ")
    # Buffers that DDP sends again differ after each step, and are reported each time.
    dated = step is not None and example.kind != "buffer"
    when = f", first seen in step {step}" if dated else ""
    more = sum(map(len, names.values())) - 1
    text = f"{sides}{when}: {example.name}" + (f" and {more} more" if more else "")
    return text + (f". For example {_name_tensor(example)}: {details}" if details else "")


def describe_tensor(difference: Difference) -> str:
    """Return kind, name, dtype and shape: "parameter fc.weight (float32 3x2)"."""
    shape = "x".join(map(str, difference.shape))
    form = f"{difference.dtype}{' ' if shape else ''}{shape}"
    return f"{difference.kind} {difference.name} ({form})"


def _name_tensor(difference: Difference) -> str:
    shard = f", {difference.shard}" if difference.shard else ""
    return f"{describe_tensor(difference)}{shard}"


def _describe_sides(
    subject: str, difference: Difference, places: Places, verb: str = "differs"
) -> str:
    """Name the ranks that differ: "dp_replicate=1: parameter w differs from dp_replicate=0"."""
    first, *rest = difference.values
    comma = "," if difference.shard and verb == "differs" else ""
    if places.known and len(rest) == 1:
        reference = places.contrast(first, rest[0])
        return f"{places.name(rest[0])}: {subject}{comma} {verb} from {reference}"
    if not places.known and difference.minority and difference.details:
        return f"{subject} {verb}"  # the details name the ranks
    sides = [places.name(ranks) for ranks in difference.values]
    *others, last = sides if len(sides) <= SHOWN else [*sides[:SHOWN], "others"]
    return f"{subject}{comma} {verb} between {', '.join(others)} and {last}"


def _describe_detail(difference: Difference, detail: Detail) -> str:
    where = f" at [{', '.join(map(str, detail.index))}]" if detail.index else ""
    text = ranks_text(detail.ranks)
    text = text[0].upper() + text[1:]
    if difference.shape:
        text += f": {detail.differing} of {detail.elements} elements"
        text += " of the shard" if difference.shard else ""
    if detail.differing > 1:
        text += ", first"
    text += f"{where}: {detail.value} against {detail.reference_value} in rank {detail.reference}"
    if detail.bit is not None:
        text += f", bit {detail.bit}{name_part(difference.dtype, detail.bit)} alone"
    if detail.permuted:
        text += ", the same elements in another order"
    if detail.max_delta is not None:
        text += f", max |Δ| {detail.max_delta:.3g}"
    return text


def name_part(dtype: str, bit: int) -> str:
    """Return the part of a floating-point number that a bit belongs to; "" for other dtypes."""
    if "float" not in dtype and "complex" not in dtype:
        return ""
    form = torch.finfo(getattr(torch, dtype))
    bit %= form.bits  # of a complex number's real or imaginary part
    if bit == form.bits - 1:
        return " (the sign)"
    return " (of the fraction)" if 2.0**bit * form.eps < 1 else " (of the exponent)"
