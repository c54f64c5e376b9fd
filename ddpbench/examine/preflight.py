"""What every rank tells of itself, compared: only differences and dangers are worth a word.

figures: {}
"""

from __future__ import annotations

from ddpbench.examine.patient import Outcome, Patient


def examine(patient: Patient) -> Outcome:
    """All ranks call it; it communicates nothing."""
    ranks = patient.launch.ranks
    hosts = len({rank["hostname"] for rank in ranks})
    return Outcome(told=(f"the facts of {len(ranks)} ranks on {hosts} hosts compared",))
