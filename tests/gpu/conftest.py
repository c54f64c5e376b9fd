"""The checks that need a GPU: all tests of this folder have the markers `gpu` and `thorough`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from gpu_machine import REHEARSAL, Machine, read_facts

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, of which each starts processes."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(scope="session")
def machine() -> Machine:
    """The machine with its GPU; without one, the test is skipped."""
    if os.environ.get(REHEARSAL):
        return Machine("cpu", "gloo", 0)
    reason = "this torch is a CPU build"
    if torch.version.cuda or torch.version.hip:
        facts = read_facts("cuda")
        if facts["unusable"] is None:
            return Machine("cuda", "nccl", facts["count"])
        reason = facts["unusable"]
    pytest.skip(f"no GPU: {reason} ({REHEARSAL}=1 rehearses on the CPU)")
