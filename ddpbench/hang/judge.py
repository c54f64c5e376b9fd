"""Judge all ranks from one rank: collect their statuses, find silent and waiting ranks, explain."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from ddpbench.hang import verdict
from ddpbench.hang.places import find_main_frame, walk_outwards
from ddpbench.hang.status import ALIVE, DIED, ENDED, OVER, STOPPED, RankStatus, SilentRank
from ddpbench.hang.status_board import Board

Key = tuple[Hashable, ...]  # of a wait: it stays equal as long as nothing happens


@dataclass(frozen=True)
class Judgement:
    """The result of one rank's examination of all ranks.

    sentence: "" if there is nothing to print yet; heard: the ranks that answered; stacks: of these
    ranks; failed: those of them with an error, which another rank may have caused; interrupted:
    whether no rank has a cause of its own; store_answers: whether the other ranks can read this;
    notice: ranks only do not move, so the job continues; waiting: whether a rank that answered
    waits in torch.distributed.
    """

    sentence: str
    heard: tuple[int, ...]
    failed: tuple[int, ...]
    silent: tuple[SilentRank, ...]
    stacks: str
    interrupted: bool
    store_answers: bool
    notice: bool
    waiting: bool

    @property
    def stopped(self) -> list[int]:
        """The ranks that are stopped."""
        return [rank.rank for rank in self.silent if rank.state == STOPPED]


def judge(
    board: Board, topic: str, status: RankStatus, seconds: float, *, rank_0_may_end: bool = False
) -> Judgement:
    """Collect the statuses of all ranks under a topic, for some seconds, and explain them.

    rank_0_may_end: if the store has gone, its process may have ended normally.
    """
    statuses, store_answers = board.collect_statuses(topic, status, seconds)
    silent = board.find_silent(statuses, store_answers)
    if rank_0_may_end and board.client.gone and silent and silent[0].rank == 0:
        state = {ALIVE: ENDED, DIED: OVER}.get(silent[0].state, silent[0].state)
        silent[0] = replace(silent[0], state=state)
    return Judgement(
        sentence=verdict.explain_hang(silent, statuses, store_answers),
        heard=tuple(statuses),
        failed=tuple(r for r, s in statuses.items() if s.cause and not (s.late or s.still)),
        silent=tuple(replace(rank, seen=None) for rank in silent),
        stacks="".join(f"rank {rank}:\n{s.stack}" for rank, s in sorted(statuses.items())),
        interrupted=verdict.is_interrupted(statuses),
        store_answers=store_answers,
        notice=verdict.is_notice(statuses),
        waiting=any(find_waits(status) for status in statuses.values()),
    )


def find_waits(status: RankStatus) -> list[Key]:
    """Return a key for each wait of a rank: pairs for open collectives."""
    waits: list[Key] = [
        (log.group, log.started) for log in status.logs if log.started > log.finished
    ]
    moves = [log.moves for log in status.logs]
    # A receive in a loop looks alike, but moves, or is another call.
    if status.inside and (status.call >= 0 or min(moves, default=-1) >= 0):
        waits.append((status.inside, status.place, status.call, *_counts(status)))
    return waits


def progress_key(status: RankStatus) -> Key:
    """Return a key that changes when the rank calls something of torch.distributed; where no calls
    are counted, when its main thread moves."""
    counts = _counts(status)
    if any(n > 0 for n in counts):
        return ("progress", status.call, *counts)
    outwards = walk_outwards(find_main_frame())
    return ("progress", status.place, *((id(outer.f_code), outer.f_lasti) for outer in outwards))


def _counts(status: RankStatus) -> list[int]:
    return [n for log in status.logs for n in (log.started, log.finished, log.moves)]
