"""The status of a rank that may hang, its log of each group's collectives, and those that hang.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

DIED, STOPPED, ALIVE = "has died", "is stopped (SIGSTOP)", "is alive but did not answer"
LEFT = "has left"  # its script has ended
ENDED = "has ended its process group or died"  # rank 0, if it has closed the store

# Ranks may call these with different sizes.
UNEVEN = ("all_to_all", "alltoall")


@dataclass(frozen=True)
class Call:
    """A collective of a group.

    number: counted from 1 in its group; what: "float32[1024]"; place: the line that called it,
    "f (data.py:22)". The last two are "" if unknown.
    """

    number: int
    name: str
    what: str = ""
    place: str = ""

    def __str__(self) -> str:
        return f"#{self.number} {self.text}"

    @property
    def text(self) -> str:
        """Without its number: "all_reduce float32[1024]"."""
        return f"{self.name} {self.what}".rstrip()

    def agrees(self, other: Call) -> bool:
        """Return whether two ranks can have called the same collective."""
        if self.name != other.name:
            return False
        uneven = self.name.startswith(UNEVEN) or not (self.what and other.what)
        return uneven or self.what == other.what


@dataclass(frozen=True)
class Log:
    """One rank's record of one group.

    group: a phrase, "of group 3", "" for the default group; members: global ranks; started,
    finished: numbers of the last collectives that the rank called, and that ended (in a heartbeat,
    a lower bound); calls: the latest, in order, () in a heartbeat; exact: whether all ranks count
    in the same way; moves: a number that changes with the requests to the group, -1 if unknown.
    """

    group: str
    members: tuple[int, ...]
    started: int
    finished: int
    calls: tuple[Call, ...] = ()
    exact: bool = True
    moves: int = -1

    @property
    def is_open(self) -> bool:
        """Return whether a collective that the rank called has not ended."""
        return self.started > self.finished


@dataclass(frozen=True)
class RankStatus:
    """The state that a rank reports.

    place: the innermost line of the program's own code in the main thread, "f (data.py:22)";
    inside: the function of torch.distributed that this line called, "": none; phase: the step of a
    ddpbench command; cause: why this rank raises the alarm, "": it does not; late: it has waited
    too long; handles: the error that its main thread handles, as in a `finally`, and its line;
    stack: of the main thread.
    """

    place: str
    inside: str = ""
    logs: tuple[Log, ...] = ()
    phase: str = ""
    cause: str = ""
    late: bool = False
    stack: str = ""
    handles: str = ""


@dataclass(frozen=True)
class SilentRank:
    """A rank that did not answer.

    name: "rank 3 (node2, pid 17)"; state: a constant of this module, or another phrase with a verb;
    seen: its last heartbeat, if there was one.
    """

    rank: int
    name: str
    state: str
    seen: RankStatus | None = None


@dataclass(frozen=True)
class Hang:
    """A collective that does not end: the ranks in it, and those that have not called it."""

    group: str
    call: Call
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.call} {self.group}".rstrip()


def find_hangs(statuses: Mapping[int, RankStatus]) -> list[Hang]:
    """Return each group's first collective that some ranks have called and that has not ended."""
    hangs = []
    for group, logs in group_logs(statuses).items():
        waiting = {rank: log.finished + 1 for rank, log in logs.items() if log.is_open}
        if not waiting:
            continue
        number = min(waiting.values())
        members = {rank for log in logs.values() for rank in log.members} & set(statuses)
        absent = [rank for rank in members if rank not in logs or logs[rank].started < number]
        call = find_call(number, [logs[rank] for rank in waiting])
        exact = all(log.exact for log in logs.values())
        hangs.append(Hang(group, call, tuple(sorted(waiting)), tuple(sorted(absent)), exact))
    return hangs


def group_logs(statuses: Mapping[int, RankStatus]) -> dict[str, dict[int, Log]]:
    """Return the logs by group and rank."""
    groups: dict[str, dict[int, Log]] = {}
    for rank, status in sorted(statuses.items()):
        for log in status.logs:
            groups.setdefault(log.group, {})[rank] = log
    return groups


def find_call(number: int, logs: Iterable[Log]) -> Call:
    """Return the call with this number, with the details that the logs contain."""
    calls = [call for log in logs for call in log.calls if call.number == number]
    return calls[0] if calls else Call(number, "collective")
