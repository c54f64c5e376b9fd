"""What the OSU Micro-Benchmarks print: collectives, and point to point between two ranks.

OSU times each call in each rank, a barrier before it, and prints the mean over calls and ranks. Its
size is one rank's block where ddpbench's is the total buffer: those are multiplied. It prints no
number of ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpbench.catalog.dtypes import DTYPES
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.interchange.log import Row, Section
from ddpbench.records.schema import Case

EXIT_ENTRY = "exit-entry"
WINDOW = "window of messages and one answer / messages"


@dataclass(frozen=True)
class Test:
    """A benchmark of OSU's. `blocks`: its size is that of one rank's block."""

    operation: str
    blocks: bool = False
    timed: str = EXIT_ENTRY
    ranks: int | None = None  # None: as many as it was started with
    ways: int = 0  # its figure is a rate, of so many messages at a time; 0: it is a time


# The title in the first line, less `OSU MPI`, `Test` and the version.
TESTS = {
    "Allreduce Latency": Test("all_reduce"),
    "Allgather Latency": Test("all_gather", blocks=True),
    "Broadcast Latency": Test("broadcast"),
    "Reduce Latency": Test("reduce"),
    "Reduce_scatter Latency": Test("reduce_scatter"),
    "All-to-All Personalized Exchange Latency": Test("all_to_all", blocks=True),
    "Gather Latency": Test("gather", blocks=True),
    "Scatter Latency": Test("scatter", blocks=True),
    "Barrier Latency": Test("barrier"),
    "Latency": Test("send_recv", timed="half the round trip", ranks=2),
    "Bandwidth": Test("send_recv", timed=WINDOW, ranks=2, ways=1),
    "Bi-Directional Bandwidth": Test("bidirectional", timed=WINDOW, ranks=2, ways=2),
}
TYPES = {
    "MPI_CHAR": "int8",
    "MPI_INT": "int32",
    "MPI_FLOAT": "float32",
    "MPI_DOUBLE": "float64",
}
TITLE = re.compile(r"# OSU (?P<title>.+?)(?: Test)?(?: v(?P<version>\d\S*))?$")
MPI = re.compile(r"MPI(?P<accelerator>-\w+(?: MANAGED)?)? (?P<title>.+)")
DATATYPE = re.compile(r"# Datatype: (\w+)\.?$")
HEADS = re.compile(r"# (Size|Avg Latency)\b")
# A head may be one space away from the next.
HEAD = re.compile(
    r"(?:Avg |Min |Max )?Latency ?\(us\)|Bandwidth \(MB/s\)|P\d+ Tail \w+\(\S+?\)|Transmit Size|\w+"
)
RANKS = re.compile(r"(?<![A-Za-z0-9])(?:np|n|w)([1-9]\d*)(?![A-Za-z0-9])")
NUMBER = re.compile(r"\d+(\.\d+)?$")


@dataclass(frozen=True)
class Setup:
    """One start of a benchmark."""

    test: Test
    version: str | None
    device: str
    world_size: int


def is_one(text: str) -> bool:
    """Whether this is what a benchmark prints."""
    return bool(re.search(r"^\s*# OSU ", text, re.MULTILINE))


def read(path: Path, text: str) -> tuple[str, list[Section]]:
    """The tool and its sections. Raises ValueError with one sentence."""
    lines = [line.strip() for line in text.splitlines()]
    starts = [(i, m) for i, line in enumerate(lines) if (m := TITLE.match(line))]
    if not starts:
        raise ValueError("has no whole line '# OSU MPI … Test'")
    if NUMBER.match(lines[-1].split()[0] if lines[-1] else "") and not text.endswith("\n"):
        raise ValueError(f"ends within line {len(lines)}: the file is not whole")
    sections = []
    for (start, title), end in zip(starts, [*(i for i, _ in starts[1:]), len(lines)], strict=True):
        setup, notes = _setup(path, title)
        rows = [*_rows(setup, lines[start:end], start + 1)]
        sized = OPERATIONS[setup.test.operation].sized
        if sized and not any(DATATYPE.match(line) for line in lines[start:end]):
            notes.append(f"this release prints no datatype: {_default(setup)}, its own, is assumed")
        if not rows:
            raise ValueError(f"has no row of results below line {start + 1}: the test did not end")
        tool = f"OSU {setup.version or 'of unknown version'}"
        library = "MPI of unknown version"
        sections.append(Section(library, tuple(rows), facts={"tool": tool}, notes=tuple(notes)))
    return "osu", sections


def _setup(path: Path, title: re.Match[str]) -> tuple[Setup, list[str]]:
    """What is measured, and what had to be assumed for it."""
    of_mpi = MPI.match(title["title"])
    test = TESTS.get(of_mpi["title"]) if of_mpi else None
    if of_mpi is None or test is None:
        raise ValueError(
            f"is of {title['title']!r}, which ddpbench does not read (it reads of OSU MPI: "
            f"{', '.join(TESTS)})"
        )
    notes = []
    ranks = test.ranks
    if ranks is None:
        names = [
            m for name in (path.name, path.absolute().parent.name) if (m := RANKS.search(name))
        ]
        if not names:
            raise ValueError(
                "has no number of ranks, for OSU prints none: put it into the name of the file or "
                f"of its folder, as {path.stem}-n8{path.suffix}"
            )
        ranks = int(names[0][1])
        notes.append(f"OSU prints no number of ranks: {ranks} is from the name {path}")
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
    device = "cuda" if of_mpi["accelerator"] else "cpu"
    return Setup(test, title["version"], device, ranks), notes


def _rows(setup: Setup, lines: Sequence[str], first: int) -> Iterator[Row]:
    """first: the number of the first line in the file."""
    columns: list[str] = []
    dtype = _default(setup)
    for number, line in enumerate(lines, first):
        words = line.split()
        if found := DATATYPE.match(line):
            dtype = TYPES.get(found[1], found[1].lower())
        elif HEADS.match(line):
            columns = HEAD.findall(line)
        elif columns and words and NUMBER.match(words[0]):
            if len(words) != len(columns):
                raise ValueError(
                    f"line {number} is damaged: {line[:80]!r} is not of {len(columns)} columns"
                )
            try:
                yield _row(setup, dtype, dict(zip(columns, words, strict=True)))
            except (ValueError, ZeroDivisionError):
                raise ValueError(f"line {number} is damaged: {line[:80]!r}") from None


def _default(setup: Setup) -> str:
    """What the releases use that print no datatype."""
    return "float32" if OPERATIONS[setup.test.operation].reduces else "int8"


def _row(setup: Setup, dtype: str, cells: dict[str, str]) -> Row:
    """A row under the heads of its columns; "Min Latency" is the fastest rank's mean."""
    size, test = int(cells.get("Size", 0)), setup.test
    figures = {name.partition("(")[0].strip(): word for name, word in cells.items()}
    if test.ways:
        seconds = size * test.ways / (float(figures["Bandwidth"]) * 1e6)
    else:
        known = (figures[name] for name in ("Avg Latency", "Latency") if name in figures)
        seconds = float(next(known, "none")) * 1e-6
    if not 0 <= seconds < math.inf:
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
    """The identity; size: as OSU prints it."""
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
        buffers="osu, derived datatype" if derived else "osu",
        time_definition=test.timed,
        rank_reduction="rank 0" if operation.paired else "mean",
        statistic="mean",
    )
