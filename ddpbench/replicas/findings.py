"""What a verification found, in words."""

from __future__ import annotations

from collections.abc import Iterator

from ddpbench.records.schema import Finding
from ddpbench.replicas.causes import Cause, Facts
from ddpbench.replicas.report import Detail, Difference, NonFinite, plural, ranks_text


def findings(
    facts: Facts, cause: Cause | None, rng_equal: bool, step: int | None
) -> tuple[Finding, ...]:
    """All of it, the worst first, the likely cause before what it explains."""
    found = [*_differences(facts, step), *_mismatches(facts, step), *_nonfinite(facts, step)]
    if not rng_equal:
        found.append(
            Finding(
                "note",
                "rng-differs",
                "the ranks' random number generators are in different states",
                "nothing, where dropout and augmentation are meant to differ by rank",
            )
        )
    order = ("error", "warning", "note")
    found.sort(key=lambda f: order.index(f.severity))
    if cause is None:
        return tuple(found)
    severity = next(f.severity for f in found if f.code in ("replicas-differ", "structure-differs"))
    sentence = f"likely cause: {cause.sentence}"
    first = Finding(severity, cause.code, sentence, cause.next_step, _place(step, cause=cause.code))
    return (first, *found)


def _place(step: int | None, **rest: object) -> dict[str, object]:
    return {**rest, **({} if step is None else {"step": step})}


def _severity(facts: Facts, kind: str) -> str:
    if kind != "buffer":
        return "error"
    return "note" if facts.rebroadcast else "warning"


def _differences(facts: Facts, step: int | None) -> Iterator[Finding]:
    """One a located tensor, and one for the rest of each kind."""
    rest: dict[str, list[Difference]] = {}
    for each in facts.differences:
        if not each.details:
            rest.setdefault(each.kind, []).append(each)
            continue
        yield Finding(
            _severity(facts, each.kind),
            "replicas-differ",
            f"{named(each)} {_who(each)}. " + ". ".join(_how(each, d) for d in each.details),
            "",
            _place(step, kind=each.kind, tensor=each.name, ranks=list(each.minority)),
        )
    for kind, those in rest.items():
        names = ", ".join(each.name for each in those[:4])
        more = ", …" if len(those) > 4 else ""
        yield Finding(
            _severity(facts, kind),
            "replicas-differ",
            f"{len(those)} {plural(kind, len(those))} differ, not compared in full: {names}{more}",
            "",
            _place(step, kind=kind, tensors=[each.name for each in those]),
        )


def named(each: Difference) -> str:
    """ "parameter fc.weight (float32 3x2)"."""
    shape = "x".join(map(str, each.shape))
    return f"{each.kind} {each.name} ({each.dtype}{' ' if shape else ''}{shape})"


def _who(each: Difference) -> str:
    if each.minority:
        return "differs"  # in the ranks that are told next
    sides = " | ".join(ranks_text(ranks) for ranks in each.values)
    return f"differs, no side being the larger ({sides})"


def _how(each: Difference, detail: Detail) -> str:
    where = f" at [{', '.join(map(str, detail.index))}]" if detail.index else ""
    text = ranks_text(detail.ranks)
    text = text[0].upper() + text[1:]
    if each.shape:
        text += f": {detail.differing} of {detail.elements} elements"
    if detail.differing > 1:
        text += ", first"
    text += f"{where}: {detail.value} against {detail.reference_value} in rank {detail.reference}"
    if detail.bit is not None:
        text += f", bit {detail.bit} alone"
    if detail.permuted:
        text += ", the same elements in another order"
    if detail.max_delta is not None:
        text += f", max |Δ| {detail.max_delta:.3g}"
    return text


_SHOWN = 8  # of a kind; the report has them all


def _mismatches(facts: Facts, step: int | None) -> Iterator[Finding]:
    """One each, up to a number of a kind, and one for the rest of it."""
    kinds = dict.fromkeys(each.kind for each in facts.mismatches)
    for kind in kinds:
        those = [each for each in facts.mismatches if each.kind == kind]
        for each in those[:_SHOWN]:
            forms = ", ".join(f"{form} in {ranks_text(ranks)}" for form, ranks in each.forms)
            sentence = f"{kind} {each.name}: {forms}"
            place = _place(step, kind=kind, tensor=each.name)
            yield Finding("error", "structure-differs", sentence, "", place)
        if those[_SHOWN:]:
            names = [each.name for each in those[_SHOWN:]]
            more = ", …" if len(names) > 4 else ""
            sentence = f"{kind}: not in all ranks alike are also {', '.join(names[:4])}{more}"
            yield Finding(
                "error", "structure-differs", sentence, "", _place(step, kind=kind, tensors=names)
            )


def _nonfinite(facts: Facts, step: int | None) -> Iterator[Finding]:
    for each in facts.nonfinite:
        yield _one_nonfinite(each, step)


def _one_nonfinite(each: NonFinite, step: int | None) -> Finding:
    # A mask of -inf is an honest buffer, and a scaler of losses makes and skips infinite gradients.
    severity = {"buffer": "note", "gradient": "warning"}.get(each.kind, "error")
    ranks = tuple(rank for rank, _ in each.counts)
    numbers = sorted({count for _, count in each.counts})
    count = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return Finding(
        severity,
        "non-finite",
        f"{each.kind} {each.name}: {count} elements NaN or infinite in {ranks_text(ranks)}",
        "look at the step before: the loss, the learning rate, the range of the dtype"
        if severity == "error"
        else "",
        _place(step, kind=each.kind, tensor=each.name, ranks=list(ranks)),
    )
