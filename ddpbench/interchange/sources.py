"""What a user names, as runs: a run's folder, a name in results/, `last`, or another tool's log.

One entry of READERS adds a tool.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddpbench.interchange import log, nccl_json, nccl_text, osu
from ddpbench.records import store
from ddpbench.records.schema import Run
from ddpbench.records.store import InvalidRun

TAG = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>: ?", re.MULTILINE)  # of mpirun --tag-output
SUFFIXES = (".log", ".txt", ".out", ".json")  # of logs in a folder; a file that is named may be any


@dataclass(frozen=True)
class Reader:
    """A kind of log.

    is_one  text → whether it is of this kind, from a mark in it
    read    (path, text) → the tool's name and one section for each of its starts, at least one;
            ValueError with what the file does, in words that follow its name: "ends within …"
    """

    help: str
    is_one: Callable[[str], bool]
    read: Callable[[Path, str], tuple[str, list[log.Section]]]


READERS: dict[str, Reader] = {
    "nccl-json": Reader("JSON of nccl-tests (-J)", nccl_json.is_one, nccl_json.read),
    "nccl-tests": Reader("text of nccl-tests", nccl_text.is_one, nccl_text.read),
    "osu": Reader("text of the OSU Micro-Benchmarks", osu.is_one, osu.read),
}


def find(name: str) -> Path:
    """The run's folder or the log of this name. Raises InvalidRun."""
    path = Path(name)
    return path if path.is_file() and path.name != "run.json" else store.find(name)


def find_all(name: str) -> list[Path]:
    """The run or log of this name, or all runs, else all logs, in the folder of this name.

    Raises InvalidRun.
    """
    if Path(name).is_file():
        return [find(name)]
    try:
        return store.find_all(name)
    except InvalidRun:
        logs = sorted(path for path in Path(name).glob("*") if path.suffix in SUFFIXES)
        if logs:
            return logs
        raise


def read(path: Path) -> Run:
    """The run in a folder or a log. Raises InvalidRun with one sentence when it cannot be read."""
    if path.is_dir():
        return store.read(path)
    try:
        text = TAG.sub("", path.read_bytes().decode(errors="replace"))
    except OSError as error:
        raise InvalidRun(f"{path} cannot be read: {error.strerror}") from None
    if not text.strip():
        raise InvalidRun(f"{path} is empty")
    reader = next((each for each in READERS.values() if each.is_one(text)), None)
    if reader is None:
        known = ", ".join(each.help for each in READERS.values())
        raise InvalidRun(f"{path} is no log that ddpbench reads ({known}), and no folder of a run")
    try:
        tool, sections = reader.read(path, text)
        return log.as_run(str(path), tool, sections)
    except ValueError as error:
        raise InvalidRun(f"{path} {error}") from None
