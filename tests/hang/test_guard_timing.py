"""When the watchdog raises an alarm, and how long it waits for other ranks: at a made-up clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch.distributed as dist
from slept_time import SleptTime

from ddpbench.hang import guard, status_board, watchdog
from ddpbench.hang.guard import BEAT_SECONDS, Guard
from ddpbench.hang.status_board import Board, Heartbeat, RankIdentity
from ddpbench.hang.verdict import ALIVE, DIED, STOPPED, Call, Log, RankStatus
from ddpbench.hang.watchdog import GRACE_SECONDS

TIMEOUT = 100.0


class DirectClient:
    """A client of a store that answers at once."""

    gone = False

    def __init__(self, store: dist.Store) -> None:
        self.store = store

    def request(self, seconds: float, function: Callable[[dist.Store], Any]) -> Any:
        """Return what the function of the store returns."""
        return function(self.store)


class FakeFlight:
    """What a rank has called: in its heartbeats, and in a dump, which is right."""

    logs: tuple[Log, ...] = ()
    dump: tuple[Log, ...] | None = None

    def read_logs(self, inside: str, whole: bool) -> tuple[Log, ...]:
        """As Flight."""
        return self.dump if whole and self.dump is not None else self.logs


def log(started: int, finished: int, moves: int = -1) -> Log:
    """The log of the default group of two ranks."""
    calls = tuple(Call(number, "all_reduce") for number in range(1, started + 1))
    return Log("", (0, 1), started, finished, calls, moves=moves)


COMPUTES = RankStatus("evaluate (e.py:4)")
REDUCES = RankStatus("train (t.py:9)", inside="all_reduce")


class Watched:
    """Rank 0 of two under a watchdog with end=False; rank 1 reports only what a test writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.flight = SleptTime(0.0), FakeFlight()
        self.status, self.state = COMPUTES, ALIVE
        self.printed: list[tuple[float, str]] = []

        def read(
            flight: Any, phase: str = "", place: str = "", heartbeat: bool = False
        ) -> RankStatus:
            logs = flight.read_logs(self.status.inside, not heartbeat)
            return replace(self.status, place=place or self.status.place, logs=logs)

        def note(text: str) -> None:
            self.printed.append((self.clock.now, text))

        for module, name, stand_in in (
            (status_board, "StoreClient", DirectClient),
            (status_board, "print_message", note),
            (status_board, "observe_state", lambda other, own: self.state),
            (dist, "is_initialized", lambda: True),
            (guard, "read_status", read),
            (watchdog, "read_status", read),
        ):
            monkeypatch.setattr(module, name, stand_in)
        self.store = dist.HashStore()
        identities = [RankIdentity(rank, "node", rank, "boot") for rank in range(2)]
        self.board = Board(self.store, "guard", identities[0], identities, self.clock)
        self.guard = Guard(self.board, self.flight, TIMEOUT, end=False)  # type: ignore[arg-type]

    def run(self, seconds: float) -> list[float]:
        """Let so much time pass; return when verdicts were printed meanwhile."""
        until, before = self.clock.now + seconds, len(self.printed)
        while self.clock.now < until:
            self.clock.sleep(BEAT_SECONDS)
            self.guard._beat()
        return [now for now, _ in self.printed[before:]]

    def write(self, value: Any, *key: object) -> None:
        """Write under a key as another rank does."""
        self.store.set(self.board.key(*key), json.dumps(asdict(value)))

    def answer(self, status: RankStatus) -> None:
        """Let rank 1 report this whenever it is asked, and in its heartbeat."""
        self.write(Heartbeat(self.board.identities[1], status), "beat", 1)  # type: ignore[arg-type]
        for number in range(9):
            self.write(status, f"round {number}", 1)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A watched rank, while another computes."""
    made = Watched(monkeypatch)
    made.answer(replace(COMPUTES, logs=(log(3, 3),)))
    return made


# --- waits ----------------------------------------------------------------------------------------


def test_a_collective_that_stays_open_is_reported_once_after_the_time_out(watched: Watched) -> None:
    """Counted from the heartbeat that sees it first. The next one counts anew."""
    watched.flight.logs = (log(3, 3),)
    watched.run(50)
    watched.flight.logs, watched.status = (log(4, 3),), REDUCES
    assert watched.run(TIMEOUT) == []
    assert watched.run(BEAT_SECONDS) == [50 + BEAT_SECONDS + TIMEOUT]
    assert "rank 1 never joined #4 all_reduce" in watched.printed[0][1]
    assert watched.run(5 * TIMEOUT) == []
    watched.flight.logs, watched.status = (log(5, 4),), REDUCES
    assert len(watched.run(2 * TIMEOUT)) == 1


def test_a_loop_of_waits_is_no_hang(watched: Watched) -> None:
    """The main thread is always in one line, but the group moves."""
    for number in range(12):
        watched.status = RankStatus("f (x.py:1)", inside="recv")
        watched.flight.logs = (log(3, 3, number),)
        assert watched.run(TIMEOUT / 2) == []


@pytest.mark.parametrize(("moves", "verdicts"), [(20, 1), (-1, 0)])
def test_one_call_that_does_not_end_is_a_hang(watched: Watched, moves: int, verdicts: int) -> None:
    """A receive after a loop of others. Without a count, it may be another wait of the same line
    each time."""
    watched.run(3 * BEAT_SECONDS)
    watched.status = RankStatus("f (x.py:1)", inside="recv")
    watched.flight.logs = (log(3, 3, moves),)
    began = watched.clock.now + BEAT_SECONDS
    assert watched.run(1.1 * TIMEOUT) == [began + TIMEOUT] * verdicts
    assert all("rank 0: has waited longer than 100 s" in text for _, text in watched.printed)


def test_a_count_that_a_dump_corrects_is_no_hang(watched: Watched) -> None:
    """It is asked again each time-out, and reported once the dump has it open, too."""
    watched.flight.logs, watched.flight.dump = (log(3, 2),), (log(3, 3),)
    assert watched.run(1.2 * TIMEOUT) == []
    watched.flight.dump = None
    assert watched.run(TIMEOUT) == [2 * TIMEOUT + BEAT_SECONDS]


# --- other ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "seconds"), [(ALIVE, GRACE_SECONDS), (STOPPED, 0.0), (DIED, 0.0), ("left", 0.0)]
)
def test_a_rank_that_may_still_answer_has_a_grace(
    monkeypatch: pytest.MonkeyPatch, state: str, seconds: float
) -> None:
    """One that is stopped, dead or has left is not waited for."""
    watched = Watched(monkeypatch)
    watched.state = DIED if state == "left" else state
    if state == "left":
        watched.store.set(watched.board.key("left", 1), "1")
    watched.flight.logs, watched.status = (log(4, 3),), REDUCES
    watched.run(TIMEOUT + BEAT_SECONDS)
    ((told, text),) = watched.printed
    late = told - TIMEOUT - BEAT_SECONDS - seconds
    assert 0 <= late <= 2 * status_board.POLL_SECONDS
    assert f"rank 1 (node, pid 1) {'has left' if state == 'left' else state}" in text


def test_another_rank_s_verdict_is_printed_and_a_missing_one_made_up_for(watched: Watched) -> None:
    """Whoever raises the alarm first judges; if that rank is lost, this one judges after a second
    more than the grace."""
    watched.flight.logs = (log(3, 3),)
    watched.answer(replace(REDUCES, logs=(log(4, 3),), cause="has waited longer", late=True))
    watched.store.add(watched.board.key("round 0", "judge"), 1)
    (told,) = watched.run(BEAT_SECONDS)
    assert BEAT_SECONDS + GRACE_SECONDS + 1.0 <= told <= BEAT_SECONDS + GRACE_SECONDS + 1.2
    judgement = watched.guard._judge("round 0", watched.status)
    watched.store.add(watched.board.key("round 1", "judge"), 1)
    watched.write(replace(judgement, sentence="rank 7 is to blame"), "round 1", "judgement")
    began = watched.clock.now
    assert watched.run(BEAT_SECONDS) == [began + BEAT_SECONDS]
    assert "rank 7 is to blame" in watched.printed[-1][1]
