"""One rank of a watched program: read the options, become the program, and watch it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ddpbench.launch.placement import Refused, read_placement
from ddpbench.session.errors import speak
from ddpbench.watch import api, command
from ddpbench.watch.program import meeting_point, script


def main(words: Sequence[str]) -> None:
    """Run a program and watch it; raise what it raises, so that Python ends as with `python`.

    With --verify, a program that ends well may still end with the code that `api.close` returns.
    """
    try:
        namespace, program = command.parse(words)
        if namespace.nproc is not None and read_placement() is None:
            raise Refused(f"-n does not start ranks here: type ddpbench watch {' '.join(words)}")
        settings = command.read_settings(namespace, program)
        script.prepare(program)
        meeting_point.complete_environment()
    except Refused as error:
        speak(str(error), error.speaker)
        sys.exit(2)
    call_after_import("torch", lambda: api.start(settings))
    try:
        script.run(program)
    except SystemExit as error:
        if error.code:
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
