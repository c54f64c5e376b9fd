"""Format parts of the sentences about a hang: ranks, lines of code, waits. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ddpbench.hang.status import Hang, RankStatus, find_call
from ddpbench.records.wording import spans


def format_lines(lines: Iterable[str]) -> str:
    """Return " at f (x.py:3)"; of more than two lines only the first."""
    known = sorted({line for line in lines if line})
    if not known:
        return ""
    return f" at {' and '.join(known) if len(known) < 3 else f'{known[0]} and elsewhere'}"


def format_place(status: RankStatus, group: str) -> str:
    """Return the place of a rank that is not in this group's collective."""
    for log in status.logs:
        if log.started > log.finished and log.group != group:
            call = f"{find_call(log.finished + 1, [log])} {log.group}".rstrip()
            return f"{call}, called from {status.place}"
    return f"{status.waits_in}, called from {status.place}" if status.waits_in else status.place


def format_places(statuses: Mapping[int, RankStatus], hangs: Sequence[Hang]) -> str:
    """Return the causes and places of all ranks, equal ones together."""
    alike: dict[str, list[int]] = {}
    for rank, status in sorted(statuses.items()):
        text = (
            f"{status.cause}, at {status.place}"
            if status.cause
            else f"in {format_place(status, '-')}"
        )
        text += f", in {status.waits_in}" if status.cause and status.waits_in else ""
        before = [hang for hang in hangs if rank in hang.absent]
        text += f", before {before[0]}" if before else ""
        text += f" (in {status.phase})" if status.phase else ""
        alike.setdefault(text, []).append(rank)
    return "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in alike.items())


def format_waiting(
    ranks: Iterable[int], statuses: Mapping[int, RankStatus], ended: bool = False
) -> str:
    """Return "; ranks 0, 2 wait", or "waited for it" when their wait has ended."""
    waiting = sorted(ranks)
    if not waiting:
        return ""
    verb = "waited for it" if ended else "waits" if len(waiting) == 1 else "wait"
    return f"; {format_ranks(waiting)} {verb}{format_phase(waiting, statuses)}"


def format_phase(ranks: Sequence[int], statuses: Mapping[int, RankStatus]) -> str:
    """Return " in PHASE", the step of a command in which the first of these ranks is."""
    phase = statuses[min(ranks)].phase
    return f" in {phase}" if phase else ""


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2, 3"; more than six as "ranks 0–6, 8"."""
    if len(ranks) <= 6:
        return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
    return f"ranks {spans(ranks).replace('-', '–')}"
