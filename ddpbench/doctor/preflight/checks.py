"""The checks of the settings: differences between ranks, and dangers. One entry of CHECKS adds one.

analysis/findings.py checks what every command needs: versions of torch, ddpbench and Python,
TORCH_DISTRIBUTED_DEBUG, more threads than cores. Nothing is reported twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ddpbench.analysis.rank_setup import Setup
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
    dangers.narrow_slot,
    dangers.memory_errors,
    dangers.gpu_in_use,
    dangers.locked_memory,
    dangers.open_files,
    dangers.shared_memory,
    dangers.free_memory,
)


def findings(setup: Setup) -> tuple[Finding, ...]:
    """Return a finding for everything that is odd or dangerous."""
    return tuple(finding for check in CHECKS for finding in check(setup))
