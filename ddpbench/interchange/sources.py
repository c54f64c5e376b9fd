"""Read what a user names: a run's folder, a name in results/, `last`, or another tool's log.

One entry of READERS adds a tool.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpbench.interchange import log, nccl_json, nccl_text, osu, rccl_json
from ddpbench.interchange.clean import clean, decode
from ddpbench.interchange.log import NO_HINTS, Hints
from ddpbench.interchange.nccl_tests import PROGRAMS
from ddpbench.records import redact, store
from ddpbench.records.schema import Run
from ddpbench.records.store import InvalidRun

SUFFIXES = (".log", ".txt", ".out", ".json")  # of logs in a folder; a file that is named may be any


@dataclass(frozen=True)
class Reader:
    """A kind of log.

    recognizes  cleaned lines → whether they are of this kind
    read        (path, cleaned lines, hints) → the tool's name and one section for each of its
                starts, at least one; raises ValueError with words that follow the file's name:
                "ends within …"
    marks       an expression that finds the tool's lines, wherever they start
    """

    help: str
    recognizes: Callable[[Sequence[str]], bool]
    read: Callable[[Path, Sequence[str], Hints], tuple[str, list[log.Section]]]
    marks: str = ""


READERS: dict[str, Reader] = {
    "nccl-json": Reader("JSON of nccl-tests (-J)", nccl_json.recognizes, nccl_json.read),
    "rccl-json": Reader("JSON of rccl-tests (-x)", rccl_json.recognizes, rccl_json.read),
    "nccl-tests": Reader(
        "text of nccl-tests or rccl-tests", nccl_text.recognizes, nccl_text.read, nccl_text.MARKS
    ),
    "osu": Reader("text of the OSU Micro-Benchmarks", osu.recognizes, osu.read, osu.MARKS),
}
# Two tools may give a group the same name.
MARKS = re.compile(re.sub(r"\?P<\w+>", "", "|".join(r.marks for r in READERS.values() if r.marks)))
OPERATIONS = tuple(
    dict.fromkeys([*PROGRAMS.values(), *(test.operation for test in osu.TESTS.values())])
)


def find(name: str) -> Path:
    """Find the run's folder or the log of this name. Raises InvalidRun."""
    path = Path(name)
    return path if _is_file(path) and path.name != "run.json" else store.find(name)


def _is_file(path: Path) -> bool:
    return os.path.lexists(path) and path.is_file()  # is_file alone raises if the name is too long


def find_all(name: str) -> list[Path]:
    """Find the run or log of this name, or all runs (else all logs) in the folder of this name.

    Raises InvalidRun.
    """
    if _is_file(Path(name)):
        return [find(name)]
    try:
        return store.find_runs(name)
    except InvalidRun:
        logs = sorted(path for path in Path(name).glob("*") if path.suffix in SUFFIXES)
        if logs:
            return logs
        raise


def read(path: Path, hints: Hints = NO_HINTS) -> Run:
    """Read the run in a folder or a log. Raises InvalidRun with one sentence if it cannot."""
    if path.is_dir():
        return store.read(path)
    try:
        text = decode(store.read_file(path))
    except OSError as error:
        raise InvalidRun(f"{path} cannot be read: {error.strerror}") from None
    if not text.strip():
        raise InvalidRun(f"{path} is empty")
    lines = clean(text, MARKS)
    readers = [reader for reader in READERS.values() if reader.recognizes(lines)]
    if not readers:
        known = ", ".join(reader.help for reader in READERS.values())
        raise InvalidRun(f"{path} is no log that ddpbench reads ({known}), and no folder of a run")
    try:
        tool, sections = readers[0].read(path, lines, hints)
        left_out = [f"{other.help} is left out: give it a file" for other in readers[1:]]
        return log.build_run(redact.text(str(path)), tool, sections, left_out)
    except ValueError as error:
        raise InvalidRun(f"{path} {error}") from None
