"""Where in the code a thread is, or an error was raised: as lines of the program's own code."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

OURS = str(Path(__file__).parents[1]) + os.sep  # this package, wherever it is installed
# Its parts that look at ranks, and bring them together.
MACHINERY = tuple(OURS + name + os.sep for name in ("hang", "runtime", "launch", "mpi_backend"))
COMPILED = "torchinductor_"  # what torch.compile writes

WAIT = "wait"  # that of a call which was begun before, with async_op or isend

Line = tuple[str, str, int]  # function, file, line

# Calls that wait for other ranks in C++, where they have no frame of their own.
_WAITS = re.compile(r"(?<!\bos)\.wait\s*\(|store\w*\.(get|barrier)\s*\(", re.IGNORECASE)


def main_frame() -> FrameType:
    """The innermost frame of the main thread."""
    return sys._current_frames()[threading.main_thread().ident or 0]


def place(frame: FrameType) -> str:
    """The innermost line of the program's own code, else of a library's, else of any."""
    return place_of(_line(each) for each in outwards(frame))


def place_of_error(error: BaseException) -> str:
    """Like `place`, of where an error was raised."""
    trace = error.__traceback__
    # A frame's own line moves on after the error, to a `finally` or the end of a `with`.
    lines = [(f.f_code.co_name, f.f_code.co_filename, line) for f, line in traceback.walk_tb(trace)]
    return place_of(reversed(lines))


def described(error: BaseException) -> tuple[str, str]:
    """An error as one line, "ValueError: bad batch", and where it was raised."""
    first = (str(error).strip() or "no text").splitlines()[0][:300]
    return f"{type(error).__name__}: {first}", place_of_error(error)


def place_of(lines: Iterable[Line]) -> str:
    """Of these lines, the innermost first, the program's own as "function (file:line)"."""
    name, path, line = min(lines, key=lambda each: _distance(each[1]))
    return f"{name} ({Path(path).name}:{line})"


def handled() -> str:
    """The error that the main thread handles, as in an `except` or a `finally`, and where it was
    raised; "" none."""
    found: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = found[1] if isinstance(found, tuple) else found  # as Python has it before 3.12
    if not isinstance(error, Exception) or error.__traceback__ is None:
        return ""
    return ", at ".join(described(error))


def called(frame: FrameType) -> str:
    """The function of torch.distributed that the program has called and that runs, "" none."""
    name = ""
    for each in outwards(frame):
        path = each.f_code.co_filename
        if path.endswith("distributed_c10d.py"):
            name = each.f_code.co_name  # the outermost of those that call each other
        elif path.startswith(MACHINERY) and each.f_code.co_name == WAIT:
            name = name or WAIT  # over mpi4py that is a function of ours
        elif name and _distance(path) == 0:
            break
    return name or _awaited(frame)


def peers(frame: FrameType, inside: str) -> tuple[int, int]:
    """The rank of which a receive waits, and that to which a send does, -1 where none is known.

    inside: what the frame has `called`.

    It reads variables of the frames, which keeps their values alive for a while: only at the end.
    """
    for each in outwards(frame):
        path, name, seen = each.f_code.co_filename, each.f_code.co_name, each.f_locals
        if path.endswith("distributed_c10d.py") and name in ("recv", "irecv", "send", "isend"):
            end = "src" if name.endswith("recv") else "dst"
            rank = _global_rank(seen.get(end), seen.get(f"group_{end}"), seen.get("group"))
            return (rank, -1) if end == "src" else (-1, rank)
        posted = [op for value in seen.values() for op in _posted(value)] if inside == WAIT else []
        receives = [op.peer for op in posted if op.op.__name__ == "irecv"]
        if posted:
            only = receives or [op.peer for op in posted]
            peer = int(only[0]) if len(set(only)) == 1 else -1
            return (peer, -1) if receives else (-1, peer)
        if _distance(path) == 0:
            break
    return -1, -1


def _global_rank(rank: Any, group_rank: Any, group: Any) -> int:
    import torch.distributed as dist

    if isinstance(rank, int):
        return rank
    if not isinstance(group_rank, int):
        return -1
    return dist.get_global_rank(group or dist.distributed_c10d._get_default_group(), group_rank)


def _posted(value: Any) -> list[Any]:
    """The entries of what is given to batch_isend_irecv."""
    import torch.distributed as dist

    return [op for op in value if isinstance(op, dist.P2POp)] if isinstance(value, list) else []


def _awaited(frame: FrameType) -> str:
    """ "wait" where the frame is in such a call, which C++ makes without a frame of its own."""
    found = _WAITS.search(_calling(frame.f_code, frame.f_lasti, frame.f_lineno))
    if found is None:
        return ""
    return f"store.{found[1]}" if found[1] else WAIT


@lru_cache(maxsize=256)
def _calling(code: Any, instruction: int, line: int) -> str:
    """The source of the call that this code is in; Python 3.10 knows no more than its line."""
    first, last, start, end = None, None, None, None
    if hasattr(code, "co_positions"):
        span = next(islice(code.co_positions(), max(0, instruction) // 2, None), None)
        first, last, start, end = span or (None, None, None, None)
    if first is None or last is None or first > last or start is None or end is None:
        return linecache.getline(code.co_filename, line or 0)
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b"".join(lines).decode(errors="replace")


def position(frame: FrameType) -> list[tuple[int, int]]:
    """Where each function on a stack is; the same only where nothing runs in between."""
    return [(id(each.f_code), each.f_lasti) for each in outwards(frame)]


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """This frame and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType) -> Line:
    return frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno


@cache
def _distance(path: str) -> int:
    """0: the program's own code, 1: a library's or ours, 2: of no file, 3: Python's or torch's, or
    what calls for them."""
    machinery = _folder("torch"), *MACHINERY, "<frozen ", _scripts()
    if path.startswith(machinery) or COMPILED in path:
        return 3
    if path.startswith(OURS) or "/site-packages/" in path or "/dist-packages/" in path:
        return 1
    if path.startswith("<"):
        return 0 if path.startswith("<ipython") else 2
    return 3 if path.startswith(sysconfig.get_path("stdlib") + os.sep) else 0


def _scripts() -> str:
    return sysconfig.get_path("scripts") + os.sep


def _folder(package: str) -> str:
    module = sys.modules.get(package)
    file = module.__file__ if module else None
    return f"{Path(file).parent}{os.sep}" if file else "<no such folder>"
