"""Ranks that wait for each other's collectives or messages in a circle. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddpbench.hang.phrases import at_lines, each_place, name_ranks, who_waits
from ddpbench.hang.status import Hang, RankStatus


@dataclass(frozen=True)
class Wait:
    """What a rank waits in, and for which others; message: a receive or a send, no collective."""

    what: str
    ranks: tuple[int, ...]
    message: bool


def _waiting(found: Sequence[Hang], words: Mapping[int, RankStatus]) -> dict[int, Wait]:
    """Of each rank whose main thread waits for others that are known."""
    waits: dict[int, Wait] = {}
    for rank, each in words.items():
        if (other := max(each.source, each.destination)) >= 0:
            waits[rank] = Wait(each.waits_in.partition(" ")[0], (other,), True)
            continue
        mine = [hang for hang in found if rank in hang.waiting and hang.absent and each.inside]
        if len(mine) > 1:  # others may have been called with async_op: where is it now?
            calls = {(log.group, c.number): c.place for log in each.logs for c in log.calls}
            mine = [h for h in mine if calls.get((h.group, h.call.number)) == each.place]
        if mine:
            waits[rank] = Wait(str(mine[0]), mine[0].absent, False)
    return waits


def deadlock(found: Sequence[Hang], words: Mapping[int, RankStatus]) -> str:
    """Ranks that wait for each other in a circle, "" none."""
    waits = _waiting(found, words)
    circle = next((c for rank in sorted(waits) if (c := _circle(rank, waits))), [])
    if not circle:
        return ""
    kinds = {waits[rank].what for rank in circle}
    others = who_waits([rank for rank in words if rank not in circle and rank in waits], words)
    at = at_lines(words[rank].place for rank in circle)
    if all(waits[rank].message for rank in circle) and len(kinds) == 1:
        word = "to" if kinds == {"send"} else "from"
        pairs = ", ".join(f"{rank} {word} {waits[rank].ranks[0]}" for rank in sorted(circle))
        told = f"{name_ranks(sorted(circle))} wait in {kinds.pop()}{at} in a ring: {pairs}"
    else:
        parts = []
        for rank, following in zip(circle, [*circle[1:], circle[0]], strict=True):
            where = f"{waits[rank].what}{at_lines([words[rank].place])}"
            parts.append(f"rank {rank} waits in {where} for rank {following}")
        told = f"{'; '.join(parts)}: a deadlock"
    return told + others


def _circle(start: int, waits: Mapping[int, Wait]) -> list[int]:
    """The shortest way from a rank over those for which it waits back to itself, [] none."""
    paths, seen = [[start]], {start}
    for path in paths:
        for rank in waits[path[-1]].ranks:
            if rank == start:
                return path
            if rank in waits and rank not in seen:
                seen.add(rank)
                paths.append([*path, rank])
    return []


def messages(words: Mapping[int, RankStatus]) -> list[str]:
    """Where those are for whose messages others wait, then who waits."""
    waits = _waiting((), words)
    awaited = {rank for wait in waits.values() for rank in wait.ranks}
    first = {rank: words[rank] for rank in awaited - set(waits) if rank in words}
    alike: dict[str, list[int]] = {}
    for rank in waits:
        alike.setdefault(f"{words[rank].waits_in}{at_lines([words[rank].place])}", []).append(rank)
    told = [
        f"{name_ranks(r)} wait{'s' if len(r) == 1 else ''} in {what}" for what, r in alike.items()
    ]
    return (
        [each_place({r: replace(w, cause="") for r, w in first.items()}, ()), *told]
        if first
        else []
    )
