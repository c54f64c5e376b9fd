"""Facts about the GPU that this rank uses, ready for JSON. No query creates a context on a GPU.

NVML (the module pynvml) reports NVIDIA's GPUs. Unknown facts are None.
"""

from __future__ import annotations

import re
from ctypes import byref
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpbench.runtime import devices
from ddpbench.runtime.cpu import ROOT, or_none, read, search_line

if TYPE_CHECKING:
    import torch

# NVML renamed its throttle reasons to event reasons in driver 535, and may drop the old names.
REASON = re.compile(r"nvmlClocks(Event|Throttle)Reason(?!s|None$|All$)(\w+)")
REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
CUDA = devices.get("cuda")
GPU, SWITCH = 0, 2  # what is at the other end of an NVLink
DEVICES = "sys/bus/pci/devices"
UNCORRECTED, SINCE_DRIVER_LOADED = 1, 0  # of memory errors: kind, counter


@dataclass(frozen=True)
class Nvml:
    """NVML's answers about one GPU; None for a query that it refuses."""

    module: Any
    gpu: Any

    def query(self, function: str, *arguments: object) -> Any:
        return or_none(lambda: getattr(self.module, function)(self.gpu, *arguments))

    def field(self, name: str, scope: int = 0) -> int | None:
        """Return the value of a field of NVML, of one link if `scope` is its number."""
        number = getattr(self.module, name, None)
        values = self.query("nvmlDeviceGetFieldValues", [(number, scope)])
        return int(values[0].value.uiVal) if values and values[0].nvmlReturn == 0 else None

    def is_active(self, link: int) -> bool | None:
        """Return whether an NVLink is up, though it may sleep. GPUs since Hopper have a field."""
        state = self.field("NVML_FI_DEV_NVLINK_GET_STATE", link)
        state = self.query("nvmlDeviceGetNvLinkState", link) if state is None else state
        return None if state is None else state != 0


def gpu() -> dict[str, Any]:
    """Return index, name and UUID of the GPU that this rank already uses."""
    index = or_none(CUDA.in_use)
    return {
        "gpu_index": index,
        "gpu_name": getattr(_properties(), "name", None),
        "gpu_uuid": None if index is None else or_none(partial(CUDA.identity, index)),
    }


def gpu_state() -> dict[str, object] | None:
    """Return clock, throttle reasons and temperature of the GPU that this rank uses, from NVML."""
    nvml = _open_nvml()
    if nvml is None:
        return None
    sm = nvml.query("nvmlDeviceGetClockInfo", 1)  # in MHz
    return {
        "sm_clock_hertz": sm and sm * 10**6,
        "throttle_reasons": _throttle_reasons(nvml),
        "temperature_celsius": nvml.query("nvmlDeviceGetTemperature", 0),
    }


def gpu_links() -> dict[str, object]:
    """Return how this rank's GPU reaches others: its PCIe link, NVLinks, and their fabric.

    gpu_nvlinks   one entry for each other end: "switch", or the place of a GPU on the PCI bus; none
                  without NVLinks; None if NVML does not report it
    gpu_fabric    equal for GPUs that NVLinks connect across hosts
    """
    nvml = _open_nvml()
    bus = _bus(nvml)
    # The GPU of a Grace superchip reaches its host over other links than PCIe.
    reached_otherwise = nvml is not None and nvml.field("NVML_FI_DEV_C2C_LINK_COUNT")
    links = None if nvml is None else _nvlinks(nvml)
    return {
        "gpu_bus": bus,
        "gpu_pcie": pcie_link(bus, ROOT) if bus and not reached_otherwise else None,
        "gpu_nvlinks": links,
        "gpu_nvlinks_active": None if links is None else sum(link["count"] for link in links),
        "gpu_fabric": nvml and or_none(partial(_fabric, nvml)),
    }


def gpu_health() -> dict[str, object]:
    """Return NUMA node and memory of this rank's GPU, and what its error correction reports."""
    nvml, index = _open_nvml(), or_none(CUDA.in_use)
    node = or_none(lambda: int(read(ROOT / DEVICES / str(_bus(nvml)) / "numa_node") or "-1"))
    errors = (UNCORRECTED, SINCE_DRIVER_LOADED)
    return {
        "gpu_numa_node": None if node is None or node < 0 else node,
        "gpu_free_nbytes": or_none(lambda: CUDA.free_nbytes(_device(index))),
        "gpu_nbytes": or_none(lambda: CUDA.total_nbytes(_device(index))),
        "gpu_memory_errors": nvml and nvml.query("nvmlDeviceGetTotalEccErrors", *errors),
    }


def _device(index: int | None) -> torch.device:
    import torch

    if index is None:
        raise ValueError("no GPU is in use")
    return torch.device("cuda", index)


def _properties() -> Any:
    index = or_none(CUDA.in_use)
    return None if index is None else or_none(partial(CUDA.properties, index))


def _bus(nvml: Nvml | None) -> str | None:
    """Return the place of the GPU in use on the PCI bus, as /sys names it.

    Some versions of torch do not report it.
    """
    info = _properties()
    if hasattr(info, "pci_bus_id"):
        return f"{info.pci_domain_id:04x}:{info.pci_bus_id:02x}:{info.pci_device_id:02x}.0"
    return None if nvml is None else _place(nvml.query("nvmlDeviceGetPciInfo"))


def _place(pci_info: Any) -> str | None:
    """Return the place on the PCI bus in NVML's answer; /sys has a shorter number of the domain."""
    return None if pci_info is None else str(pci_info.busId).lower()[-len("0000:00:00.0") :]


def _open_nvml() -> Nvml | None:
    """Return NVML's view of the GPU in use; None without NVML."""
    if (uuid := gpu()["gpu_uuid"]) is None:  # a rank on the CPU need not import pynvml
        return None
    module: Any = or_none(lambda: import_module("pynvml"))
    if module is None:
        return None
    or_none(module.nvmlInit)
    handle = or_none(lambda: module.nvmlDeviceGetHandleByUUID(uuid))
    return None if handle is None else Nvml(module, handle)


def explain_unknown_gpu() -> str:
    """Return why NVML reports nothing about a GPU."""
    missing = find_spec("pynvml") is None
    return "pip install nvidia-ml-py" if missing else "NVML does not list these GPUs"


def _throttle_reasons(nvml: Nvml) -> list[str] | None:
    """Return why the clocks are lowered: NVML's names without their common prefix."""
    answers = (nvml.query(function) for function in REASONS)
    bits = next((answer for answer in answers if answer is not None), None)
    names: dict[int, str] = {}
    for name, bit in vars(nvml.module).items():
        if match := REASON.fullmatch(name):
            names.setdefault(bit, match[2])  # if a bit has two names, the older is deprecated
    set_bits = (n for n in range(64) if (bits or 0) >> n & 1)
    return None if bits is None else [names.get(1 << n, f"bit {n}") for n in set_bits]


def _nvlinks(nvml: Nvml) -> list[dict[str, Any]]:
    """Return the active NVLinks: where they lead, how many, and the rate of each per direction."""
    ends: dict[tuple[str, float | None], int] = {}
    for link in range(nvml.module.NVML_NVLINK_MAX_LINKS):
        if not nvml.is_active(link):
            continue
        speed = nvml.field("NVML_FI_DEV_NVLINK_GET_SPEED", link)
        speed = speed or nvml.field("NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON")
        end = _other_end(nvml, link), speed * 1e6 if speed else None
        ends[end] = ends.get(end, 0) + 1
    return [
        {"to": to, "count": count, "bytes_per_second": rate} for (to, rate), count in ends.items()
    ]


def _other_end(nvml: Nvml, link: int) -> str:
    """Return "switch", the place of the GPU at the other end of an NVLink, or "other".

    An end that a virtual machine does not see counts as a switch, as for NCCL.
    """
    end = nvml.query("nvmlDeviceGetNvLinkRemoteDeviceType", link)
    if end not in (GPU, SWITCH, None):
        return "other"
    remote = nvml.query("nvmlDeviceGetNvLinkRemotePciInfo", link) if end == GPU else None
    bus = _place(remote)
    return bus if bus and (ROOT / DEVICES / bus).exists() else "switch"


def _fabric(nvml: Nvml) -> str | None:
    """Return the name of the NVLink fabric that this GPU shares with other hosts."""
    info = nvml.module.c_nvmlGpuFabricInfo_t()
    nvml.module.nvmlDeviceGetGpuFabricInfo(nvml.gpu, byref(info))
    cluster = bytes(info.clusterUuid)
    return f"{cluster.hex()}/{info.cliqueId}" if any(cluster) else None


# --- links as the kernel reports them in /sys -----------------------------------------------------

# Transfers per second of a lane → the share that is data, by the PCI Express Base Specification:
# 8b/10b encoding, then 128b/130b, then flits of 256 bytes. Headers of packets are not deducted.
ENCODINGS = ((5e9, 8 / 10), (32e9, 128 / 130), (float("inf"), 242 / 256))


def pcie_link(bus: str, root: Path = ROOT) -> dict[str, float] | None:
    """Return width, width that both ends allow, and rate of the PCIe link of a device.

    An idle GPU lowers its speed, so the speed is the highest that both ends allow. None in a
    virtual machine, which may show an end that does not exist.
    """
    if search_line(r"^flags\s*:.*\b(hypervisor)\b", read(root / "proc/cpuinfo")):
        return None
    device = (root / "sys/bus/pci/devices" / bus).resolve()
    ends = (device, device.parent)
    widths = [_number(end / "max_link_width") for end in ends]
    speeds = [_number(end / "max_link_speed") for end in ends]
    width = _number(device / "current_link_width")
    speed = min(filter(None, speeds), default=0)
    if not width or not speed:
        return None
    share = next(share for most, share in ENCODINGS if speed * 1e9 <= most)
    return {
        "width": width,
        "width_allowed": min(filter(None, widths), default=width),
        "transfers_per_second": speed * 1e9,
        "bytes_per_second": speed * 1e9 * share * width / 8,
    }


def rdma_ports(root: Path = ROOT) -> dict[str, float]:
    """Return the rate of each active port of an RDMA adapter, by the name NCCL_IB_HCA uses."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return {
        f"{port.parts[-3]}:{port.name}": gigabits * 1e9 / 8  # from "400 Gb/sec (4X NDR)"
        for port in ports
        if (read(port / "state") or "").startswith("4:") and (gigabits := _number(port / "rate"))
    }


def _number(file: Path) -> float | None:
    """Return the number with which a file begins; None for "Unknown"."""
    match = re.match(r"[\d.]+", read(file) or "")
    return float(match[0]) if match else None
