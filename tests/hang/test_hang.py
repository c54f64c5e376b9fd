"""The verdict on ranks that wait forever, from made-up statuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from frozen import Frozen

from ddpbench.hang.verdict import (
    ALIVE,
    DIED,
    ENDED,
    LEFT,
    STOPPED,
    Call,
    Log,
    RankStatus,
    SilentRank,
    describe_mismatches,
    explain_hang,
)

CUT_OFF = "did not answer (stopped, dead or cut off)"
REDUCE, BARRIER = ("all_reduce", "float32[1024]"), ("barrier", "")


def calls(*given: tuple[str, str]) -> tuple[Call, ...]:
    """Return calls, numbered from 1."""
    return tuple(Call(number, *each) for number, each in enumerate(given, 1))


def status(
    *made: tuple[str, str], ended: int | None = None, group: str = "",
    place: str = "train (t.py:9)", size: int = 4, line: str = "", **others: Any,
) -> RankStatus:  # fmt: skip
    """Return the status of a rank that has made these calls, of which so many have ended.

    ended: None for all; line: of the last call.
    """
    done, numbered = len(made) if ended is None else ended, calls(*made)
    numbered = (*numbered[:-1], *(replace(call, place=line) for call in numbered[-1:]))
    log = Log(group, tuple(range(size)), len(made), done, numbered)
    return RankStatus(place, logs=(log,), **others)


def change_log(status: RankStatus, **changes: Any) -> RankStatus:
    """Return a status with another log."""
    return replace(status, logs=(replace(status.logs[0], **changes),))


WAITS = status(*[REDUCE] * 4, ended=3, inside="all_reduce", late=True)
WAITS_YET = replace(WAITS, late=False)
LOADS = status(*[REDUCE] * 3, place="load_batch (data.py:22)")
SAVES = replace(LOADS, place="save (s.py:3)", inside="recv")
HEART = change_log(LOADS, calls=())  # a heartbeat has numbers only
ONE = SilentRank(1, "rank 1 (node1, pid 7)", STOPPED, HEART)
FAILED = replace(LOADS, cause="RuntimeError: closed by peer", phase="case 3")
BAD_BATCH = replace(LOADS, cause="ValueError: bad batch")
CLOSED = replace(WAITS_YET, cause="RuntimeError: Connection closed by peer")
LATE = RankStatus("f (x.py:7)", phase="start", cause="missed the deadline", late=True)
LONG = RankStatus("step (p.py:7)", "wait", cause="has waited longer than 4 s", late=True)
ALIVE_ONE, DEAD_ONE, LEFT_ONE = (replace(ONE, state=state) for state in (ALIVE, DIED, LEFT))
TIME_OUT = "RuntimeError: [x.cc:78] Timed out waiting 2000ms for recv operation to complete"
NOT_ENDED = "DistBackendError: all_reduce on rank 0 has not ended within 0:00:02"


def fail(cause: str) -> RankStatus:
    """Return the status of a rank that has failed in its fourth call."""
    return status(*[REDUCE] * 4, cause=cause)


def in_groups(place: str, **started: int) -> RankStatus:
    """Return the status of a rank that waits in the first call of each group it has called."""
    logs = tuple(
        Log(f"of group {name}", (0, 1), count, 0, calls(*[REDUCE] * count))
        for name, count in started.items()
    )
    return RankStatus(place, "all_reduce", logs, late=True)


def in_row(rank: int, started: int, **others: Any) -> RankStatus:
    """Return the status of a rank in a row of a mesh of two by two."""
    members = (rank // 2 * 2, rank // 2 * 2 + 1)
    log = Log(
        f"of group 'tp' (ranks {members[0]}, {members[1]})", members, started, 2, calls(REDUCE)
    )
    return RankStatus(f"f{rank} (x.py:1)", logs=(log,), **others)


def with_own_group(rank: int, made: tuple[str, str]) -> RankStatus:
    """Return the status of a rank that has also called in a group of its own."""
    own = Log(f"of group {rank + 1}", (rank,), 1, 1, calls(("all_reduce", f"int8[{rank}]")))
    return replace(status(made), logs=(*status(made).logs, own))


Situation = tuple[list[SilentRank], dict[int, RankStatus]]
SITUATIONS: dict[str, Situation] = {
    # ranks that have not joined
    "absent": ([], {0: WAITS, 1: LOADS, 2: WAITS, 3: WAITS}),
    "absent at one place": ([], {0: WAITS, 1: LOADS, 2: LOADS, 3: SAVES}),
    "two groups in different order": (
        [],
        {0: in_groups("f0 (x.py:1)", a=1, b=0), 1: in_groups("f1 (x.py:2)", a=0, b=1)},
    ),
    "rows of a mesh": (
        [
            replace(LEFT_ONE, seen=in_row(1, 2)),
            SilentRank(3, "rank 3", LEFT, in_row(3, 2)),
        ],
        {0: in_row(0, 2), 2: in_row(2, 3, inside="all_reduce", late=True)},
    ),
    "a missing message": (
        [],
        {0: replace(LONG, place="step (p.py:6)"), 1: RankStatus("forward (m.py:2)"), 2: LONG},
    ),
    "a call without a record": (
        [],
        {
            0: replace(LONG, place="train (t.py:9)", inside="all_reduce"),
            1: RankStatus("load (data.py:22)"),
        },
    ),
    "many ranks": (
        [],
        {
            **{rank: status(*[REDUCE] * 4, ended=3, size=64) for rank in range(64)},
            7: status(*[REDUCE] * 3),
        },
    ),
    "all have joined": ([], {0: WAITS, 1: WAITS}),
    # ranks that are silent
    "stopped before the call": ([ONE], {0: WAITS, 2: WAITS, 3: WAITS}),
    "stopped in the call": (
        [replace(ONE, seen=change_log(HEART, started=4))],
        {0: WAITS, 2: WAITS, 3: WAITS},
    ),
    "no heartbeat": (
        [replace(DEAD_ONE, seen=None), SilentRank(2, "rank 2 (node2, pid 102)", CUT_OFF)],
        {3: RankStatus("loop (l.py:7)", phase="case 3 of 9: all_reduce", late=True)},
    ),
    "a dead rank and an error that follows": ([DEAD_ONE], {0: FAILED, 2: WAITS}),
    "alive after the deadline": ([ALIVE_ONE], {0: WAITS}),
    "alive, and another has failed": ([ALIVE_ONE], {0: FAILED}),
    "alive, and another is dead": (
        [ALIVE_ONE, SilentRank(3, "rank 3 (h, pid 9)", DIED)],
        {0: FAILED},
    ),
    "left while others wait": ([LEFT_ONE], {0: WAITS}),
    "left, and connections are lost": ([LEFT_ONE], {0: FAILED}),
    "left, and another has failed": ([LEFT_ONE], {0: replace(BAD_BATCH, phase="case 3")}),
    "left early": (
        [replace(LEFT_ONE, seen=status(*[REDUCE] * 3, line="train (t.py:8)"))],
        {0: CLOSED, 2: CLOSED},
    ),
    # errors
    "an error": ([], {0: WAITS_YET, 1: BAD_BATCH, 2: WAITS_YET, 3: WAITS_YET}),
    "an error and those that follow": ([], {0: CLOSED, 1: BAD_BATCH, 2: CLOSED}),
    "gloo gives up": ([], {0: fail(TIME_OUT), 1: LOADS, 2: WAITS_YET}),
    "nccl gives up": ([], {0: fail(NOT_ENDED), 1: LOADS, 2: WAITS_YET}),
    "gloo gives up, and none is late": ([], {0: fail(TIME_OUT), 1: status(*[REDUCE] * 4)}),
    "equal statuses": ([], {2: LATE, 0: LATE, 1: replace(LATE, place="g (y.py:1)"), 3: LATE}),
    # calls that do not fit together
    **{
        f"another {what}": (
            [],
            {
                **dict.fromkeys((0, 2, 3), status(*[REDUCE] * 4)),
                1: status(*[REDUCE] * 3, call, ended=3),
            },
        )
        for what, call in (
            ("size", ("all_reduce", "float32[1025]")),
            ("operation without a size", BARRIER),
        )
    },
    "lines of both calls": (
        [],
        {
            0: status(*[REDUCE] * 4, ended=3, inside="all_reduce"),
            1: status(*[REDUCE] * 3, BARRIER, line="evaluate (eval.py:30)"),
        },
    ),
    "another size and the error that follows": (
        [],
        {
            0: status(*[REDUCE] * 4, place="f (x.py:1)", cause="RuntimeError: closed"),
            1: status(*[REDUCE] * 3, ("all_reduce", "float32[1]")),
            2: status(*[REDUCE] * 4),
        },
    ),
    "another size, and one has left": (
        [SilentRank(0, "rank 0 (h, pid 1)", LEFT, status(REDUCE))],
        {1: status(("all_reduce", "float32[3]"), cause="RuntimeError: closed")},
    ),
    "three sizes in a group": (
        [],
        {
            rank: status(("all_reduce", f"int8[{size}]"), group="of group 2")
            for rank, size in enumerate((4, 5, 4, 6))
        },
    ),
    "groups of one rank each": (
        [],
        {0: with_own_group(0, REDUCE), 1: with_own_group(1, BARRIER)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_verdict(frozen: Frozen, name: str) -> None:
    """The verdict names the rank that causes the hang, the collective, the line and who waits."""
    frozen.verdict(explain_hang(*SITUATIONS[name]))


WITHOUT_STORE: dict[str, Situation] = {
    "one is stopped": ([ONE, SilentRank(0, "rank 0 (h, pid 3)", ALIVE)], {2: WAITS}),
    "no rank can be seen": (
        [SilentRank(rank, f"rank {rank} (h{rank}, pid 1)", CUT_OFF) for rank in (0, 2)],
        {1: WAITS},
    ),
    "rank 0 has ended it": (
        [replace(ONE, rank=0, state=ENDED), SilentRank(2, "rank 2 (h, pid 3)", DIED)],
        {1: CLOSED},
    ),
}


@pytest.mark.parametrize("name", WITHOUT_STORE)
def test_verdict_without_the_store(frozen: Frozen, name: str) -> None:
    """A rank that is visibly gone is blamed, else rank 0, which usually has the store. Living ranks
    cannot answer, and the sentence says that it is one rank's view."""
    frozen.verdict(explain_hang(*WITHOUT_STORE[name], store_answers=False))


def test_calls_that_agree_are_no_mismatch() -> None:
    """all_to_all may deal differently, an unknown size agrees with every one, and a rank far ahead
    is compared where both have called."""
    for one, other in (
        (("all_to_all", "float32[3]"), ("all_to_all", "float32[5]")),
        (REDUCE, ("all_reduce", "")),
    ):
        assert describe_mismatches({0: status(one), 1: status(other)}) == []
    ahead = status(*[REDUCE, BARRIER] * 30)
    ahead = change_log(ahead, calls=ahead.logs[0].calls[30:])
    assert describe_mismatches({0: status(*[REDUCE, BARRIER] * 20), 1: ahead}) == []
