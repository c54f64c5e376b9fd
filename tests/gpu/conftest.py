"""The checks that need a GPU: all tests of this folder have the markers `gpu` and `thorough`."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_machine import REHEARSAL, Machine, find_machine

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
    found, reason = find_machine()
    if found is None:
        pytest.skip(f"no GPU: {reason} ({REHEARSAL}=1 rehearses on the CPU)")
    return found
