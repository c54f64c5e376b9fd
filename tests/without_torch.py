"""Run programs in which importing torch, or another package, fails."""

from __future__ import annotations

import os
import subprocess
import sys

from command_lines import ROOT
from patience import PATIENCE_SECONDS

RUN_DDPBENCH = (
    "sys.argv = ['ddpbench', *sys.argv[1:]]; runpy.run_module('ddpbench', run_name='__main__')"
)
RUN_AND_PRINT_CODE = (
    RUN_DDPBENCH.replace("; runpy", "\ntry: runpy") + "\nexcept SystemExit as end: print(end.code)"
)

NO_TORCH = """
import importlib, runpy, sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"{name} is imported")
sys.meta_path.insert(0, Hook())
"""


def run_without_torch(program: str, *words: str, forbidden: tuple[str, ...] = ("torch",)) -> str:
    """Return the output of a program in which importing the forbidden packages fails."""
    done = subprocess.run(
        [sys.executable, "-c", f"FORBIDDEN = {forbidden!r}{NO_TORCH}{program}", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
