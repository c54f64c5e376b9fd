"""What is known of a rank that may hang: its status, and its log of each group's collectives. No
torch."""

from __future__ import annotations

from dataclasses import dataclass

DIED, STOPPED, ALIVE = "has died", "is stopped (SIGSTOP)", "is alive but did not answer"
LEFT = "has left"  # its script has ended
# Of rank 0, where its store has gone: it has destroyed its process group, or its process is over.
ENDED, OVER = "has ended its process group", "has ended or died"

# What ranks may rightly call with different sizes.
UNEVEN = ("all_to_all", "alltoall")


@dataclass(frozen=True)
class Call:
    """A collective of a group, counted from 1 there; what: "float32[1024]"; place: the line that
    has called it, "f (data.py:22)"; both "" if not known."""

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
        """Whether two ranks can have called the same collective."""
        if self.name != other.name:
            return False
        uneven = self.name.startswith(UNEVEN) or not (self.what and other.what)
        return uneven or self.what == other.what


@dataclass(frozen=True)
class Log:
    """What one rank has recorded of one group.

    group: as a phrase, "" the default one, "of group 3"; members: its ranks, as the default group
    counts them; started, finished: numbers of the last collectives that it has called, that have
    ended; calls: the latest, in order, () in a heartbeat; exact: heartbeats count alike in all
    ranks; moves: how often the group was asked for anything, sends and receives too, -1: not known.
    """

    group: str
    members: tuple[int, ...]
    started: int
    finished: int
    calls: tuple[Call, ...] = ()
    exact: bool = True
    moves: int = -1


@dataclass(frozen=True)
class RankStatus:
    """What a rank says of itself.

    place: the innermost line of the program's own code in its main thread, "f (data.py:22)";
    inside: what of torch.distributed that line has called, "" nothing; source, destination: the
    rank of which it waits to receive, to which it waits to send, -1 none; phase: what ddpbench does
    there; cause: why this rank speaks first, where it does; late: because it has waited too long;
    still: because nothing has moved for long, which may be right; left: its script has ended;
    destroyed: it has ended its process groups; handles: the error that its main thread handles, as
    in a `finally`, and where that was raised; stack: of its main thread.
    """

    place: str
    inside: str = ""
    logs: tuple[Log, ...] = ()
    phase: str = ""
    cause: str = ""
    late: bool = False
    left: bool = False
    stack: str = ""
    source: int = -1
    destination: int = -1
    still: bool = False
    destroyed: bool = False
    handles: str = ""

    @property
    def waits_in(self) -> str:
        """ "all_reduce", "recv from rank 1", "" where it waits in nothing of torch.distributed."""
        if self.source >= 0:
            return f"recv from rank {self.source}"
        return f"send to rank {self.destination}" if self.destination >= 0 else self.inside


@dataclass(frozen=True)
class Silent:
    """A rank that gave no answer: its name "rank 3 (node2, pid 17)", what is seen of it, and its
    last heartbeat, if there was one."""

    rank: int
    name: str
    state: str
    seen: RankStatus | None = None


@dataclass(frozen=True)
class Hang:
    """A collective of a group that does not end: who waits in it, who has not called it."""

    group: str
    call: Call
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.call} {self.group}".rstrip()
