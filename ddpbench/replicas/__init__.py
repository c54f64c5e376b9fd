"""The proof that replicas are equal, for any training loop: `ddpbench.verify_replicas`."""

from ddpbench.replicas.gather_digest import digest_state
from ddpbench.replicas.report import (
    Detail,
    Difference,
    Mismatch,
    NonFinite,
    NotCompared,
    Origin,
    Report,
    WithoutGradient,
)
from ddpbench.replicas.state_digest import StateDigest, TensorDigest
from ddpbench.replicas.verify import Verifier, verify_replicas

__all__ = [
    "Detail",
    "Difference",
    "Mismatch",
    "NonFinite",
    "NotCompared",
    "Origin",
    "Report",
    "StateDigest",
    "TensorDigest",
    "Verifier",
    "WithoutGradient",
    "digest_state",
    "verify_replicas",
]
