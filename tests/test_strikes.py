"""Four of the strikes that `strikes.py` makes at random moments."""

import random
from concurrent.futures import ThreadPoolExecutor
from signal import SIGKILL, SIGSTOP

import pytest
from command_lines import needs_mpirun
from strikes import Strike, try_strike

STRIKES = [
    Strike("ddp", "gloo", SIGSTOP, "rank", 0.001),
    Strike("doctor", "gloo", SIGKILL, "rank", 0.03),
    Strike("collectives", "mpi", SIGKILL, "mpirun", 0.5),
    Strike("ddp", "mpi", SIGKILL, "parent", 0.2),
]


@pytest.mark.nightly
@pytest.mark.thorough
@needs_mpirun
def test_a_strike_is_named_in_time_and_leaves_nothing() -> None:
    """After a rank, mpirun or the parent is stopped or killed, the run ends after the deadline and
    names the victim; no process, shared memory or temporary folder is left."""
    with ThreadPoolExecutor(len(STRIKES)) as at_once:
        results = list(at_once.map(lambda strike: try_strike(strike, random.Random(7)), STRIKES))
    assert [result and result[1] for result in results] == [[]] * len(STRIKES)
