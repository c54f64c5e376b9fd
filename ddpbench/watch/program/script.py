"""Run an unmodified script, or `-m MODULE`, in this process as `python` itself would."""

from __future__ import annotations

import importlib.util
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from ddpbench.launch.placement import Refused

OWN = f"{Path(__file__).parents[1]}{os.sep}"  # where the frames of the watch are


@dataclass(frozen=True)
class Program:
    """A script (a file, or a folder or zip file with a __main__.py) or a module, and its words."""

    name: str
    arguments: tuple[str, ...]
    is_module: bool = False

    @classmethod
    def of(cls, words: Sequence[str]) -> Program:
        """Return the program that these words start. Raises Refused if there is none."""
        if not words:
            raise Refused("no script: write train.py, or -m and the name of a module")
        first, *rest = words
        if not first.startswith("-m"):
            return cls(first, tuple(rest))
        name, rest = (first[2:], rest) if len(first) > 2 else ("".join(rest[:1]), rest[1:])
        if not name:
            raise Refused("no module after -m: write -m and the name of a module")
        return cls(name, tuple(rest), is_module=True)

    def words(self) -> list[str]:
        """Return the words that follow `python` to start this program."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]

    def is_archive(self) -> bool:
        """Whether this is a folder or a zip file, which Python runs as a module."""
        return not self.is_module and pkgutil.get_importer(self.name) is not None

    def path(self) -> str:
        """Return what Python puts first in sys.path for this program."""
        if self.is_module:
            return str(Path.cwd())
        return str(
            Path(self.name).absolute() if self.is_archive() else Path(self.name).resolve().parent
        )

    def require(self) -> None:
        """Raise Refused if there is no such script."""
        if self.is_module:
            return
        path = Path(self.name)
        if not path.exists():
            raise Refused(f"script {self.name} does not exist: write its path, or -m MODULE")
        if path.is_dir() and not any(path.glob("__main__.py*")):
            raise Refused(f"{self.name} is a folder without a __main__.py: name a script in it")
        if not os.access(path, os.R_OK):
            raise Refused(f"script {self.name} cannot be read: check its permissions")


def prepare(program: Program) -> None:
    """Make this process that of the program: sys.argv, sys.path[0] and a new `__main__`.

    Raises Refused if there is no such script or module.
    """
    program.require()
    sys.argv = ["-m" if program.is_module else program.name, *program.arguments]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later
        del sys.path[0]
        sys.path.insert(0, program.path())
    elif program.is_archive():  # even then, Python adds this
        sys.path.insert(0, program.path())
    if program.is_module:
        _require_module(program.name)
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main


def _require_module(name: str) -> None:
    """Raise Refused if a module cannot be run; this imports its package, as `python -m` does."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise Refused(f"-m {name}: {type(error).__name__}: {error}") from None
    if spec is None:
        raise Refused(
            f"-m {name}: there is no such module, or it is a package without __main__: "
            "check the name, and PYTHONPATH"
        )


def run(program: Program) -> None:
    """Run a prepared program to its end, and raise what it raises.

    A traceback that is printed afterwards begins with the program's own frames.
    """
    try:
        _execute(program)
    except BaseException:
        shown = sys.excepthook

        def show(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            sys.last_traceback = own = _strip(_below_execute(trace))
            _strip_causes(error)
            shown(kind, error.with_traceback(own), own)

        sys.excepthook = show
        raise


def _execute(program: Program) -> None:
    if program.is_module or program.is_archive():
        # What `python -m` and `python FOLDER` call, too.
        run_module = vars(runpy)["_run_module_as_main"]
        run_module(program.name if program.is_module else "__main__", program.is_module)
        return
    path = str(Path(program.name).absolute())
    names = sys.modules["__main__"].__dict__
    names.update(__file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None)
    exec(_compile(path), names)


def _compile(path: str) -> CodeType:
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _below_execute(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that is the program's."""
    part = trace
    while part is not None and part.tb_frame.f_code is not _execute.__code__:
        part = part.tb_next
    return trace if part is None else part.tb_next


def _strip(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without frames of the watch, as of its wrappers of torch's functions."""
    kept = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(OWN):
            kept.append(trace)
        trace = trace.tb_next
    rest = None
    for part in reversed(kept):
        rest = TracebackType(rest, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return rest


def _strip_causes(error: BaseException) -> None:
    """Remove the frames of the watch from the errors that led to this one."""
    errors, seen = [error.__cause__, error.__context__], set[int]()
    while errors:
        cause = errors.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            cause.__traceback__ = _strip(cause.__traceback__)
            errors += [cause.__cause__, cause.__context__]
