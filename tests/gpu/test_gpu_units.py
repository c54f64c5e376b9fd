"""Single parts on a GPU: the same results as on the CPU, events, times, rates."""

from __future__ import annotations

import pytest
from gpu_machine import Machine, read_facts
from gpu_units import CHECKS


def test_facts(machine: Machine) -> None:
    """torch finds a device, each GPU has its own identity, and there is a flight recorder. These
    questions create no context on any GPU."""
    facts = read_facts(machine.device)
    print(facts)
    assert facts["unusable"] is None
    assert facts["recorders"]
    assert facts["contexts"] == []
    uuids = facts["uuids"]
    assert isinstance(uuids, list)
    assert len(set(uuids)) == facts["count"] >= 1
    if not machine.rehearsal:
        assert all(str(uuid).startswith(("GPU-", "MIG-")) for uuid in uuids)
        assert len(machine.nccl) == 3


MEASURES_TIME = ("events",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.measures_time] if name in MEASURES_TIME else [])
        for name in CHECKS
    ],
)
def test_unit(machine: Machine, name: str) -> None:
    """The check of this name in gpu_units.py passes; its docstring states the fact."""
    machine.check_unit(name)
