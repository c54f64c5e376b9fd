"""Read a run by its folder, its name in results/, or `last`; or read another tool's log.

To add a tool, add an entry to READERS.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from ddpbench.interchange import log
from ddpbench.interchange.log import NO_HINTS, Hints, Part, Test
from ddpbench.records import redact, store
from ddpbench.records.schema import Result, Run
from ddpbench.records.store import InvalidRun

SUFFIXES = (".log", ".txt", ".out", ".json")  # of logs in a folder; a named file may have any
ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Text that launchers put before each line: `0: ` of srun, `[1,0]<stdout>: ` of mpirun, and
# `[pod/name/container] `, `pod-name container ` or a time of kubectl and stern.
PREFIX = re.compile(
    r"^(?:[ \t]*\d+: |\[(?:\S+@)?\d+,\d+\]<std(?:out|err)>: ?|\[pod/\S+\] "
    r"|[a-z][a-z0-9.]*-[a-z0-9.-]+ (?:[a-z][a-z0-9-]* )?|\d{4}-\d\d-\d\dT\S+ (?:stdout F )?)+",
    re.MULTILINE,
)
# Kind of log → an expression that finds each start of the tool; reads what one start printed.
READERS: dict[str, tuple[re.Pattern[str], Callable[[Part], tuple[Test, list[Result]]]]] = {
    "JSON of nccl-tests (-J)": (log.NCCL_JSON, log.read_nccl_json),
    "text of nccl-tests or rccl-tests since 2.13": (log.NCCL_TEXT, log.read_nccl_text),
    "text of the OSU Micro-Benchmarks since 5.9": (log.OSU, log.read_osu),
}
OPERATIONS = tuple(name for name in log.NAMES.values() if name != "barrier")


def find(name: str) -> Path:
    """Find the run's folder or the log of this name. Raises InvalidRun."""
    path = Path(name)
    return path if _is_file(path) and path.name != "run.json" else store.find(name)


def _is_file(path: Path) -> bool:
    return os.path.lexists(path) and path.is_file()  # is_file alone raises if the name is too long


def find_all(name: str) -> list[Path]:
    """Find this run or log, or all runs (else all logs) in this folder. Raises InvalidRun."""
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
        text = _clean(store.read_file(path))
    except OSError as error:
        raise InvalidRun(f"{path} cannot be read: {error.strerror}") from None
    readers = [reader for reader in READERS.values() if reader[0].search(text)]
    if len(readers) > 1:
        raise InvalidRun(f"{path} contains logs of several tools: put each into its own file")
    if not readers:
        logs = ", ".join(READERS)
        raise InvalidRun(f"{path} is neither the folder of a run nor one of these logs: {logs}")
    tests: list[tuple[Test, list[Result]]] = []
    left_out: list[tuple[int, str]] = []
    start, read_part = readers[0]
    starts = [match.start() for match in start.finditer(text)]
    line = 1 + text.count("\n", 0, starts[0])
    for i, j in zip(starts, [*starts[1:], len(text)], strict=True):
        try:
            test, results = read_part(Part(text[i:j], line, hints, left_out))
            if not results or len({result.case for result in results}) < len(results):
                raise ValueError("the test contains no results, or repeats a size (-N)")
            tests.append((test, results))
        except ValueError as error:
            left_out.append((line, str(error)))
        except (AttributeError, LookupError, TypeError) as error:  # of JSON
            left_out.append((line, f"a value is missing or wrong: {type(error).__name__}, {error}"))
        line += text.count("\n", i, j)
    if not tests:
        line, reason = left_out[0]
        raise InvalidRun(f"{path} cannot be read: line {line}: {reason}")
    return log.build_run(redact.text(str(path)), tests, left_out)


def _clean(data: bytes) -> str:
    """Return the lines as the tool printed them, without what others added or indentation."""
    text = ESCAPE.sub("", data.decode("utf-8-sig", errors="replace").replace("\r", ""))
    return "\n".join(line.strip() for line in PREFIX.sub("", text).split("\n"))
