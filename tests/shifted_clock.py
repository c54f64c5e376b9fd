"""`--import shifted_clock` shifts a rank's clock forward by AHEAD_NS, an environment variable."""

import os
from typing import Any

from ddpbench.measure import clock
from ddpbench.runtime import environment

true_now_ns, true_facts = clock.now_ns, environment.rank_facts


def now_ns() -> int:
    """Return the shifted clock in ns."""
    return true_now_ns() + int(os.environ.get("AHEAD_NS") or 0)


def rank_facts() -> dict[str, Any]:
    """Return the rank's facts, with a time namespace of its own if its clock is shifted."""
    ahead = os.environ.get("AHEAD_NS")
    return {**true_facts(), **({"time_namespace": -1 - int(ahead)} if ahead else {})}


clock.now_ns, environment.rank_facts = now_ns, rank_facts
