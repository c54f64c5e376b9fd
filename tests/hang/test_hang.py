"""The verdict on ranks that wait for ever, from made-up last words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from frozen import Frozen

from ddpbench.hang.status import (
    ALIVE,
    DIED,
    ENDED,
    LEFT,
    STOPPED,
    Call,
    Log,
    RankStatus,
    SilentRank,
)
from ddpbench.hang.verdict import describe_mismatches, explain_hang

CUT_OFF = "did not answer (stopped, dead or cut off)"
REDUCE = ("all_reduce", "float32[1024]")
STEP = [REDUCE, ("broadcast", "int64[1]"), ("all_reduce", "float32[8]")]


def calls(*given: tuple[str, str]) -> tuple[Call, ...]:
    """Numbered from 1 on."""
    return tuple(Call(number, *each) for number, each in enumerate(given, 1))


def words(
    *made: tuple[str, str], ended: int | None = None, group: str = "",
    place: str = "train (t.py:9)", size: int = 4, **others: object,
) -> RankStatus:  # fmt: skip
    """Of a rank that has made these calls, of which so many have ended; None: all."""
    done = len(made) if ended is None else ended
    log = Log(group, tuple(range(size)), len(made), done, calls(*made))
    return replace(RankStatus(place, logs=(log,)), **others)  # type: ignore[arg-type]


WAITS = words(*[REDUCE] * 4, ended=3, inside="all_reduce", late=True)
LOADS = words(*[REDUCE] * 3, place="load_batch (data.py:22)")
HEART = replace(LOADS, logs=(replace(LOADS.logs[0], calls=()),))  # a heartbeat has numbers only
ONE = SilentRank(1, "rank 1 (node1, pid 7)", STOPPED, HEART)


def test_a_rank_that_has_not_joined_is_named_with_its_place(frozen: Frozen) -> None:
    """Which rank, which collective, where it is instead, and who waits."""
    frozen.verdict(explain_hang([], {0: WAITS, 1: LOADS, 2: WAITS, 3: WAITS}))


def test_ranks_at_one_place_are_told_together(frozen: Frozen) -> None:
    """Two absent ranks at one line are one sentence, one elsewhere another."""
    saves = replace(LOADS, place="save (s.py:3)", inside="recv")
    frozen.verdict(explain_hang([], {0: WAITS, 1: LOADS, 2: LOADS, 3: saves}))


def in_groups(place: str, size: int, **started: int) -> RankStatus:
    """Of a rank that waits in the first call of the groups that have started one."""
    logs = tuple(
        Log(f"of group {name}", tuple(range(size)), count, 0, calls(*[REDUCE] * count))
        for name, count in started.items()
    )
    return RankStatus(place, "all_reduce", logs, late=True)


def test_two_groups_in_different_order_are_told_as_a_deadlock(frozen: Frozen) -> None:
    """Rank 0 waits in one group for rank 1, which waits in the other for rank 0."""
    ranks = {0: in_groups("f0 (x.py:1)", 2, a=1, b=0), 1: in_groups("f1 (x.py:2)", 2, a=0, b=1)}
    frozen.verdict(explain_hang([], ranks))


def test_groups_of_one_name_are_told_apart_by_their_ranks(frozen: Frozen) -> None:
    """The rows of a mesh: ranks 0 and 1 are through, ranks 2 and 3 are not; rank 1 owes nothing."""

    def row(rank: int, started: int, **others: object) -> RankStatus:
        members = (rank // 2 * 2, rank // 2 * 2 + 1)
        group = f"of group 'tp' (ranks {members[0]}, {members[1]})"
        log = Log(group, members, started, 2, calls(REDUCE))
        return replace(RankStatus(f"f{rank} (x.py:1)", logs=(log,)), **others)  # type: ignore[arg-type]

    waits, left = row(2, 3, inside="all_reduce", late=True), replace(ONE, state=LEFT)
    silent = [replace(left, seen=row(1, 2)), replace(left, rank=3, name="rank 3", seen=row(3, 2))]
    frozen.verdict(explain_hang(silent, {0: row(0, 2), 2: waits}))


def test_a_rank_that_computes_is_in_no_circle(frozen: Frozen) -> None:
    """Rank 1 has begun a collective, does not wait for it and is in its own code."""
    ranks = {0: in_groups("f0 (x.py:1)", 2, a=1, b=0), 1: in_groups("f1 (x.py:2)", 2, a=0, b=1)}
    ranks[1] = replace(ranks[1], inside="", late=False)
    frozen.verdict(explain_hang([], ranks))


def test_the_rank_whose_message_is_missing_is_told_first(frozen: Frozen) -> None:
    """A pipeline whose middle stage is busy: where that one is, then who waits."""
    last = RankStatus("step (p.py:7)", "wait", late=True, cause="has waited longer than 4 s")
    busy = RankStatus("forward (m.py:2)")
    frozen.verdict(explain_hang([], {0: replace(last, place="step (p.py:6)"), 1: busy, 2: last}))


@pytest.mark.parametrize("started", [3, 4], ids=("before", "in"))
def test_a_stopped_rank_is_named_with_where_it_was_last_seen(frozen: Frozen, started: int) -> None:
    """Its last heartbeat says in which line it was, and whether it had joined."""
    seen = replace(HEART, logs=(replace(HEART.logs[0], started=started),))
    frozen.verdict(explain_hang([replace(ONE, seen=seen)], {0: WAITS, 2: WAITS, 3: WAITS}))


def test_numbers_that_ranks_count_differently_are_not_compared(frozen: Frozen) -> None:
    """Where sends and receives are counted too, a heartbeat's number says nothing of others'."""
    waits = replace(WAITS, logs=(replace(WAITS.logs[0], exact=False),))
    frozen.verdict(explain_hang([ONE], {0: waits, 2: waits}))


def test_without_a_heartbeat_a_silent_rank_is_named_all_the_same(frozen: Frozen) -> None:
    """Each silent rank with its state, and in what ddpbench's ranks wait."""
    late = RankStatus("loop (l.py:7)", phase="case 3 of 9: all_reduce", late=True)
    two = SilentRank(2, "rank 2 (node2, pid 102)", CUT_OFF)
    frozen.verdict(explain_hang([replace(ONE, seen=None, state=DIED), two], {3: late}))


FAILED = replace(LOADS, cause="RuntimeError: closed by peer", phase="case 3")


def test_a_dead_rank_is_blamed_whatever_the_others_say(frozen: Frozen) -> None:
    """The others' errors are consequences: only the rank that died is named as the cause."""
    sentence = explain_hang([replace(ONE, state=DIED)], {0: FAILED, 2: WAITS})
    assert "RuntimeError" not in sentence
    frozen.verdict(sentence)


def test_a_silent_rank_that_lives_is_blamed_only_once_a_deadline_is_over(frozen: Frozen) -> None:
    """After a missed deadline it should have spoken; after an error elsewhere it may not yet have
    noticed, and the rank that failed is the one to name."""
    alive = replace(ONE, state=ALIVE)
    frozen.verdict(explain_hang([alive], {0: WAITS}))
    frozen.verdict(explain_hang([alive], {0: FAILED}))
    dead = SilentRank(3, "rank 3 (h, pid 9)", DIED)
    frozen.verdict(explain_hang([alive, dead], {0: FAILED}))


def test_an_error_is_told_with_who_waits_for_that_rank(frozen: Frozen) -> None:
    """The rank that failed, where, before which collective; the others wait in it."""
    failed = replace(LOADS, cause="ValueError: bad batch")
    waits = replace(WAITS, late=False)
    frozen.verdict(explain_hang([], {0: waits, 1: failed, 2: waits, 3: waits}))


@pytest.mark.parametrize(
    "cause",
    [
        "RuntimeError: [x.cc:78] Timed out waiting 2000ms for recv operation to complete",
        "RuntimeError: Connection closed by peer",
        "DistBackendError: all_reduce on rank 0 has not ended within 0:00:02",
    ],
    ids=("gloo", "closed", "nccl"),
)
def test_a_backend_s_own_time_out_is_a_symptom(frozen: Frozen, cause: str) -> None:
    """The rank that is late is blamed, not the one in which the backend gives up first; where none
    is late, the error is all that is known."""
    failed = words(*[REDUCE] * 4, cause=cause, place="train (t.py:9)")
    frozen.verdict(explain_hang([], {0: failed, 1: LOADS, 2: replace(WAITS, late=False)}))
    other = words(*[REDUCE] * 4)
    frozen.verdict(explain_hang([], {0: failed, 1: other}))


def test_a_rank_that_has_left_is_blamed_where_nothing_else_is_wrong(frozen: Frozen) -> None:
    """Its script has ended while others wait, or lose their connections; but not where one of
    those has failed by itself."""
    left = replace(ONE, state=LEFT)
    frozen.verdict(explain_hang([left], {0: WAITS}))
    frozen.verdict(explain_hang([left], {0: FAILED}))
    failed = replace(FAILED, cause="ValueError: bad batch")
    frozen.verdict(explain_hang([left], {0: failed}))


CLOSED = replace(WAITS, cause="RuntimeError: Connection closed by peer", late=False)


def test_a_rank_that_left_early_is_blamed_and_not_its_victims(frozen: Frozen) -> None:
    """Their connections were closed: which call it owes, and the last that it made."""
    seen = words(*[REDUCE] * 3)
    call = replace(seen.logs[0].calls[-1], place="train (t.py:8)")
    seen = replace(seen, logs=(replace(seen.logs[0], calls=(call,)),))
    left = replace(ONE, state=LEFT, seen=seen)
    frozen.verdict(explain_hang([left], {0: CLOSED, 2: CLOSED}))


def test_an_error_that_follows_from_another_is_not_the_cause(frozen: Frozen) -> None:
    """Rank 1 failed in its own code; the others lost their connections to it."""
    failed = replace(LOADS, cause="ValueError: bad batch")
    frozen.verdict(explain_hang([], {0: CLOSED, 1: failed, 2: CLOSED}))


def test_ranks_that_say_the_same_are_told_together(frozen: Frozen) -> None:
    """Without a collective to blame, every rank's place is told, equal ones once, in order."""
    late = RankStatus("f (x.py:7)", phase="start", cause="missed the deadline", late=True)
    other = replace(late, place="g (y.py:1)")
    frozen.verdict(explain_hang([], {2: late, 0: late, 1: other, 3: late}))


def test_a_wait_of_which_no_call_is_known_shows_where_all_are(frozen: Frozen) -> None:
    """A call that connects the ranks first, or a wait for what was posted before."""
    waits = RankStatus(
        "train (t.py:9)", "all_reduce", cause="has waited longer than 9 s", late=True
    )
    frozen.verdict(explain_hang([], {0: waits, 1: RankStatus("load (data.py:22)")}))
    posted = replace(waits, inside="wait", logs=(Log("", (0, 1), 0, 0, moves=4, exact=False),))
    frozen.verdict(explain_hang([], {0: posted, 1: RankStatus("load (data.py:22)")}))


def test_an_error_that_a_rank_still_handles_is_told(frozen: Frozen) -> None:
    """Its `finally` waits in a collective that does not end: the error would never be seen."""
    handles = "KeyError: 'label', at train (t.py:4)"
    mine = words(REDUCE, ("barrier", ""), ended=1, inside="barrier", late=True, handles=handles)
    others = replace(words(REDUCE, REDUCE, ended=1, inside="all_reduce"), late=True)
    frozen.verdict(explain_hang([], {0: others, 1: replace(mine, place="train (t.py:6)")}))


def test_a_collective_that_all_have_joined_accuses_the_backend(frozen: Frozen) -> None:
    """All are in it, with the same call, and it does not end."""
    frozen.verdict(explain_hang([], {0: WAITS, 1: WAITS}))


# --- calls that do not fit together ---------------------------------------------------------------


@pytest.mark.parametrize(
    "mine",
    [
        ("all_reduce", "float32[1025]"),
        ("all_reduce", "float64[1024]"),
        ("broadcast", "float32[1024]"),
        ("barrier", ""),
    ],
    ids=" ".join,
)
def test_a_mismatch_names_the_rank_and_both_calls(frozen: Frozen, mine: tuple[str, str]) -> None:
    """Shape, dtype and operation; that the collective has ended for some is no excuse."""
    usual = words(*[REDUCE] * 4)
    other = words(*[REDUCE] * 3, mine, ended=3)
    frozen.verdict(explain_hang([], {0: usual, 1: other, 2: usual, 3: usual}))


def test_a_mismatch_shows_the_lines_of_both(frozen: Frozen) -> None:
    """The line that made the call is what is recorded, else where a rank waits in it."""
    one, most = words(*[REDUCE] * 3, ("barrier", "")), words(*[REDUCE] * 4, ended=3)
    call = replace(one.logs[0].calls[-1], place="evaluate (eval.py:30)")
    one = replace(one, logs=(replace(one.logs[0], calls=(call,)),))
    frozen.verdict(explain_hang([], {0: replace(most, inside="all_reduce"), 1: one}))


def test_a_mismatch_comes_before_the_error_that_it_made(frozen: Frozen) -> None:
    """The error of another rank is told behind it."""
    failed = replace(words(*[REDUCE] * 4, place="f (x.py:1)"), cause="RuntimeError: closed")
    other = words(*[REDUCE] * 3, ("all_reduce", "float32[1]"))
    frozen.verdict(explain_hang([], {0: failed, 1: other, 2: words(*[REDUCE] * 4)}))


def test_a_mismatch_is_found_with_a_rank_that_has_left(frozen: Frozen) -> None:
    """Its last words had its calls."""
    left = SilentRank(0, "rank 0 (h, pid 1)", LEFT, words(REDUCE))
    failed = replace(words(("all_reduce", "float32[3]")), cause="RuntimeError: closed")
    frozen.verdict(explain_hang([left], {1: failed}))


def test_a_group_is_named_in_a_mismatch_and_several_others_are_told(frozen: Frozen) -> None:
    """Three kinds of call: the one of most ranks is what the others are compared with."""
    sizes = (4, 5, 4, 6)
    ranks = {
        rank: words(("all_reduce", f"int8[{size}]"), group="of group 2")
        for rank, size in enumerate(sizes)
    }
    frozen.verdict(explain_hang([], ranks))


def test_groups_of_one_rank_each_do_not_hide_a_mismatch(frozen: Frozen) -> None:
    """What each has called in a group of which the other is no member is not compared."""
    ranks = {0: words(REDUCE), 1: words(("barrier", ""))}
    for rank, status in ranks.items():
        own = Log(f"of group {rank + 1}", (rank,), 1, 1, calls(("all_reduce", f"int8[{rank}]")))
        ranks[rank] = replace(status, logs=(*status.logs, own))
    frozen.verdict(explain_hang([], ranks))


def test_uneven_exchanges_and_unknown_sizes_are_no_mismatch() -> None:
    """all_to_all may deal differently, and a size that is not known agrees with every one."""
    pairs = [("all_to_all", "float32[3]"), ("barrier", "")], [("all_to_all", "float32[5]"), REDUCE]
    assert describe_mismatches({0: words(pairs[0][0]), 1: words(pairs[1][0])}) == []
    assert describe_mismatches({0: words(REDUCE), 1: words(("all_reduce", ""))}) == []
    assert describe_mismatches({0: words(pairs[0][1]), 1: words(pairs[1][1])}) != []


def test_ranks_that_are_apart_are_compared_where_both_have_called() -> None:
    """One rank far ahead, whose first calls are forgotten, is no mismatch."""
    ahead = words(*STEP * 20)
    ahead = replace(ahead, logs=(replace(ahead.logs[0], calls=ahead.logs[0].calls[30:]),))
    assert describe_mismatches({0: words(*STEP * 15), 1: ahead}) == []


# --- without the store ----------------------------------------------------------------------------


def test_without_a_store_only_what_is_seen_is_blamed(frozen: Frozen) -> None:
    """Ranks that live cannot answer then; the one that is stopped is the cause, and the sentence
    says that it is one rank's view."""
    silent = [ONE, SilentRank(0, "rank 0 (h, pid 3)", ALIVE)]
    frozen.verdict(explain_hang(silent, {2: WAITS}, store_answers=False))


def test_without_a_store_and_nobody_seen_the_rank_of_the_store_is_blamed(frozen: Frozen) -> None:
    """Of ranks on other hosts nothing is seen: rank 0, where the store mostly lives, is the one."""
    away = [SilentRank(rank, f"rank {rank} (h{rank}, pid 1)", CUT_OFF) for rank in (0, 2)]
    frozen.verdict(explain_hang(away, {1: WAITS}, store_answers=False))


def test_where_the_store_has_been_ended_its_rank_is_blamed(frozen: Frozen) -> None:
    """Rank 0 destroyed its process group; that another has gone since is a consequence."""
    silent = [replace(ONE, rank=0, state=ENDED), SilentRank(2, "rank 2 (h, pid 3)", DIED)]
    frozen.verdict(explain_hang(silent, {1: CLOSED}, store_answers=False))


def test_every_verdict_is_one_line() -> None:
    """Whatever is silent and whoever answers."""
    for state in (DIED, STOPPED, ALIVE, LEFT, CUT_OFF):
        for answer in (WAITS, LOADS, FAILED):
            for together in (True, False):
                sentence = explain_hang([replace(ONE, state=state)], {0: answer}, together)
                assert sentence
                assert "\n" not in sentence


def test_many_ranks_are_told_in_ranges(frozen: Frozen) -> None:
    """A thousand waiting ranks do not fill the screen."""
    made = {rank: words(*[REDUCE] * 4, ended=3, size=64) for rank in range(64)}
    verdict = explain_hang([], {**made, 7: words(*[REDUCE] * 3)})
    assert "ranks 0–6, 8–63" in verdict
    frozen.verdict(verdict)
