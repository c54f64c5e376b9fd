"""What is read of this process's load, and what is stored of all ranks'."""

import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch

from ddpbench.records.load import Load, join_loads
from ddpbench.runtime.load import LoadMeter

UUIDS = ("1f2e3d4c-0000-1111-2222-333344445555", "9f2e3d4c-0000-1111-2222-333344445555")


def compute(seconds: float) -> None:
    """Use the core for so much CPU time of this thread."""
    begin = time.thread_time()
    while time.thread_time() < begin + seconds:
        pass


def test_it_reads_the_cpu_time_since_the_last_reading_and_the_resident_memory() -> None:
    """A reading covers what this process computed since the one before, in any thread."""
    stamps = [(time.perf_counter(), time.process_time())]
    meter = LoadMeter()
    stamps.append((time.perf_counter(), time.process_time()))
    compute(0.1)
    stamps.append((time.perf_counter(), time.process_time()))
    busy = meter.read()
    stamps.append((time.perf_counter(), time.process_time()))
    # It read its clocks somewhere between two stamps, however far apart a busy host made them.
    (least_wall, least_cpu), (most_wall, most_cpu) = (
        (end[0] - begin[0], end[1] - begin[1])
        for begin, end in (stamps[1:3], (stamps[0], stamps[3]))
    )
    assert 0.98 * least_cpu / most_wall < busy.cpu_cores < 1.02 * most_cpu / least_wall
    rss = psutil.Process().memory_info().rss
    assert busy.memory_nbytes == pytest.approx(rss, rel=0.05)


def test_a_reading_imports_no_torch() -> None:
    """A meter of a process that does not use torch leaves it alone, and knows no GPU."""
    code = """
import sys
from ddpbench.runtime.load import LoadMeter
load = LoadMeter().read()
assert "torch" not in sys.modules
print(load.gpu_share, load.gpu_memory_nbytes)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "None None\n"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of torch's: this process holds memory on the second, its current one is the first.

    torch's module is where this suite ends.
    """
    gpus = [SimpleNamespace(name="NVIDIA H200", uuid=uuid) for uuid in UUIDS]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: device.index * 5 << 30)


@pytest.mark.usefixtures("two_gpus")
def test_the_gpu_is_the_one_that_holds_this_process_s_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its use is that of NVML's last sample period; without NVML, only its memory is known."""

    def read_rates(gpu: str) -> SimpleNamespace:
        assert gpu == f"handle of GPU-{UUIDS[1]}"
        return SimpleNamespace(gpu=17, memory=3)

    module = ModuleType("pynvml")
    vars(module).update(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetUtilizationRates=read_rates,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    load = LoadMeter().read()
    assert load.gpu_share == pytest.approx(0.17)
    assert load.gpu_memory_nbytes == 5 << 30
    monkeypatch.setitem(sys.modules, "pynvml", None)
    load = LoadMeter().read()
    assert (load.gpu_share, load.gpu_memory_nbytes) == (None, 5 << 30)


def test_over_the_ranks_are_the_median_and_the_most() -> None:
    """A rank without a GPU does not count as an idle one."""
    loads = [Load(1.0, 1.0, 300), Load(0.2, 0.2, 500, 0.5, 7), Load(0.4, 0.4, 100, 0.9, 9)]
    assert join_loads(loads) == Load(0.4, 1.0, 500, 0.7, 9)
    assert join_loads(loads[:1]) == Load(1.0, 1.0, 300)
