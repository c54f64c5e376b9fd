"""The judgement of one rank on all: collect their statuses, find the silent ranks, explain."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddpbench.hang import verdict
from ddpbench.hang.progress import find_waits
from ddpbench.hang.status import ALIVE, DIED, ENDED, OVER, STOPPED, RankStatus, SilentRank
from ddpbench.hang.status_board import Board


@dataclass(frozen=True)
class Judgement:
    """What one rank has found out about all.

    sentence: "" nothing to print yet; heard: the ranks that answered; stacks: of these ranks;
    failed: of these, with an error, which may follow from another rank's; interrupted: whether no
    rank has a cause of its own; store_answers: whether the others can read this; notice: ranks only
    stand still, so the job goes on; waiting: a rank that answered waits in
    torch.distributed.
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

    rank_0_may_end: if the store has gone, its process may have ended rightly.
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
