"""Which device `auto` means, and what is said about GPUs that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from frozen import Frozen

from ddpbench.catalog import backends
from ddpbench.launch.placement import Refused
from ddpbench.runtime import devices

# What torch.cuda.init raises, from c10/cuda/CUDAFunctions.cpp, and a part that is quoted.
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
    "driver by downloading and installing a new version from the URL: http://www.nvidia.com/"
)
UNEXPECTED = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
    "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized"
)
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
NO_GPU = "No CUDA GPUs are available"
BROKEN = {TOO_OLD: "(found version 12020)", UNEXPECTED: "Error 802"}


class Machine:
    """A CUDA build of torch on a machine whose driver is good, bad or missing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder
        self.error: str | None = None
        self.started = 0
        for name in devices.HIDING:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.version, "cuda", "13.2")
        monkeypatch.setattr(torch.cuda, "init", self.start)
        cuda = torch.device("cuda")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: cuda)
        monkeypatch.setattr(devices, "NVIDIA_GPUS", folder)

    def start(self) -> None:
        self.started += 1
        if self.error is not None:
            raise RuntimeError(self.error)

    def list_gpus(self, number: int) -> None:
        """Let the driver list so many GPUs in /proc."""
        for index in range(number):
            (self.folder / f"0000:0{index}:00.0").mkdir()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def choose(*names: str) -> tuple[str, list[str]]:
    """Return the device that `auto` means, and the warnings."""
    warnings: list[str] = []
    return backends.choose_device(names or ("auto",), "auto", warnings.append), warnings


def test_auto_takes_gpus_that_work(machine: Machine) -> None:
    """With a GPU the default is cuda, on nccl."""
    machine.list_gpus(2)
    assert choose() == ("cuda", [])


@pytest.mark.parametrize("error", BROKEN, ids=["old driver", "not initialised"])
def test_auto_refuses_gpus_that_are_broken(machine: Machine, error: str, frozen: Frozen) -> None:
    """Who has a GPU does not want figures of the CPU: CUDA's error is quoted, in one line."""
    machine.error = error
    with pytest.raises(Refused) as refused:
        choose()
    assert BROKEN[error] in str(refused.value)
    frozen.text(str(refused.value))


@pytest.mark.parametrize("error", [NO_DRIVER, NO_GPU])
def test_auto_takes_the_cpu_where_there_is_no_gpu(machine: Machine, error: str) -> None:
    """Without a driver, or on a login node with a driver, the CPU is what can be measured."""
    machine.error = error
    assert choose() == ("cpu", [])


def test_auto_warns_about_gpus_that_the_process_does_not_see(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, frozen: Frozen
) -> None:
    """A job that has been given no GPU, and a CPU build of torch, are common mistakes. GPUs that
    the user hides are none."""
    machine.list_gpus(2)
    machine.error = NO_GPU
    device, warnings = choose()
    assert (device, len(warnings)) == ("cpu", 1)
    frozen.text(warnings[0])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose() == ("cpu", [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    frozen.text(choose()[1][0])


def test_the_cpu_is_measured_without_asking_cuda(machine: Machine) -> None:
    """A process that has started CUDA cannot fork ranks: only `auto` alone asks."""
    machine.error = TOO_OLD
    assert choose("gloo") == choose("mpi", "gloo") == ("cpu", [])
    assert backends.choose_device(["auto"], "cpu") == "cpu"
    assert backends.choose(["auto"], "cpu", "torchrun") == ("gloo",)
    assert machine.started == 0


@pytest.mark.parametrize("name", ["gloo", "mpi"])
def test_a_refusal_quotes_cuda_and_names_what_hides_the_gpus(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, frozen: Frozen
) -> None:
    """An old driver must not look like a missing GPU; a variable may be why none is there."""
    machine.error = TOO_OLD
    old = backends.unavailable(name, "cuda", "mpirun") or ""
    assert BROKEN[TOO_OLD] in old
    machine.error = NO_GPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    hidden = backends.unavailable(name, "cuda", "mpirun") or ""
    assert "CUDA_VISIBLE_DEVICES=7" in hidden
    frozen.text(f"{old}\n{hidden}")
    machine.error = None
    assert backends.unavailable(name, "cuda", "mpirun") is None
