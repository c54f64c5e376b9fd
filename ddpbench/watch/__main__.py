"""One rank of a watched program: read the options, become the program, and watch it.

torchrun --nproc-per-node 4 -m ddpbench.watch train.py --epochs 3
"""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from ddpbench.launch.placement import Refused, read_placement
from ddpbench.session.errors import speak
from ddpbench.watch import api, command


def main(words: Sequence[str]) -> None:
    """Run a program and watch it; raise what it raises, so that Python ends as with `python`.

    With --verify, a program that ends well may still end with the code that `api.close` returns.
    """
    try:
        request = command.parse(words)
        if request.ranks is not None and read_placement() is None:
            raise Refused(f"-n does not start ranks here: type ddpbench watch {' '.join(words)}")
    except Refused as error:
        speak(str(error), error.speaker)
        sys.exit(2)
    start = partial(api.watch, **request.options)
    if "torch" in sys.modules:
        start()
    else:
        sys.meta_path.insert(0, TorchFinder(start))
    try:
        run(request.program, request.is_module)
    except SystemExit as error:
        if error.code:
            sys.last_value = SystemExit(error.code)  # for the watch; it keeps no frame alive
            raise
    if request.options["verify"] and (code := api.close()):
        sys.exit(code)


class TorchFinder(MetaPathFinder):
    """Calls a function as soon as torch has been imported, and never imports it for that.

    The script may therefore set variables of the environment before it imports torch.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torch as without this finder, and have the function called when it has run."""
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._function()

            loader.exec_module = exec_module
        return spec


def run(program: Sequence[str], is_module: bool) -> None:
    """Make this process that of the program (sys.argv, sys.path[0], `__main__`), and run it."""
    name, *arguments = program
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"])
    sys.argv = ["-m" if is_module else name, *arguments]
    sys.path[0] = str(Path.cwd() if is_module else Path(name).resolve().parent)
    if is_module:
        vars(runpy)["_run_module_as_main"](name)  # as `python -m` does
        return
    path = str(Path(name).absolute())
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main.__dict__.update(
        __cached__=None, __file__=path, __loader__=SourceFileLoader("__main__", path)
    )
    exec(code, main.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
