"""Limits of devices: what their memory moves, and what their links carry, as a run shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_lines import QUICK, read_stored_run, run_ddpbench
from frozen import Frozen, finding_facts

from ddpbench.measure import host_limits
from ddpbench.runtime import devices
from ddpbench.runtime.devices import HostEvent

CPU = torch.device("cpu")
# The CPU as a device with memory of its own.
PRETEND = """
from types import SimpleNamespace
import torch.distributed as dist
from ddpbench.runtime import devices

kind = devices.KINDS["cpu"]
kind.clock, kind.memory = "device", "GPU"
kind.in_use = lambda: 0
kind.identity = lambda index: f"GPU-{dist.get_rank() if dist.is_initialized() else 0}"
kind.properties = lambda index: SimpleNamespace(
    name="made up", pci_domain_id=0, pci_bus_id=dist.get_rank(), pci_device_id=0
)
"""


@pytest.mark.thorough
def test_a_result_above_what_the_memory_moves_is_invalid(tmp_path: Path, frozen: Frozen) -> None:
    """On a device's clock, too, a backend that returns before it has done anything is INVALID: the
    device cannot even read so many bytes in that time."""
    (tmp_path / "pretend.py").write_text(PRETEND)
    words = ["--import", "pretend", "--import", "faulty_backend", "--backend", "faulty", "-n", "2"]
    words += ["--op", "all_reduce", "--sizes", "8,16M", "--no-check", *QUICK]
    done = run_ddpbench(tmp_path, "collectives", *words, FAULT="early")
    assert done.returncode == 1, done.stderr
    _, run = read_stored_run(tmp_path)
    (finding,) = (f for f in run.findings if f.code == "impossible-speed")
    frozen.facts(finding_facts(finding))
    assert "16777216 bytes" in finding.sentence
    flagged = [line for line in done.stdout.splitlines() if "INVALID" in line.split()]
    assert [line.split()[:2] for line in flagged] == [["16", "MiB"]]
    assert "limit -:" in done.stdout


@pytest.fixture
def alone() -> Iterator[Any]:
    """A world of one rank, with a real group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watchdog = SimpleNamespace(rearm=lambda: None)
    yield SimpleNamespace(rank=0, world_size=1, watchdog=watchdog, gpu_mates=[])
    dist.destroy_process_group()


class SteadyEvent(HostEvent):
    """Stamps that are always 8 ms apart."""

    def elapsed_time(self, later: HostEvent) -> float:
        """Return 8 ms."""
        return 8.0


@pytest.mark.parametrize("mates", [[], [0], [0, 1]], ids=["alone", "one", "shared"])
def test_a_copy_reads_and_writes_each_byte(
    mates: list[int], alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four copies of 64 MiB in 8 ms read and write 67 GB/s. Ranks that share the device measure it
    at once, so that it moves as many times more."""
    kind = devices.KINDS["cpu"]
    monkeypatch.setattr(kind, "event", lambda device: SteadyEvent())
    alone.gpu_mates = mates
    rate = host_limits.measure_device_copy(alone, CPU)
    assert rate == pytest.approx(max(1, len(mates)) * 4 * 2 * 2**26 / 8e-3)
