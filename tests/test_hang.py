"""The verdict on ranks that wait for ever, from made-up last words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpbench.analysis import hang
from ddpbench.analysis.hang import (
    ALIVE,
    DIED,
    LEFT,
    STOPPED,
    Call,
    Log,
    Silent,
    Words,
    verdict,
)

CUT_OFF = "did not answer (stopped, dead or cut off)"
REDUCE = ("all_reduce", "float32[1024]")
STEP = [REDUCE, ("broadcast", "int64[1]"), ("all_reduce", "float32[8]")]


def calls(*given: tuple[str, str]) -> tuple[Call, ...]:
    """Numbered from 1 on."""
    return tuple(Call(number, *each) for number, each in enumerate(given, 1))


def words(
    *made: tuple[str, str], ended: int | None = None, group: str = "",
    place: str = "train (t.py:9)", size: int = 4, **others: object,
) -> Words:  # fmt: skip
    """Of a rank that has made these calls, of which so many have ended; None: all."""
    done = len(made) if ended is None else ended
    log = Log(group, tuple(range(size)), len(made), done, calls(*made))
    return replace(Words(place, logs=(log,)), **others)  # type: ignore[arg-type]


WAITS = words(*[REDUCE] * 4, ended=3, inside="all_reduce", late=True)
LOADS = words(*[REDUCE] * 3, place="load_batch (data.py:22)")
HEART = replace(LOADS, logs=(replace(LOADS.logs[0], calls=()),))  # a heartbeat has numbers only
ONE = Silent(1, "rank 1 (node1, pid 7)", STOPPED, HEART)


def test_a_rank_that_has_not_joined_is_named_with_its_place() -> None:
    """Which rank, which collective, where it is instead, and who waits."""
    assert verdict([], {0: WAITS, 1: LOADS, 2: WAITS, 3: WAITS}) == (
        "rank 1 never joined #4 all_reduce float32[1024]; it is in load_batch (data.py:22); "
        "ranks 0, 2, 3 wait"
    )


def test_ranks_at_one_place_are_told_together() -> None:
    """Two absent ranks at one line are one sentence, one elsewhere another."""
    saves = replace(LOADS, place="save (s.py:3)", inside="recv")
    assert verdict([], {0: WAITS, 1: LOADS, 2: LOADS, 3: saves}) == (
        "ranks 1, 2 never joined #4 all_reduce float32[1024]; they are in load_batch "
        "(data.py:22); "
        "rank 3 never joined #4 all_reduce float32[1024]; it is in recv, called from save "
        "(s.py:3); rank 0 waits"
    )


def test_two_groups_in_different_order_are_told_as_what_they_are() -> None:
    """Rank 0 waits in one group and rank 1 in another: each is said to have never joined the
    other's collective, and where it is instead."""

    def both(first: bool) -> Words:
        logs = tuple(
            Log(group, (0, 1), int(mine), 0, calls(REDUCE) if mine else ())
            for group, mine in (("of group 1", first), ("of group 2", not first))
        )
        return Words(f"f{int(first)} (x.py:1)", "all_reduce", logs, late=True)

    assert verdict([], {0: both(True), 1: both(False)}) == (
        "rank 1 never joined #1 all_reduce float32[1024] of group 1; it is in "
        "#1 all_reduce float32[1024] of group 2, called from f0 (x.py:1); rank 0 waits; "
        "rank 0 never joined #1 all_reduce float32[1024] of group 2; it is in "
        "#1 all_reduce float32[1024] of group 1, called from f1 (x.py:1); rank 1 waits"
    )


@pytest.mark.parametrize(("started", "where"), [(3, "before #4"), (4, "in #4")])
def test_a_stopped_rank_is_named_with_where_it_was_last_seen(started: int, where: str) -> None:
    """Its last heartbeat says in which line it was, and whether it had joined."""
    seen = replace(HEART, logs=(replace(HEART.logs[0], started=started),))
    assert verdict([replace(ONE, seen=seen)], {0: WAITS, 2: WAITS, 3: WAITS}) == (
        "rank 1 (node1, pid 7) is stopped (SIGSTOP), last seen in load_batch (data.py:22), "
        f"{where} all_reduce float32[1024]; ranks 0, 2, 3 wait"
    )


def test_numbers_that_ranks_count_differently_are_not_compared() -> None:
    """Where sends and receives are counted too, a heartbeat's number says nothing of others'."""
    waits = replace(WAITS, logs=(replace(WAITS.logs[0], exact=False),))
    said = verdict([ONE], {0: waits, 2: waits})
    assert said.endswith("last seen in load_batch (data.py:22); ranks 0, 2 wait")


def test_without_a_heartbeat_a_silent_rank_is_named_all_the_same() -> None:
    """Each silent rank with its state, and in what ddpbench's ranks wait."""
    late = Words("loop (l.py:7)", phase="case 3 of 9: all_reduce", late=True)
    two = Silent(2, "rank 2 (node2, pid 102)", CUT_OFF)
    assert verdict([replace(ONE, seen=None, state=DIED), two], {3: late}) == (
        "rank 1 (node1, pid 7) has died; rank 2 (node2, pid 102) did not answer (stopped, dead "
        "or cut off); rank 3 waits in case 3 of 9: all_reduce"
    )


FAILED = replace(LOADS, cause="RuntimeError: closed by peer", phase="case 3")


def test_a_dead_rank_is_blamed_whatever_the_others_say() -> None:
    """The others' errors are consequences: only the rank that died is named as the cause."""
    sentence = verdict([replace(ONE, state=DIED)], {0: FAILED, 2: WAITS})
    assert sentence.startswith("rank 1 (node1, pid 7) has died, last seen in load_batch ")
    assert "RuntimeError" not in sentence


def test_a_silent_rank_that_lives_is_blamed_only_once_a_deadline_is_over() -> None:
    """After a missed deadline it should have spoken; after an error elsewhere it may not yet have
    noticed, and the rank that failed is the one to name."""
    alive = replace(ONE, state=ALIVE)
    assert verdict([alive], {0: WAITS}).startswith("rank 1 (node1, pid 7) is alive but did not ")
    assert verdict([alive], {0: FAILED}) == (
        "rank 0: RuntimeError: closed by peer, at load_batch (data.py:22) (in case 3)"
    )
    both = verdict([alive, Silent(3, "rank 3 (h, pid 9)", DIED)], {0: FAILED})
    assert both.startswith("rank 3 (h, pid 9) has died; rank 0 waits")


def test_an_error_is_told_with_who_waits_for_that_rank() -> None:
    """The rank that failed, where, before which collective; the others wait in it."""
    failed = replace(LOADS, cause="ValueError: bad batch")
    waits = replace(WAITS, late=False)
    assert verdict([], {0: waits, 1: failed, 2: waits, 3: waits}) == (
        "rank 1: ValueError: bad batch, at load_batch (data.py:22), before "
        "#4 all_reduce float32[1024]; ranks 0, 2, 3 wait"
    )


def test_a_rank_that_has_left_is_blamed_where_nothing_else_is_wrong() -> None:
    """Its script has ended while others wait; but not where one of those has failed."""
    left = replace(ONE, state=LEFT)
    assert verdict([left], {0: WAITS}).startswith("rank 1 (node1, pid 7) has left, last seen in ")
    assert verdict([left], {0: FAILED}).startswith("rank 0: RuntimeError: closed by peer")


def test_ranks_that_say_the_same_are_told_together() -> None:
    """Without a collective to blame, every rank's place is told, equal ones once, in order."""
    late = Words("f (x.py:7)", phase="start", cause="missed the deadline", late=True)
    other = replace(late, place="g (y.py:1)")
    assert verdict([], {2: late, 0: late, 1: other, 3: late}) == (
        "ranks 0, 2, 3: missed the deadline, at f (x.py:7) (in start); "
        "rank 1: missed the deadline, at g (y.py:1) (in start)"
    )


def test_a_collective_that_all_have_joined_accuses_the_backend() -> None:
    """All are in it, with the same call, and it does not end."""
    assert verdict([], {0: WAITS, 1: WAITS}) == (
        "ranks 0, 1 are all in #4 all_reduce float32[1024], which does not end: the backend or the "
        "network does not carry it"
    )


# --- calls that do not fit together ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        (("all_reduce", "float32[1025]"), "all_reduce float32[1025]"),
        (("all_reduce", "float64[1024]"), "all_reduce float64[1024]"),
        (("broadcast", "float32[1024]"), "broadcast float32[1024]"),
        (("barrier", ""), "barrier"),
    ],
)
def test_a_mismatch_names_the_rank_and_both_calls(mine: tuple[str, str], told: str) -> None:
    """Shape, dtype and operation; that the collective has ended for some is no excuse."""
    usual = words(*[REDUCE] * 4)
    other = words(*[REDUCE] * 3, mine, ended=3)
    assert verdict([], {0: usual, 1: other, 2: usual, 3: usual}) == (
        f"rank 1 calls #4 {told} where ranks 0, 2, 3 call all_reduce float32[1024]"
    )


def test_a_mismatch_comes_before_the_error_that_it_made() -> None:
    """The error of another rank is told behind it."""
    failed = replace(words(*[REDUCE] * 4, place="f (x.py:1)"), cause="RuntimeError: closed")
    other = words(*[REDUCE] * 3, ("all_reduce", "float32[1]"))
    assert verdict([], {0: failed, 1: other, 2: words(*[REDUCE] * 4)}) == (
        "rank 1 calls #4 all_reduce float32[1] where ranks 0, 2 call all_reduce float32[1024]; "
        "rank 0: RuntimeError: closed, at f (x.py:1)"
    )


def test_a_mismatch_is_found_with_a_rank_that_has_left() -> None:
    """Its last words had its calls."""
    left = Silent(0, "rank 0 (h, pid 1)", LEFT, words(REDUCE))
    failed = replace(words(("all_reduce", "float32[3]")), cause="RuntimeError: closed")
    assert verdict([left], {1: failed}).startswith(
        "rank 1 calls #1 all_reduce float32[3] where rank 0 calls all_reduce float32[1024]"
    )


def test_a_group_is_named_in_a_mismatch_and_several_others_are_told() -> None:
    """Three kinds of call: the one of most ranks is what the others are compared with."""
    said = verdict(
        [],
        {
            rank: words(("all_reduce", f"int8[{size}]"), group="of group 2")
            for rank, size in enumerate((4, 5, 4, 6))
        },
    )
    assert said == (
        "rank 1 calls #1 all_reduce int8[5] of group 2 where ranks 0, 2 call all_reduce int8[4]; "
        "rank 3 calls all_reduce int8[6]"
    )


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (STEP * 2 + STEP[1:], "has skipped a collective"),  # the others wait in #7, never in #8
        (STEP * 2 + STEP[:1] + STEP[:2], "has doubled a collective"),
        (STEP * 2 + [("barrier", "")], ""),
    ],
)
def test_a_rank_that_is_one_ahead_or_behind_is_told_so(
    made: list[tuple[str, str]], told: str
) -> None:
    """Its calls are the others' next ones, as in the steps before, or their previous ones."""
    count = 9 if "doubled" in told else 7
    others = words(*(STEP * 3)[:count], ended=6)
    said = verdict([], {0: others, 1: words(*made, ended=6), 2: others})
    assert said.startswith("rank 1 calls #")
    assert said.endswith(f": rank 1 {told}" if told else "call all_reduce float32[1024]")


def test_what_may_be_either_is_not_told_as_one() -> None:
    """Others that wait in a gather, a rank that has gone on to the reduction which stands on both
    sides of it: what they call next is not known."""
    gather = ("all_gather", "float32[8]")
    said = verdict([], {0: words(REDUCE, gather, ended=1), 1: words(REDUCE, REDUCE, ended=1)})
    assert said.endswith(": rank 1 has skipped or doubled a collective")


def test_uneven_exchanges_and_unknown_sizes_are_no_mismatch() -> None:
    """all_to_all may deal differently, and a size that is not known agrees with every one."""
    pairs = [("all_to_all", "float32[3]"), ("barrier", "")], [("all_to_all", "float32[5]"), REDUCE]
    assert hang.mismatches({0: words(pairs[0][0]), 1: words(pairs[1][0])}) == []
    assert hang.mismatches({0: words(REDUCE), 1: words(("all_reduce", ""))}) == []
    assert hang.mismatches({0: words(pairs[0][1]), 1: words(pairs[1][1])}) != []


def test_ranks_that_are_apart_are_compared_where_both_have_called() -> None:
    """One rank far ahead, whose first calls are forgotten, is no mismatch."""
    ahead = words(*STEP * 20)
    ahead = replace(ahead, logs=(replace(ahead.logs[0], calls=ahead.logs[0].calls[30:]),))
    assert hang.mismatches({0: words(*STEP * 15), 1: ahead}) == []


# --- without the store ----------------------------------------------------------------------------


def test_without_a_store_only_what_is_seen_is_blamed() -> None:
    """Ranks that live cannot answer then; the one that is stopped is the cause, and the sentence
    says that it is one rank's view."""
    silent = [replace(ONE, rank=0), Silent(2, "rank 2 (h, pid 3)", ALIVE)]
    assert verdict(silent, {1: WAITS}, together=False) == (
        "rank 1 (node1, pid 7) is stopped (SIGSTOP), last seen in load_batch (data.py:22), before "
        "#4 all_reduce float32[1024]; rank 1 waits; the ranks' store does not answer, so this is "
        "what rank 1 can see"
    )


def test_without_a_store_and_nobody_seen_the_rank_of_the_store_is_blamed() -> None:
    """Of ranks on other hosts nothing is seen: rank 0, where the store mostly lives, is the one."""
    away = [Silent(rank, f"rank {rank} (h{rank}, pid 1)", CUT_OFF) for rank in (0, 2)]
    said = verdict(away, {1: WAITS}, together=False)
    assert said.startswith(f"rank 0 (h0, pid 1) {CUT_OFF}; rank 1 waits; the ranks' store ")


def test_every_verdict_is_one_line() -> None:
    """Whatever is silent and whoever answers."""
    for state in (DIED, STOPPED, ALIVE, LEFT, CUT_OFF):
        for answer in (WAITS, LOADS, FAILED):
            for together in (True, False):
                sentence = verdict([replace(ONE, state=state)], {0: answer}, together)
                assert sentence
                assert "\n" not in sentence


def test_many_ranks_are_told_in_ranges() -> None:
    """A thousand waiting ranks do not fill the screen."""
    made = {rank: words(*[REDUCE] * 4, ended=3, size=64) for rank in range(64)}
    assert verdict([], {**made, 7: words(*[REDUCE] * 3)}).endswith("; ranks 0–6, 8–63 wait")
