"""Read the JSON that nccl-tests writes with -J: its figures with the whole command line."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddpbench.interchange.log import Hints, Section
from ddpbench.interchange.nccl_tests import (
    AVERAGES,
    ISSUES,
    Setup,
    build_row,
    format_version,
    parse_program,
)
from ddpbench.records import codec
from ddpbench.runtime.environment import allowed_variables

START = re.compile(r"^\{", re.MULTILINE)  # Markdown may stand above
AMD = re.compile(r"\bAMD\b|\bRadeon\b")
MOST_RANKS = 2**20


@dataclass(frozen=True)
class _Side:
    time: float | None = None
    cpu_time: float | None = None
    nwrong: float | None = None


@dataclass(frozen=True)
class _Result:
    size: int
    count: int
    type: str
    redop: str
    root: str
    out_of_place: _Side | None = None
    in_place: _Side | None = None


@dataclass(frozen=True)
class _Device:  # the first of each process
    hostname: str
    device_info: str
    group: int = 0


@dataclass(frozen=True)
class _Config:
    nthreads: int
    ngpus: int
    iterations: int
    devices: tuple[_Device, ...]
    aggregated_iterations: int = 1
    graph: int = 0


@dataclass(frozen=True)
class _File:
    args: tuple[str, ...]
    config: _Config
    results: tuple[_Result, ...]
    end_time: str
    start_time: str = ""
    nccl_version: int = 0
    env: tuple[str, ...] = ()


def recognizes(lines: Sequence[str]) -> bool:
    """Return whether a test wrote this with -J."""
    text = "\n".join(lines)
    return START.search(text) is not None and '"args"' in text and "_perf" in text


def read(path: Path, lines: Sequence[str], hints: Hints) -> tuple[str, list[Section]]:
    """Return the tool and its one section. Raises ValueError with one sentence."""
    text = "\n".join(lines)
    start = START.search(text)
    value, _ = json.JSONDecoder().raw_decode(text, start.start() if start else 0)
    data = codec.decode(_File, value)
    setup = _read_setup(data)
    rows = []
    for result in data.results:
        for place, side in (("out", result.out_of_place), ("in", result.in_place)):
            if side is None or not result.size:
                continue
            timed = replace(setup, cpu_time=side.cpu_time is not None)
            case = timed.case(
                result.type,
                result.redop,
                root=int(result.root),
                nbytes=result.size,
                count=result.count,
                place=place,
            )
            seconds = (side.time if side.cpu_time is None else side.cpu_time) or 0.0
            checked = side.nwrong is not None
            rows.append(build_row(setup, case, seconds * 1e-6, checked, side.nwrong))
    return setup.tool, [setup.section(rows, started=data.start_time)]


def _read_setup(data: _File) -> Setup:
    config, args = data.config, data.args
    if not args or not config.devices:
        raise ValueError("$.args or $.config.devices is empty")
    variables = allowed_variables(dict(each.partition("=")[::2] for each in data.env))
    devices = [d for d in config.devices if d.group == config.devices[0].group]
    gpus = config.nthreads * config.ngpus
    if not 0 < gpus <= MOST_RANKS:
        raise ValueError(f"$.config has {gpus} GPUs for each process")
    ranks = tuple(
        {"hostname": d.hostname, "gpu_name": d.device_info, "variables": variables}
        for d in devices
        for _ in range(gpus)
    )
    return Setup(
        program=parse_program(args[0]),
        tool="rccl-tests" if AMD.search(devices[0].device_info) else "nccl-tests",
        version=None,
        library=format_version(data.nccl_version) if data.nccl_version else None,
        iterations=config.iterations,
        aggregated=config.aggregated_iterations,
        graph=config.graph,
        blocking=_read_option(args, "-z", "--blocking", 0, ISSUES),
        average=_read_option(args, "-a", "--average", 1, AVERAGES),
        unalign=_read_option(args, "-u", "--unalign", 0, range(2**31)),
        world_size=len(ranks),
        ranks=ranks,
    )


def _read_option(
    args: Sequence[str], short: str, long: str, default: int, known: Container[int]
) -> int:
    """Read an option's value as getopt does: -a 3, -a3, --average 3 or --average=3."""
    value = str(default)
    for word, following in zip(args, [*args[1:], ""], strict=True):
        if word in (short, long):
            value = following
        elif word.startswith(f"{long}="):
            value = word.partition("=")[2]
        elif word.startswith(short) and word[2:].isdigit():
            value = word[2:]
    if not value.isdigit() or int(value) not in known:
        raise ValueError(f"$.args has {short} {value!r}, which ddpbench does not know")
    return int(value)
