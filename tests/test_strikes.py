"""A few of the strikes that `strikes.py` makes by hand in any number."""

import random
from concurrent.futures import ThreadPoolExecutor
from signal import SIGKILL, SIGSTOP

import pytest
from strikes import Strike, try_strike

from ddpbench.launch import placement

STRIKES = [
    Strike("ddp", "gloo", SIGSTOP, "rank", 0.001),
    Strike("doctor", "gloo", SIGKILL, "rank", 0.03),
    Strike("collectives", "mpi", SIGSTOP, "rank", 0.3),
    Strike("collectives", "mpi", SIGKILL, "mpirun", 0.5),
    Strike("ddp", "mpi", SIGKILL, "parent", 0.2),
]


@pytest.mark.skipif(placement.find_mpirun() is None, reason="there is no mpirun here")
def test_a_strike_is_named_in_time_and_leaves_nothing() -> None:
    """Stops and kills of ranks, of mpirun and of the parent: the end comes within the deadline and
    10 s, with who it was, and no process, shared memory or temporary folder is left."""
    with ThreadPoolExecutor(len(STRIKES)) as at_once:
        results = list(at_once.map(lambda strike: try_strike(strike, random.Random(7)), STRIKES))
    assert [result and result[1] for result in results] == [[]] * len(STRIKES)
