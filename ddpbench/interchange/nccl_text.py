"""Read the output of nccl-tests and rccl-tests, from all releases since 2.0.

The rows suffice nearly always: a table without its head, or the end of a log, can be read too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from ddpbench.interchange.command import (
    LAUNCHER,
    count_started_ranks,
    join_commands,
    read_ranks_in_name,
)
from ddpbench.interchange.log import Hints, Row, Section
from ddpbench.interchange.nccl_table import (
    HEADS,
    ROW,
    Figures,
    bounds,
    build_rows,
    read_figures,
    read_layout,
)
from ddpbench.interchange.nccl_tests import (
    PROGRAMS,
    Setup,
    bus_factor,
    format_version,
    parse_program,
)

# A web page takes the # of these lines for a heading and drops it.
VERSION = re.compile(
    r"#?\s*(?P<tool>nccl|rccl)-tests:? [Vv]ersion (?P<version>\S+)(?:.*-library=(?P<code>\d+))?"
)
STARTING = re.compile(r"#?\s*Collective test starting: (\S+)")
SETUP = re.compile(
    r"#?\s*nThread:? (?P<threads>\d+) nGpus:? (?P<gpus>\d+)(?: nRanks:? (?P<each>\d+))? .*?"
    r"warmup ?[iI]ters: \d+\s+iters: (?P<iterations>\d+)(?: agg iters: (?P<aggregated>\d+))?"
    r"(?: validation: \d+)?(?: graph: (?P<graph>\d+))?(?: unalign: (?P<unalign>\d+))?"
)
DEVICES = re.compile(r"#?\s*Using devices")
DEVICE = re.compile(
    r"#?\s*Rank\s+(?P<rank>\d+)\s+(?:Group\s+(?P<group>\d+)\s+)?Pid\s+\d+\s+on\s+(?P<hostname>\S+)"
    r"\s+device\s+\d+\s+\[[^\]]*\]\s*(?P<gpu_name>.*)"
)
CHECKED = re.compile(r"#?\s*Out of bounds values\s*:")
FAILED = re.compile(r"#?\s*Out of bounds values\s*: (\d+) FAILED")
END = re.compile(r"#?\s*Avg bus bandwidth\s*:")
CONCLUDED = re.compile(r"#?\s*Collective test concluded: (\S+)")
OPENINGS = (VERSION, STARTING, SETUP, DEVICES, HEADS)
PRINTED = (DEVICE, CHECKED, END, CONCLUDED)
MARKS = "|".join(e.pattern for e in (*OPENINGS, *PRINTED, ROW))
BLOCKING = re.compile(r"#?\s*Blocking Enabled")
LIBRARY = re.compile(r"\b[NR]CCL version ?:? ?(\d+\.\d+\.\d+)")
AMD = re.compile(r"\bRCCL version|\bAMD |\bRadeon |^# Errors with asterisks", re.MULTILINE)
COMMAND = re.compile(r"(?<![\w.-])([a-z_]+_perf)(?:_mpi)?(?=\s+-)")
# A process has one rank per thread and GPU.
PER_PROCESS = (
    re.compile(r"(?<!\S)(?:-g|--ngpus)[ =]*(\d+)"),
    re.compile(r"(?<!\S)(?:-t|--nthreads)[ =]*(\d+)"),
)
MOST_RANKS = 4096  # the printed rates of larger numbers are equal


@dataclass(frozen=True)
class Part:
    """One start of a test. first: the number of its first line, above the test's own."""

    first: int
    lines: Sequence[str]

    def find(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        """Return the first line that begins so."""
        return next((m for line in self.lines if (m := expression.match(line))), None)


def recognizes(lines: Sequence[str]) -> bool:
    """Return whether a test printed this."""
    known = re.compile(f"{MARKS}|# nThread")
    return any(known.match(line) for line in lines)


def read(path: Path, lines: Sequence[str], hints: Hints) -> tuple[str, list[Section]]:
    """Return the tool and its sections. Raises ValueError with one sentence."""
    sections: list[Section] = []
    errors: list[str] = []
    for part in _parts(lines):
        _refuse_mixed(part)
        try:
            sections.append(_section(path, part, hints))
        except ValueError as error:
            errors.append(str(error))
    if not sections:
        raise ValueError(errors[-1])
    left_out = tuple(f"a test is left out, for it {error}" for error in errors)
    sections[0] = replace(sections[0], left_out=(*left_out, *sections[0].left_out))
    return sections[0].rows[0].case.provider, sections


def _refuse_mixed(part: Part) -> None:
    devices = [m for line in part.lines if (m := DEVICE.match(line))]
    if len({(m["rank"], m["group"]) for m in devices}) < len(devices):
        raise ValueError(
            "lists a rank twice: several tests wrote into it at once, as nccl-tests does under "
            "mpirun when built without MPI=1; give each test a log of its own"
        )


def _parts(lines: Sequence[str]) -> Iterator[Part]:
    """Split the lines into starts of a test. A part ends with the last line that its test printed,
    so the next part begins with the command above its test."""
    start, end, seen, filled = 0, 0, set[int](), False
    for i, line in enumerate(lines):
        kind = next((k for k, each in enumerate(OPENINGS) if each.match(line)), None)
        if kind is not None and (filled or kind in seen):
            yield Part(start + 1, lines[start:end])
            start, seen, filled = end, set(), False
        if kind is not None:
            seen.add(kind)
        row = kind is None and ROW.match(line) is not None
        filled |= row
        if row or kind is not None or any(each.match(line) for each in PRINTED):
            end = i + 1
    yield Part(start + 1, lines[start:])


def _section(path: Path, part: Part, hints: Hints) -> Section:
    """Read one start of a test. Raises ValueError with words that follow "it"."""
    named = part.find(STARTING) or part.find(CONCLUDED)
    name = parse_program(named[1]) if named else None
    layout, damaged = read_layout(part.lines), list[int]()
    table = [*read_figures(part.lines, layout, damaged)]
    left_out = []
    if damaged:
        first = part.first + damaged[0]
        left_out.append(f"line {first} is damaged: {part.lines[damaged[0]][:80]!r}")
        if len(damaged) > 1:
            left_out[0] += f"; so are {len(damaged) - 1} other rows"
    if not table:
        tested = f"{name}_perf" if name else f"the test at line {part.first}"
        raise ValueError(*left_out or [f"has no row of results of {tested}"])
    setup, notes = _setup(path, part, hints, name, table)
    setup = replace(setup, cpu_time=layout.cpu_time)
    if part.find(END) is None:
        left_out.append(
            f"the line '# Avg bus bandwidth' of {setup.program}_perf is missing, and so may be "
            "results above it"
        )
    read_rows = [row for each in table for row in build_rows(setup, layout, each)]
    return setup.section(_mark_wrong(read_rows, part), notes=tuple(notes), left_out=tuple(left_out))


def _mark_wrong(rows: Sequence[Row], part: Part) -> list[Row]:
    """Mark all rows wrong if the end reports values out of bounds and no row does."""
    failed = part.find(FAILED)
    if failed is None or any(row.wrong for row in rows):
        return list(rows)
    return [replace(row, wrong=f"{failed[1]} checks out of bounds, not of which") for row in rows]


# --- what was run ---------------------------------------------------------------------------------


def _setup(
    path: Path, part: Part, hints: Hints, name: str | None, table: Sequence[Figures]
) -> tuple[Setup, list[str]]:
    """Read how the test was called, and what had to be assumed. name: as the test prints it."""
    line, version = part.find(SETUP), part.find(VERSION)
    given = {k: int(v) for k, v in (line.groupdict() if line else {}).items() if v is not None}
    per_process = given.get("threads", 1) * given.get("gpus", 1) * given.get("each", 1)
    world_size, ranks = _read_devices(part, per_process)
    text = "\n".join(part.lines)
    library = version["tool"] if version else "rccl" if AMD.search(text) else "nccl"
    tool = f"{library}-tests"
    notes = []
    if line is None:
        notes.append(
            f"the line '# nThread …' of {tool} is missing: the number of iterations is not known, "
            "and none of the options -m, -z, -G and -u is assumed"
        )
    if not (name and world_size):
        name, world_size, more = _infer_test(path, part, hints, table, name=name, ranks=world_size)
        notes += more
    notes.append(
        f"{tool} prints no -a: its default, the mean over ranks, is assumed; what -J writes has "
        "the whole command line"
    )
    printed, code = LIBRARY.search(text), version and version["code"]
    setup = Setup(
        program=name,
        tool=tool,
        version=version["version"] if version else None,
        library=format_version(int(code)) if code else printed[1] if printed else None,
        iterations=given.get("iterations", 0),
        aggregated=given.get("aggregated", 1),
        graph=given.get("graph", 0),
        blocking=_read_blocking(part),
        average=1,
        unalign=given.get("unalign", 0),
        world_size=world_size,
        ranks=ranks,
    )
    return setup, notes


def _read_blocking(part: Part) -> int:
    """Read -z from the line that it prints."""
    line = next((line for line in part.lines if BLOCKING.match(line)), "")
    if "outer iteration" in line:
        return 3
    return 2 if "no barrier" in line else int(bool(line))


def _read_devices(part: Part, per_process: int) -> tuple[int, tuple[dict[str, Any], ...]]:
    """Return the number of ranks, 0 if unknown, and each rank's facts.

    per_process: number of GPUs of a process.
    """
    devices = [m for line in part.lines if (m := DEVICE.match(line))]
    numbers = [int(m["rank"]) for m in devices]
    groups = Counter(m["group"] for m in devices)
    if not devices or len(set(groups.values())) > 1:
        return 0, ()
    if numbers[0] and len(groups) == 1 and numbers == [*range(numbers[0], numbers[-1] + 1)]:
        return numbers[-1] + 1, ()  # the end of the list
    if numbers != [*range(len(devices))] or len(devices) % per_process:
        return 0, ()
    one = [m for m in devices if m["group"] == devices[0]["group"]]
    return len(one), tuple({"hostname": m["hostname"], "gpu_name": m["gpu_name"]} for m in one)


def _infer_test(
    path: Path, part: Part, hints: Hints, table: Sequence[Figures], *, name: str | None, ranks: int
) -> tuple[str, int, list[str]]:
    """Return the test, the number of ranks and notes on their sources, if the log lacks either.

    Both must agree with busbw / algbw, which may be the only source.
    """
    above = join_commands([*takewhile(lambda line: not ROW.match(line), part.lines)])
    command = next((x for x in above if COMMAND.search(x) and not x.startswith("#")), "")
    called = COMMAND.search(command)
    in_name = (p for p in sorted(PROGRAMS, key=len, reverse=True) if f"{p}_perf" in path.name)
    asked = next((p for p, op in PROGRAMS.items() if op == hints.operation), None)
    if hints.operation and asked is None:
        raise ValueError(f"is of nccl-tests, which has no test of {hints.operation}: change --op")
    rates = "busbw / algbw"
    names = {
        "the log": name,
        "--op": asked,
        "the command above": called and parse_program(called[1]),
        "the file's name": next(in_name, None),
    }
    counts = {
        "the log": ranks,
        "--ranks": hints.ranks,
        "the command above": _count_started(command),
        "the file's name": read_ranks_in_name(path),
    }
    name_from, name = next(((k, v) for k, v in names.items() if v), (rates, None))
    ranks_from, known = next(((k, v) for k, v in counts.items() if v), (rates, None))
    name, ranks = _find_agreeing(name, known, table)
    notes = []
    if name_from != "the log":
        notes.append(f"the log does not name its test: {name}_perf is from {name_from}")
    if ranks_from != "the log":
        notes.append(f"the log does not list all devices: {ranks} ranks is from {ranks_from}")
    return name, ranks, notes


def _find_agreeing(
    name: str | None, ranks: int | None, table: Sequence[Figures]
) -> tuple[str, int]:
    """Return the only test and number of ranks with these rates. Raises ValueError."""
    low, high = _bound_ratio(table)
    if low > high:
        raise ValueError(
            "has a table whose rows differ in busbw / algbw, so they are of several tests or "
            "numbers of ranks: give each a file"
        )
    fitting = [
        (p, n)
        for p in ([name] if name else [p for p in PROGRAMS if _fits(p, table[0])])
        for n in ([ranks] if ranks else range(1, MOST_RANKS + 1))
        if low <= bus_factor(p, n) <= high
    ]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        tested = f"{name or 'any test'} on {ranks or 'any number of'} ranks"
        raise ValueError(
            f"has rates that do not fit {tested} (busbw / algbw is {low:.4g}): name the test with "
            "--op and the number of ranks with --ranks"
        )
    tests = [*dict.fromkeys(PROGRAMS[p] for p, _ in fitting)]
    if len(tests) > 1:
        raise ValueError(
            f"does not name its test, which may be {', '.join(tests)}: add --op, as --op {tests[0]}"
        )
    raise ValueError(f"does not tell the number of ranks of {tests[0]}: add --ranks, as --ranks 8")


def _count_started(command: str) -> int | None:
    """How many ranks this command starts: its processes, with the GPUs of each."""
    processes = (
        count_started_ranks(command, "_perf") if LAUNCHER.search(command) else int(bool(command))
    )
    if not processes:
        return None
    for option in PER_PROCESS:
        match = option.search(command)
        processes *= int(match[1]) if match else 1
    return processes


def _bound_ratio(table: Sequence[Figures]) -> tuple[float, float]:
    """Return the range of busbw / algbw that fits all rows; both are printed rounded."""
    low, high = 0.0, float("inf")
    for _, algbw, busbw, _ in (side for each in table for side in each.sides):
        (least, most), (slowest, fastest) = bounds(algbw), bounds(busbw)
        low = max(low, slowest / most)
        high = min(high, fastest / least if least else high)
    return low, high


def _fits(name: str, row: Figures) -> bool:
    """Return whether a test of this name prints these columns."""
    reduces = name in ("all_reduce", "reduce_scatter", "reduce", "sendrecv")
    rooted = name in ("broadcast", "reduce", "gather", "scatter")
    has_root = row.root is not None and row.root >= 0
    return reduces == (row.reduce_op not in (None, "none")) and rooted == has_root
