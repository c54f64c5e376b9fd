"""Read the output of the OSU Micro-Benchmarks: collectives, and point to point between two ranks.

OSU times each call in each rank, with a barrier after it, and prints the mean over calls and ranks.
Where its size is one rank's block, ddpbench multiplies it to get the total buffer. OSU prints no
number of ranks: an option, the command above or the file's name must give it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddpbench.catalog.dtypes import DTYPES
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.interchange.command import (
    LAUNCHER,
    count_started_ranks,
    join_commands,
    read_ranks_in_name,
)
from ddpbench.interchange.log import Hints, Row, Section
from ddpbench.records.schema import Case

EXIT_ENTRY = "exit-entry"
WINDOW = "window of messages and one answer / messages"


@dataclass(frozen=True)
class Test:
    """A benchmark of OSU's. `blocks`: its size is that of one rank's block."""

    operation: str
    program: str  # less `osu_`
    blocks: bool = False
    timed: str = EXIT_ENTRY
    ranks: int | None = None  # None: as many as it was started with
    ways: int = 0  # its figure is a rate, of so many messages at a time; 0: it is a time


# The title in the first line, less `OSU MPI`, `Test` and the version.
TESTS = {
    "Allreduce Latency": Test("all_reduce", "allreduce"),
    "Allgather Latency": Test("all_gather", "allgather", blocks=True),
    "Broadcast Latency": Test("broadcast", "bcast"),
    "Reduce Latency": Test("reduce", "reduce"),
    "Reduce_scatter Latency": Test("reduce_scatter", "reduce_scatter"),
    "All-to-All Personalized Exchange Latency": Test("all_to_all", "alltoall", blocks=True),
    "Gather Latency": Test("gather", "gather", blocks=True),
    "Scatter Latency": Test("scatter", "scatter", blocks=True),
    "Barrier Latency": Test("barrier", "barrier"),
    "Latency": Test("send_recv", "latency", timed="half the round trip", ranks=2),
    "Bandwidth": Test("send_recv", "bw", timed=WINDOW, ranks=2, ways=1),
    "Bi-Directional Bandwidth": Test("bidirectional", "bibw", timed=WINDOW, ranks=2, ways=2),
}
TYPES = {
    "MPI_CHAR": "int8",
    "MPI_INT": "int32",
    "MPI_FLOAT": "float32",
    "MPI_DOUBLE": "float64",
}
TITLE = re.compile(
    r"(?:#\s*|(?=OSU MPI))OSU (?P<title>\S.*?) Test"
    r"(?: \(?[Vv](?:ersion )?(?P<version>\d[^)\s]*)\)?)?$"
)
MPI = re.compile(r"MPI(?P<accelerator>-\w+(?: MANAGED)?)? (?P<title>.+)")
DATATYPE = re.compile(r"#?\s*Datatype: (\w+)\.?$")
BUFFERS = re.compile(r"#?\s*Send Buffer on (\w+).* Receive Buffer on (\w+)")
HEADS = re.compile(
    r"#?\s*(?:Size\s+(?:Transmit Size\s+)?)?(?:(?:Avg )?Latency ?\(us\)|Bandwidth \(MB/s\))"
)
MARKS = "|".join(each.pattern for each in (TITLE, DATATYPE, HEADS, BUFFERS))
# A head may be one space away from the next.
HEAD = re.compile(
    r"(?:Avg |Min |Max )?Latency ?\(us\)|Bandwidth \(MB/s\)|P\d+ Tail \w+\(\S+?\)|Transmit Size|\w+"
)
PROGRAM = re.compile(r"(?<![\w-])osu_(\w+)")
NUMBER = re.compile(r"\d+(\.\d+)?")
CELL = re.compile(r"\d+(\.\d+)?|Pass|Fail")
WHOLE = re.compile(r"(\.\d\d|Pass|Fail)$")  # a last line that was not cut


@dataclass(frozen=True)
class Setup:
    """One start of a benchmark."""

    test: Test
    version: str | None
    device: str
    world_size: int
    buffers: str = "osu"


@dataclass(frozen=True)
class Part:
    """The lines [start, end) of one start. title: None where it is missing."""

    start: int
    end: int
    title: re.Match[str] | None


def recognizes(lines: Sequence[str]) -> bool:
    """Return whether a benchmark printed this."""
    return any(TITLE.match(line) or HEADS.match(line) for line in lines)


def read(path: Path, lines: Sequence[str], hints: Hints) -> tuple[str, list[Section]]:
    """Return the tool and its sections. Raises ValueError with one sentence."""
    sections: list[Section] = []
    errors: list[str] = []
    parts = [*_parts(lines)]
    for part in parts:
        try:
            sections.append(_section(path, part, lines, hints))
        except ValueError as error:
            errors.append(str(error))
    if not sections:
        raise ValueError(errors[0])
    left_out = [f"a test is left out, for it {error}" for error in errors]
    if any(len(line.split()) > 1 and _is_row(line) for line in lines[: parts[0].start]):
        left_out.append(f"rows above line {parts[0].start + 1} are left out: their head is missing")
    sections[0] = replace(sections[0], left_out=(*left_out, *sections[0].left_out))
    return "osu", sections


def _parts(lines: Sequence[str]) -> Iterator[Part]:
    """Split the lines at each title, and at each table without a title above it."""
    starts: list[tuple[int, re.Match[str] | None]] = []
    headed = True
    for i, line in enumerate(lines):
        title = TITLE.match(line)
        if title or (HEADS.match(line) and headed):
            starts.append((i, title))
            headed = title is None
        elif HEADS.match(line):
            headed = True
    ends = [*(i for i, _ in starts[1:]), len(lines)]
    for (start, title), end in zip(starts, ends, strict=True):
        yield Part(start, end, title)


def _section(path: Path, part: Part, lines: Sequence[str], hints: Hints) -> Section:
    """Read one start of a benchmark. Raises ValueError with words that follow "it"."""
    setup, notes = _setup(path, part, lines, hints)
    sized = OPERATIONS[setup.test.operation].sized
    if sized and not any(DATATYPE.match(line) for line in lines[part.start : part.end]):
        notes.append(f"this release prints no datatype: {_default(setup)}, its own, is assumed")
    damaged: list[int] = []
    rows = tuple(_rows(setup, lines, part, damaged))
    harm = [f"line {i + 1} is damaged: {lines[i][:80]!r}" for i in damaged]
    if not rows:
        missing = f"has no row of results below line {part.start + 1}: the test did not end"
        raise ValueError((harm or [missing])[0])
    return Section(
        "MPI of unknown version",
        rows,
        facts={"tool": f"OSU {setup.version or 'of unknown version'}"},
        notes=tuple(notes),
        left_out=tuple(harm),
    )


def _setup(path: Path, part: Part, lines: Sequence[str], hints: Hints) -> tuple[Setup, list[str]]:
    """Read what is measured, and what had to be assumed."""
    of_mpi = MPI.match(part.title["title"]) if part.title else None
    command = _command(lines[: part.start])
    test = _test(part, lines[part.start], of_mpi, command, hints)
    notes = []
    ranks = test.ranks
    if ranks is None:
        ranks, origin = _ranks(path, test, command, hints)
        notes.append(f"OSU prints no number of ranks: {ranks} is from {origin}")
        notes.append("OSU prints no place and no root: its own, out of place and 0, are assumed")
    if test.blocks:
        notes.append(
            f"OSU's sizes of {test.operation} are one rank's block: here they are the total "
            f"buffer, {ranks} times as large"
        )
    if test.ways:
        notes.append(
            f"OSU prints a rate for {test.operation}: the time is of one message in its window, "
            f"size{' × 2' if test.ways > 1 else ''} / rate"
        )
    version = part.title["version"] if part.title else None
    device = "cuda" if of_mpi and of_mpi["accelerator"] else "cpu"
    buffers = next((m for x in lines[part.start : part.end] if (m := BUFFERS.match(x))), None)
    if buffers is None or buffers[1] == buffers[2]:
        on_host = buffers is not None and buffers[1] == "HOST"
        return Setup(test, version, "cpu" if on_host else device, ranks), notes
    ways = f"osu, {buffers[1].lower()} to {buffers[2].lower()}"
    return Setup(test, version, device, ranks, ways), notes


def _test(part: Part, first: str, of_mpi: re.Match[str] | None, command: str, hints: Hints) -> Test:
    """Find the benchmark by its title, else by --op, else by the command above."""
    if part.title:
        test = TESTS.get(of_mpi["title"]) if of_mpi else None
        if test is None:
            raise ValueError(
                f"is of {part.title['title']!r}, which ddpbench does not read (it reads of OSU "
                f"MPI: {', '.join(TESTS)})"
            )
        return test
    rates, pair_only = "Bandwidth" in first, "Avg" not in first
    named = PROGRAM.findall(command)
    for test in TESTS.values():
        fits = test.operation == hints.operation if hints.operation else test.program in named
        if fits and bool(test.ways) == rates and (test.ranks or not pair_only):
            return test
    raise ValueError(
        f"has a table at line {part.start + 1} without its line '# OSU MPI … Test': name its test "
        "with --op, as --op all_reduce"
    )


def _command(above: Sequence[str]) -> str:
    """Return the nearest line above that starts processes; "" if there is none."""
    started = (line for line in join_commands(above) if LAUNCHER.search(line))
    return next((x for x in started if PROGRAM.search(x) or count_started_ranks(x, "")), "")


def _ranks(path: Path, test: Test, command: str, hints: Hints) -> tuple[int, str]:
    """Return the number of ranks and its source."""
    programs = {known.program for known in TESTS.values()} & {*PROGRAM.findall(command)}
    started = count_started_ranks(command, "osu_") if programs <= {test.program} else None
    if hints.ranks:
        return hints.ranks, "--ranks"
    if started:
        return started, "the command above"
    if in_name := read_ranks_in_name(path):
        return in_name, f"the name {path}"
    raise ValueError(
        "has no number of ranks, for OSU prints none: add --ranks, as --ranks 8, or put it into "
        f"the name of the file or of its folder, as {path.stem}-n8{path.suffix}"
    )


def _rows(setup: Setup, lines: Sequence[str], part: Part, damaged: list[int]) -> Iterator[Row]:
    """Read the rows; add the index of each unreadable row to damaged."""
    columns: list[str] = []
    dtype = _default(setup)
    for i in range(part.start, part.end):
        line, words = lines[i], lines[i].split()
        if datatype := DATATYPE.match(line):
            dtype = TYPES.get(datatype[1], datatype[1].lower())
        elif HEADS.match(line):
            columns = HEAD.findall(line)
        elif columns and (_is_row(line) or (NUMBER.match(line) and len(words) == len(columns))):
            try:
                # The last line may have been cut: only a line break shows that it was not.
                if len(words) != len(columns) or (i + 1 == len(lines) and not WHOLE.search(line)):
                    raise ValueError
                yield _row(setup, dtype, dict(zip(columns, words, strict=True)))
            except (ValueError, KeyError, ZeroDivisionError):
                damaged.append(i)


def _is_row(line: str) -> bool:
    """Return whether a line holds only numbers."""
    words = line.split()
    return bool(words and NUMBER.match(line) and all(CELL.fullmatch(word) for word in words))


def _default(setup: Setup) -> str:
    """Return the datatype that releases use without printing it."""
    return "float32" if OPERATIONS[setup.test.operation].reduces else "int8"


def _row(setup: Setup, dtype: str, cells: dict[str, str]) -> Row:
    """Read a row. cells: by the heads of the columns; "Min Latency" is the fastest rank's mean."""
    size, test = int(cells.get("Size", 0)), setup.test
    figures = {name.partition("(")[0].strip(): word for name, word in cells.items()}
    if test.ways:
        seconds = size * test.ways / (float(figures["Bandwidth"]) * 1e6)
    else:
        known = (figures[name] for name in ("Avg Latency", "Latency") if name in figures)
        seconds = float(next(known, "none")) * 1e-6
    if not (0 <= seconds < math.inf and 0 <= size < 2**53):
        raise ValueError
    fastest = figures.get("Min Latency")
    checked = figures.get("Validation")
    if checked not in (None, "Pass", "Fail"):
        raise ValueError
    return Row(
        _case(setup, dtype, size, "Transmit Size" in figures),
        seconds,
        int(figures.get("Iterations", 0)),
        rank_min_seconds=None if fastest is None else float(fastest) * 1e-6,
        checked=checked is not None,
        wrong="a validation that failed" if checked == "Fail" else None,
    )


def _case(setup: Setup, dtype: str, size: int, derived: bool) -> Case:
    """Build the identity. size: as OSU prints it. derived: of a derived datatype."""
    test, operation = setup.test, OPERATIONS[setup.test.operation]
    n = setup.world_size
    nbytes = size * n if test.blocks else size
    element = DTYPES[dtype].nbytes if dtype in DTYPES else 1
    pipelined = test.timed == WINDOW
    return Case(
        operation=test.operation,
        form="tensor",
        backend="mpi",
        provider="osu",
        device=setup.device,
        dtype=dtype,
        reduce_op="sum" if operation.reduces else None,
        root=0 if operation.rooted else None,
        nbytes=nbytes,
        count=nbytes // element // (n if operation.blocks else 1),
        in_place=False,
        async_op=pipelined,
        issue="pipelined" if pipelined else "isolated",
        start="none" if operation.paired else "barrier",
        depth=0 if pipelined else 1,
        world_size=n,
        ranks_per_host=(),
        buffers=setup.buffers + (", derived datatype" if derived else ""),
        time_definition=test.timed,
        rank_reduction="rank 0" if operation.paired else "mean",
        statistic="mean",
    )
