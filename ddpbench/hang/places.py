"""Find the line of the program's own code where a thread is, or where an error was raised."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType

OURS = str(Path(__file__).parents[1]) + os.sep  # this package, wherever it is installed
# The parts of this package that connect and watch ranks.
MACHINERY = tuple(OURS + name + os.sep for name in ("hang", "runtime", "launch", "mpi_backend"))
SCRIPTS = sysconfig.get_path("scripts") + os.sep
COMPILED = "torchinductor_"  # in the paths of code that torch.compile writes

# The parts of torch whose functions wait for other ranks.
CALLED = ("distributed_c10d.py", "_functional_collectives.py")
# Those of DDP that wait in C++. The rest of its constructor imports and computes.
OF_DDP = (
    *("_verify_param_shape_across_processes", "_sync_params_and_buffers"),
    "_distributed_broadcast_coalesced",
)

WAIT = "wait"  # for an earlier call, with async_op or isend
# Calls that wait for other ranks in C++, where they have no frame of their own.
WAITS_IN_C = re.compile(r"(?<!\bos)\.wait\s*\(|store\w*\.(get|barrier)\s*\(", re.IGNORECASE)
CALLS = re.compile(r"([^\W\d][\w.]*)\s*\(")  # names of functions

Line = tuple[str, str, int]  # function, file, line


def find_main_frame() -> FrameType:
    """Return the innermost frame of the main thread."""
    return sys._current_frames()[threading.main_thread().ident or 0]


def find_place(frame: FrameType) -> str:
    """Return the innermost line of the program's own code, else of a library's, else of any."""
    codes = [(outer.f_code, outer.f_lineno) for outer in walk_outwards(frame)]
    return choose_place((code.co_name, code.co_filename, line) for code, line in codes)


def describe_line(frame: FrameType) -> str:
    """Return the innermost line of the program's own code, as "train.py:31", and the function that
    it calls, as "train.py:31 torch.save", if it is the only one; "" if no such code is on the
    stack."""
    own = next((f for f in walk_outwards(frame) if _distance(f.f_code.co_filename) == 0), None)
    if own is None:
        return ""
    path, line = own.f_code.co_filename, own.f_lineno  # the thread may continue meanwhile
    names = set(CALLS.findall(linecache.getline(path, line)))
    return " ".join([f"{Path(path).name}:{line}", *(names if len(names) == 1 else ())])


def find_error_place(error: BaseException) -> str:
    """Return the line where an error was raised, chosen as in `find_place`."""
    trace = error.__traceback__
    # A frame's current line changes after the error, to a `finally` or the end of a `with`.
    lines = [(f.f_code.co_name, f.f_code.co_filename, line) for f, line in traceback.walk_tb(trace)]
    return choose_place(reversed(lines))


def is_of_program(error: BaseException, innermost: bool = True) -> bool:
    """Return whether the program's own code raised an error.

    innermost: False if it may also have called the code that did.
    """
    paths = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [Path(path).is_absolute() and _distance(path) == 0 for path in paths]  # else: compiled
    return own[-1] if innermost else any(own)


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return an error as one line, "ValueError: bad batch", and where it was raised."""
    first = (str(error).strip() or "no text").splitlines()[0][:300]
    return f"{type(error).__name__}: {first}", find_error_place(error)


def choose_place(lines: Iterable[Line]) -> str:
    """Return the program's own among these lines, innermost first, as "function (file:line)"."""
    name, path, line = min(lines, key=lambda line: _distance(line[1]))
    return f"{name} ({Path(path).name}:{line})"


def find_distributed_call(frame: FrameType) -> str:
    """Return the function of torch.distributed in which the program is, "": none."""
    name = ""
    for outer in walk_outwards(frame):
        path, function = outer.f_code.co_filename, outer.f_code.co_name
        if path.endswith(CALLED):
            name = function  # the outermost of those that call each other
        elif function in OF_DDP and path.startswith(_folder("torch")):
            name = "DistributedDataParallel"
        elif path.startswith(MACHINERY) and function == WAIT:
            name = name or WAIT  # over mpi4py that is a function of ours
        elif name and _distance(path) == 0:
            break
    if name:
        return name
    match = WAITS_IN_C.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0))
    if match is None:
        return ""
    return f"store.{match[1]}" if match[1] else WAIT


def walk_outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield this frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def _distance(path: str) -> int:
    """Return 0 for the program's own code, 1 for a library's or ddpbench's, 2 for code without a
    file, 3 for Python's, torch's or a launcher's."""
    machinery = _folder("torch"), *MACHINERY, "<frozen ", SCRIPTS
    if path.startswith(machinery) or COMPILED in path:
        return 3
    if path.startswith(OURS) or "/site-packages/" in path or "/dist-packages/" in path:
        return 1
    if path.startswith("<"):
        return 0 if path.startswith("<ipython") else 2
    return 3 if path.startswith(sysconfig.get_path("stdlib") + os.sep) else 0


def _folder(package: str) -> str:
    module = sys.modules.get(package)
    file = module.__file__ if module else None
    return f"{Path(file).parent}{os.sep}" if file else "<no such folder>"
