"""Find ranks that wait for each other in a circle, and messages that do not come. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddpbench.hang.phrases import format_lines, format_places, format_ranks, format_waiting
from ddpbench.hang.status import Hang, RankStatus


@dataclass(frozen=True)
class Wait:
    """The operation in which a rank waits, and for which ranks; message: a receive or a send."""

    what: str
    ranks: tuple[int, ...]
    message: bool


def _find_waits(hangs: Sequence[Hang], statuses: Mapping[int, RankStatus]) -> dict[int, Wait]:
    waits: dict[int, Wait] = {}
    for rank, status in statuses.items():
        if (other := max(status.source, status.destination)) >= 0:
            waits[rank] = Wait(status.waits_in.partition(" ")[0], (other,), True)
            continue
        own = [h for h in hangs if rank in h.waiting and h.absent and status.inside]
        if len(own) > 1:  # others may have been called with async_op: where is it now?
            calls = {(log.group, c.number): c.place for log in status.logs for c in log.calls}
            own = [h for h in own if calls.get((h.group, h.call.number)) == status.place]
        if own:
            waits[rank] = Wait(str(own[0]), own[0].absent, False)
    return waits


def describe_deadlock(hangs: Sequence[Hang], statuses: Mapping[int, RankStatus]) -> str:
    """Return a sentence on ranks that wait for each other in a circle, "" none."""
    waits = _find_waits(hangs, statuses)
    circle = next((c for rank in sorted(waits) if (c := _circle(rank, waits))), [])
    if not circle:
        return ""
    kinds = {waits[rank].what for rank in circle}
    others = format_waiting([r for r in waits if r not in circle], statuses)
    at = format_lines(statuses[rank].place for rank in circle)
    if all(waits[rank].message for rank in circle) and len(kinds) == 1:
        word = "to" if kinds == {"send"} else "from"
        pairs = ", ".join(f"{rank} {word} {waits[rank].ranks[0]}" for rank in sorted(circle))
        sentence = f"{format_ranks(sorted(circle))} wait in {kinds.pop()}{at} in a ring: {pairs}"
    else:
        parts = []
        for rank, following in zip(circle, [*circle[1:], circle[0]], strict=True):
            where = f"{waits[rank].what}{format_lines([statuses[rank].place])}"
            parts.append(f"rank {rank} waits in {where} for rank {following}")
        sentence = f"{'; '.join(parts)}: a deadlock"
    return sentence + others


def _circle(start: int, waits: Mapping[int, Wait]) -> list[int]:
    paths, seen = [[start]], {start}
    for path in paths:
        for rank in waits[path[-1]].ranks:
            if rank == start:
                return path
            if rank in waits and rank not in seen:
                seen.add(rank)
                paths.append([*path, rank])
    return []


def describe_messages(statuses: Mapping[int, RankStatus]) -> list[str]:
    """Return where the ranks are whose messages others await, then who waits."""
    waits = _find_waits((), statuses)
    awaited = {rank for wait in waits.values() for rank in wait.ranks}
    first = {rank: statuses[rank] for rank in awaited - set(waits) if rank in statuses}
    alike: dict[str, list[int]] = {}
    for rank in waits:
        alike.setdefault(
            f"{statuses[rank].waits_in}{format_lines([statuses[rank].place])}", []
        ).append(rank)
    if not first:
        return []
    waiting = [
        f"{format_ranks(r)} wait{'s' if len(r) == 1 else ''} in {what}" for what, r in alike.items()
    ]
    return [format_places({r: replace(s, cause="") for r, s in first.items()}, ()), *waiting]
