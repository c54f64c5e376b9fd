"""What is said about a GPU: from torch, from an NVML of either generation, and from the kernel."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ddpbench.runtime import gpu_facts

BODY = "1f2e3d4c-0000-1111-2222-333344445555"
PROPERTIES = {
    "name": "NVIDIA H200", "uuid": BODY, "pci_domain_id": 0, "pci_bus_id": 0x65, "pci_device_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The GPU that torch says it uses; torch's module is where this suite ends."""
    told = SimpleNamespace(**PROPERTIES)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, 140 << 30))
    return told


def refuse(*_: object) -> Any:
    raise OSError("Not Supported")


def a_nvml(monkeypatch: pytest.MonkeyPatch, handles: dict[str, str], **queries: Any) -> None:
    """Let this process import a pynvml that has these handles by UUID, and these functions."""
    module = ModuleType("pynvml")
    vars(module).update(
        NVML_NVLINK_MAX_LINKS=4,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: handles[uuid],
        nvmlDeviceGetClockInfo=lambda gpu, clock: {1: 1980, 2: 3201}[clock],
        nvmlDeviceGetTemperature=refuse,
        nvmlDeviceGetNvLinkState=lambda gpu, link: 1 if link < 2 else refuse(),
        **queries,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)


BEFORE_535 = {
    "nvmlClocksThrottleReasonNone": 0,
    "nvmlClocksThrottleReasonSwPowerCap": 4,
    "nvmlClocksThrottleReasonAll": 0x1FF,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 4 | 1 << 40,
}
SINCE_535 = {
    "nvmlClocksEventReasonApplicationsClocksSetting": 2,
    "nvmlClocksEventReasonUserDefinedClocks": 2,
    "nvmlClocksEventReasonSwPowerCap": 4,
    "nvmlClocksEventReasonAll": 0x1FF,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 6,
}


@pytest.mark.parametrize(
    ("queries", "reasons"),
    [
        (BEFORE_535, ["SwPowerCap", "bit 40"]),
        (SINCE_535, ["ApplicationsClocksSetting", "SwPowerCap"]),
        ({}, None),
    ],
    ids=["old names", "new names", "neither"],
)
def test_throttle_reasons_have_one_name_in_both_generations(
    queries: dict[str, Any], reasons: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML renamed functions and bits; what ddpbench says did not change, and a refused query, as
    that of the temperature, leaves the others."""
    a_nvml(monkeypatch, {f"GPU-{BODY}": "gpu"}, **queries)
    assert gpu_facts.gpu_state() == {
        "sm_clock_hertz": 1_980_000_000,
        "throttle_reasons": reasons,
        "temperature_celsius": None,
    }


def test_without_nvml_torch_still_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pynvml is missing, or has no driver, the facts of torch remain and the rest is None."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_facts.gpu_state() is None
    assert gpu_facts.gpu() == {
        "gpu_index": 2, "gpu_name": "NVIDIA H200", "gpu_uuid": f"GPU-{BODY}",
    }  # fmt: skip
    links, health = gpu_facts.gpu_links(), gpu_facts.gpu_health()
    assert (links["gpu_bus"], links["gpu_nvlinks"]) == ("0000:65:00.0", None)
    assert (health["gpu_free_nbytes"], health["gpu_nbytes"]) == (60 << 30, 140 << 30)
    json.dumps([links, health])


# --- the real pynvml ------------------------------------------------------------------------------


def test_pynvml_has_what_is_asked_of_it() -> None:
    """Each name of NVML in the source exists in the pynvml that is installed; of two names for one
    thing, one does."""
    nvml = pytest.importorskip("pynvml")
    source = Path(gpu_facts.__file__).read_text()
    names = set(re.findall(r"\b(?:c_)?nvml[A-Z]\w+|NVML_\w+", source))
    names -= {"nvmlClocks", "nvmlReturn", *gpu_facts.REASONS}
    assert [name for name in sorted(names) if not hasattr(nvml, name)] == []
    assert any(hasattr(nvml, name) for name in gpu_facts.REASONS)
    assert [name for name in dir(nvml) if gpu_facts.REASON.fullmatch(name)]
    assert gpu_facts.GPU == nvml.NVML_NVLINK_DEVICE_TYPE_GPU
    assert gpu_facts.SWITCH == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    assert gpu_facts.UNCORRECTED == nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    assert gpu_facts.SINCE_DRIVER_LOADED == nvml.NVML_VOLATILE_ECC


def test_nvlinks_are_counted_by_where_they_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 links lead to a switch, one to another GPU, and one to what is not seen here, which counts
    as a switch; a link without an answer is none."""
    state, speed = object(), object()
    ends = {16: "00000000:1B:00.0", 17: "0FFFFFFF:FF:FF.0"}

    def read_field(gpu: str, fields: list[tuple[object, int]]) -> list[SimpleNamespace]:
        ((field, link),) = fields
        value = SimpleNamespace(uiVal=26_562 if field is speed else 1)
        return [SimpleNamespace(value=value, nvmlReturn=0 if link < 18 else 2)]

    a_nvml(
        monkeypatch, {f"GPU-{BODY}": "gpu"}, NVML_FI_DEV_NVLINK_GET_STATE=state,
        NVML_FI_DEV_NVLINK_GET_SPEED=speed, nvmlDeviceGetFieldValues=read_field,
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda gpu, link: 0 if link in ends else 2,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda gpu, link: SimpleNamespace(busId=ends[link]),
    )  # fmt: skip
    sys.modules["pynvml"].NVML_NVLINK_MAX_LINKS = 20  # type: ignore[attr-defined]
    (tmp_path / "sys/bus/pci/devices/0000:1b:00.0").mkdir(parents=True)
    monkeypatch.setattr(gpu_facts, "ROOT", tmp_path)
    links = gpu_facts.gpu_links()
    assert links["gpu_nvlinks"] == [
        {"to": "switch", "count": 17, "bytes_per_second": 26.562e9},
        {"to": "0000:1b:00.0", "count": 1, "bytes_per_second": 26.562e9},
    ]
    assert links["gpu_nvlinks_active"] == 18


# --- /sys -----------------------------------------------------------------------------------------


def a_device(root: Path, speed: str, width: int, port: tuple[str, int], now: str = "") -> None:
    """Put a GPU at 0000:65:00.0 behind a port into a made-up /sys. Idle, its speed is `now`."""
    folder = root / "sys/devices/pci0000:64/0000:64:00.0"
    gpu = folder / "0000:65:00.0"
    gpu.mkdir(parents=True)
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    (root / "sys/bus/pci/devices/0000:65:00.0").symlink_to(gpu)
    files = {
        folder / "max_link_speed": port[0], folder / "max_link_width": port[1],
        gpu / "max_link_speed": speed, gpu / "max_link_width": 16,
        gpu / "current_link_speed": now or speed, gpu / "current_link_width": width,
    }  # fmt: skip
    for file, value in files.items():
        file.write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("speed", "width", "port", "now", "rate", "allowed"),
    [
        ("5.0 GT/s PCIe", 16, ("5.0 GT/s PCIe", 16), "", 8.0e9, 16),
        ("16.0 GT/s PCIe", 16, ("16.0 GT/s PCIe", 16), "2.5 GT/s PCIe", 31.508e9, 16),
        ("32.0 GT/s PCIe", 8, ("16.0 GT/s PCIe", 16), "16.0 GT/s PCIe", 15.754e9, 16),
        ("32.0 GT/s PCIe", 16, ("Unknown", 0), "2.5 GT/s PCIe", 63.015e9, 16),
    ],
    ids=["2nd", "idle", "narrow", "no port"],
)
def test_the_rate_of_a_pcie_link(
    speed: str, width: int, port: tuple[str, int], now: str, rate: float, allowed: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A rate is speed × width, less the encoding of its generation. An idle GPU's low speed does
    not count; a slot that has fewer lanes than the GPU allows no more."""
    a_device(tmp_path, speed, width, port, now)
    link = gpu_facts.pcie_link("0000:65:00.0", tmp_path)
    assert link is not None
    assert link["bytes_per_second"] == pytest.approx(rate, rel=1e-4)
    assert (link["width"], link["width_allowed"]) == (width, allowed)


def test_a_virtual_machine_tells_nothing_of_slots(tmp_path: Path) -> None:
    """What a hypervisor shows of a slot need not exist, so it is neither a limit nor a warning;
    without files there is no link, instead of one of rate zero."""
    assert gpu_facts.pcie_link("0000:65:00.0", tmp_path) is None
    a_device(tmp_path, "32.0 GT/s PCIe", 1, ("2.5 GT/s PCIe", 1))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nflags\t\t: fpu hypervisor lahf_lm\n")
    assert gpu_facts.pcie_link("0000:65:00.0", tmp_path) is None


def test_active_rdma_ports_tell_their_rate(tmp_path: Path) -> None:
    """400 Gb/s are 50e9 bytes a second; a port that is down carries nothing."""
    for name, state, rate in (
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("mlx5_1", "4: ACTIVE", "12.5 Gb/sec (1X FDR10)"),
        ("mlx5_2", "1: DOWN", "400 Gb/sec (4X NDR)"),
    ):
        port = tmp_path / f"sys/class/infiniband/{name}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    assert gpu_facts.rdma_ports(tmp_path) == {"mlx5_0:1": 50e9, "mlx5_1:1": 1.5625e9}
