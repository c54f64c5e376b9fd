"""Differences between ranks, and dangers, in what they tell of themselves; one function of CHECKS
adds a check.

What holds of every run of any command (versions of torch, ddpbench and Python,
TORCH_DISTRIBUTED_DEBUG, more threads than cores) analysis/findings.py finds: nothing is told twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ddpbench.analysis.setup import Setup
from ddpbench.doctor.preflight import dangers, differences
from ddpbench.records.schema import Finding

CHECKS: tuple[Callable[[Setup], Iterator[Finding]], ...] = (
    differences.same_facts,
    differences.same_variables,
    differences.interfaces,
    differences.own_name,
    differences.clocks,
    dangers.costly_settings,
    dangers.debug_builds,
    dangers.bound_cores,
    dangers.narrow_affinity,
    dangers.far_gpu,
    dangers.gpu_in_use,
    dangers.locked_memory,
    dangers.open_files,
    dangers.shared_memory,
    dangers.free_memory,
)


def findings(setup: Setup) -> tuple[Finding, ...]:
    """All that is odd or dangerous."""
    return tuple(finding for check in CHECKS for finding in check(setup))
