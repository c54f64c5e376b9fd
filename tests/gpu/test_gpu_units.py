"""Single parts on a GPU: the same results as on the CPU, events, times, rates."""

from __future__ import annotations

import sys

import pytest
from command_lines import run_command
from gpu_machine import UNITS, Machine, read_facts
from gpu_units import CHECKS


def test_facts(machine: Machine) -> None:
    """torch finds a device, each GPU has its own identity, and there is a flight recorder. These
    questions create no context on any GPU."""
    facts = read_facts(machine.device)
    print(facts)
    assert facts["unusable"] is None
    assert facts["recorders"]
    assert facts["contexts"] is False
    assert len(set(facts["uuids"])) == facts["count"] >= 1
    if not machine.rehearsal:
        assert all(uuid.startswith(("GPU-", "MIG-")) for uuid in facts["uuids"])


@pytest.mark.parametrize("name", [*CHECKS, pytest.param("events", marks=pytest.mark.measures_time)])
def test_unit(machine: Machine, name: str) -> None:
    """The check of this name in gpu_units.py passes; its docstring states the fact."""
    words = [sys.executable, str(UNITS), name, machine.device]
    done = run_command(words, UNITS.parent)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
