"""What a rank waits in, and whether it moves: keys that stay equal as long as nothing happens."""

from __future__ import annotations

from collections.abc import Hashable

from ddpbench.hang.places import find_main_frame, stack_position
from ddpbench.hang.status import RankStatus

Key = tuple[Hashable, ...]


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
    return ("progress", status.place, *stack_position(find_main_frame()))


def _counts(status: RankStatus) -> list[int]:
    return [n for log in status.logs for n in (log.started, log.finished, log.moves)]
