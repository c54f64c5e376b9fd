"""Check in any training loop that replicas are equal: `ddpbench.verify_replicas`."""

from ddpbench.replicas.report import (
    Detail,
    Difference,
    Mismatch,
    NonFinite,
    Origin,
    Report,
)
from ddpbench.replicas.state import NotCompared
from ddpbench.replicas.verify import Verifier, verify_replicas

__all__ = [
    "Detail",
    "Difference",
    "Mismatch",
    "NonFinite",
    "NotCompared",
    "Origin",
    "Report",
    "Verifier",
    "verify_replicas",
]
