"""The clocks of hosts in a running job: bounded, followed while they drift, and learned anew."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import pytest
from forked_ranks import Place, Process
from simulated_hosts import Hosts

from ddpbench.watch.gather import offsets
from ddpbench.watch.gather.offsets import MOST_DRIFT, UNKNOWN_NS, ClockServer, Offset, ping

SECOND = 10**9
MS = 10**6
HOUR_NS, DRIFT = 3600 * SECOND, 100e-6


@pytest.fixture
def patient_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine take long to answer, in forked ranks too."""
    for name in ("CONNECT_SECONDS", "ANSWER_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(offsets, name, 60.0)


def a_round(draw: random.Random, at_ns: int, ahead: Callable[[int], float]) -> offsets.Stamps:
    """Ping-pongs of a host whose clock is so far ahead of rank 0's, at these times of rank 0."""
    exchanges = []
    for n in range(offsets.PINGS):
        there, back = draw.randrange(10_000, 200_000), draw.randrange(10_000, 200_000)
        asked = at_ns + n * MS
        answered = asked + there + back
        exchanges.append(
            (asked + round(ahead(asked)), asked + there, answered + round(ahead(answered)))
        )
    return np.array(exchanges, dtype=np.int64)


def error_ns(offset: Offset, at_ns: int, ahead: Callable[[int], float]) -> float:
    """How far a stamp of the host, taken at this time of rank 0, is off after its correction."""
    stamp = np.array([at_ns + round(ahead(at_ns))])
    return float(offset.line.correct(stamp)[0] - at_ns)


def test_an_offset_that_drifts_is_known_within_half_a_millisecond() -> None:
    """Clocks 5 ms ahead or behind that gain or lose 100 ppm, compared every 5 s for two minutes,
    over ways of 10 to 200 µs: every stamp since the second comparison is right within 0.5 ms,
    since the fourth within 0.1 ms."""
    for seed in range(50):
        draw = random.Random(seed)
        start, drift = draw.uniform(-5, 5) * MS, draw.uniform(-100e-6, 100e-6)
        epoch = draw.randrange(10**18, 2 * 10**18)

        def ahead(
            at_ns: int, start: float = start, drift: float = drift, epoch: int = epoch
        ) -> float:
            return start + drift * (at_ns - epoch)

        offset = Offset()
        assert offset.line.bound_ns == UNKNOWN_NS
        for number in range(24):
            at = epoch + number * 5 * SECOND
            offset.add(a_round(draw, at, ahead))
            for age in (0, 2 * SECOND, 5 * SECOND):
                off = abs(error_ns(offset, at + age, ahead))
                assert off <= (0.1 if number >= 3 else 0.5 if number else 0.7) * MS
            assert offset.line.bound_ns < 0.2 * MS


def test_a_clock_that_is_set_is_learned_anew() -> None:
    """After a jump of either clock, forward or backward, the next comparison is believed at once,
    and a drift beyond what clocks have is not."""
    draw = random.Random(1)
    for jump in (3.0 * SECOND, -3.0 * SECOND, 20.0 * MS):
        offset = Offset()
        for number in range(5):
            offset.add(a_round(draw, number * 5 * SECOND, lambda _: 0.0))
        offset.add(a_round(draw, 25 * SECOND, lambda _, jump=jump: jump))  # type: ignore[misc]
        assert abs(error_ns(offset, 25 * SECOND, lambda _: jump)) < 0.2 * MS  # noqa: B023
        assert abs(offset.line.drift) <= MOST_DRIFT


def test_one_slow_round_does_not_count() -> None:
    """A round in which every answer took 50 ms one way moves the offset by less than 0.1 ms."""
    draw, offset = random.Random(2), Offset()
    for number in range(6):
        offset.add(a_round(draw, number * 5 * SECOND, lambda _: 5.0 * MS))
    slow = a_round(draw, 30 * SECOND, lambda _: 5.0 * MS)
    slow[:, 2] += 50 * MS
    offset.add(slow)
    assert abs(error_ns(offset, 31 * SECOND, lambda _: 5.0 * MS)) < 0.1 * MS


@pytest.mark.usefixtures("patient_clocks")
def test_rank_0_answers_only_its_own_job() -> None:
    """A token is answered with the time, anything else by closing the connection; connections that
    say nothing hinder nobody; and where nobody listens, there is no answer."""
    server = ClockServer(b"t" * offsets.TOKEN_NBYTES)
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        before = time.time_ns()
        exchanges = ping(["127.0.0.1"], server.port, b"t" * offsets.TOKEN_NBYTES)
        assert exchanges is not None
        assert exchanges.shape == (offsets.PINGS, 3)
        assert (np.diff(exchanges, axis=1) >= 0).all()
        assert before <= exchanges[0, 0]
        assert ping(["127.0.0.1"], server.port, b"u" * offsets.TOKEN_NBYTES) is None
        assert silent.fileno() >= 0
        server.close()
    assert ping(["127.0.0.1"], 1, b"t" * 16) is None


def _compare(server: str, port: int, skew: Callable[[int], int], pipe: Connection) -> None:
    offsets.now_ns = lambda: skew(time.time_ns())
    offset, began_ns = Offset(), time.time_ns()
    for _ in range(5):
        exchanges = ping([server], port, b"t" * offsets.TOKEN_NBYTES)
        if exchanges is not None:
            offset.add(exchanges)
        time.sleep(0.4)
    now = time.time_ns()
    corrected = int(offset.line.correct(np.array([skew(now)]))[0])
    pipe.send((corrected - now, offset.line.bound_ns, DRIFT * (now - began_ns)))


def _serve(pipe: Connection) -> None:
    server = ClockServer(b"t" * offsets.TOKEN_NBYTES)
    pipe.send(server.port)
    pipe.recv()


@pytest.mark.thorough
@pytest.mark.usefixtures("patient_clocks")
def test_hosts_with_drifting_clocks_agree(hosts: Callable[..., Hosts]) -> None:
    """Two hosts whose clocks are an hour ahead and behind and drift by 100 ppm: after five
    comparisons over the network their stamps are right within the bound that they give."""
    bench, epoch = hosts(3), time.time_ns()
    places = [Place(host.namespace, host.name) for host in bench.hosts]
    rank_0 = Process(_serve, places[0])
    port = rank_0.answer()
    others = [
        Process(
            lambda pipe, sign=sign: _compare(
                bench[0].address,
                port,
                lambda t: t + sign * round(HOUR_NS + DRIFT * (t - epoch)),
                pipe,
            ),
            place,
        )
        for sign, place in zip((1, -1), places[1:], strict=True)
    ]
    for other in others:
        off, bound, drifted = other.answer()
        assert abs(off) <= bound + drifted
        assert bound < HOUR_NS / 2
    rank_0.process.kill()
    rank_0.process.join()
