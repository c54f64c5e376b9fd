"""`--import shifted_clock` shifts a rank's clock forward by AHEAD_NS, an environment variable, and
its time of day by DAY_AHEAD_NS."""

import os
import time
from typing import Any

from ddpbench.measure import clock
from ddpbench.runtime import environment

true_now_ns, true_facts = clock.now_ns, environment.rank_facts
true_time_ns = time.time_ns


def now_ns() -> int:
    """Return the shifted clock in ns."""
    return true_now_ns() + int(os.environ.get("AHEAD_NS") or 0)


def time_ns() -> int:
    """Return the shifted time of day in ns."""
    return true_time_ns() + int(os.environ.get("DAY_AHEAD_NS") or 0)


def rank_facts() -> dict[str, Any]:
    """Return the rank's facts, with a time namespace of its own if its clock is shifted."""
    ahead = os.environ.get("AHEAD_NS")
    return {**true_facts(), **({"time_namespace": -1 - int(ahead)} if ahead else {})}


clock.now_ns, environment.rank_facts, time.time_ns = now_ns, rank_facts, time_ns
