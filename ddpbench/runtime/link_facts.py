"""Links as the kernel reports them in /sys: a device's PCIe link and the ports of RDMA adapters.

Rates are bytes per second in one direction. They are what a link signals, less its encoding;
packets' headers take a part of that, too. What is not known is None.
"""

from __future__ import annotations

import re
from pathlib import Path

from ddpbench.runtime.cpu import ROOT, read, search_line

# Transfers per second of a lane → the share that is data, by the PCI Express Base Specification:
# 8b/10b encoding up to 5 GT/s (revision 2.0), 128b/130b up to 32 GT/s (3.0 to 5.0, section 4.2.2),
# flits of 256 bytes, 14 of them for error correction, from 64 GT/s on (6.0, section 4.2.3).
# A link of 16 lanes at 16 GT/s carries 31.5 GB/s.
ENCODINGS = ((5e9, 8 / 10), (32e9, 128 / 130), (float("inf"), 242 / 256))


def pcie_link(bus: str, root: Path = ROOT) -> dict[str, float] | None:
    """Return width, width that both ends allow, and rate of the PCIe link of a device.

    An idle GPU lowers its speed, so the speed is the highest that both ends allow. A virtual
    machine may show an end that does not exist, so nothing is known there.
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
