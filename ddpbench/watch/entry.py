"""One rank of a watched program: read the options, become the program, and watch it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any
from zlib import crc32

from ddpbench.launch.placement import (
    Placement,
    Refused,
    node_address,
    read_placement,
    slurm_address,
)
from ddpbench.session.errors import speak
from ddpbench.watch import api, command
from ddpbench.watch.command import Program

OWN = f"{Path(__file__).parent}{os.sep}"  # where the frames of the watch are


def main(words: Sequence[str]) -> None:
    """Run a program and watch it; raise what it raises, so that Python ends as with `python`.

    With --verify, a program that ends well may still end with the code that `api.close` returns.
    """
    try:
        namespace, program = command.parse(words)
        if namespace.ranks is not None and read_placement() is None:
            raise Refused(f"-n does not start ranks here: type ddpbench watch {' '.join(words)}")
        settings = command.read_settings(namespace, program)
        prepare(program)
        complete_environment()
    except Refused as error:
        speak(str(error), error.speaker)
        sys.exit(2)
    call_after_import("torch", lambda: api.start(settings))
    try:
        run(program)
    except SystemExit as error:
        if error.code:
            sys.last_value = SystemExit(error.code)  # for the watch; it keeps no frame alive
            raise
    if settings.verify:
        for thread in threading.enumerate():  # as Python does before it ends
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        if code := api.close():
            sys.exit(code)


def call_after_import(name: str, function: Callable[[], object]) -> None:
    """Call a function as soon as a module has been imported, and never import it for that.

    So a script may set variables of the environment before it imports torch, as it could before.
    """
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Finder(name, function))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self._name, self._function = name, function

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as without this finder, and have the function called when it has run."""
        if name != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.exec_module = execute
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._function()

            loader.exec_module = exec_module
        return spec


def complete_environment() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, each where it is missing.

    torchrun sets them; mpirun and srun do not. Under mpirun on several hosts, the address of rank 0
    stays for the user to give. Raises Refused if a launcher's variables contradict each other.
    """
    if (placement := read_placement()) is None or placement.launcher in ("torchrun", "fork"):
        return
    variables = {
        "RANK": placement.rank,
        "WORLD_SIZE": placement.world_size,
        "LOCAL_RANK": placement.local_rank,
        "LOCAL_WORLD_SIZE": placement.local_world_size,
    }
    for name, value in variables.items():
        if value is not None:
            os.environ.setdefault(name, str(value))
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        for name, word in zip(("MASTER_ADDR", "MASTER_PORT"), _find(placement), strict=False):
            os.environ.setdefault(name, word)


def _find(placement: Placement) -> list[str]:
    """Return address and port of rank 0; nothing if they cannot be known."""
    if placement.launcher == "srun":
        name, port = slurm_address()
        with contextlib.suppress(Refused):
            return [node_address(name, placement), str(port)]
        return []
    if placement.local_world_size != placement.world_size:
        return []
    job = os.environ.get("PMIX_NAMESPACE") or f"{os.getppid()}"  # alike in all ranks of mpirun
    return ["127.0.0.1", str(20_000 + crc32(job.encode()) % 12_000)]  # as under Slurm


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
