"""The version of the NCCL that a process has loaded, read from stub libraries made with cc."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCE = "int ncclGetVersion(int *version) {{ *version = {code}; return {result}; }}"
SHOW = """
import ctypes, sys, torch
from ddpbench.catalog import backends
from ddpbench.runtime import nccl_library
torch.version.hip = sys.argv[2] or None
torch.cuda.nccl.version = lambda: (2, 29, 7)
if sys.argv[1]:
    ctypes.CDLL(sys.argv[1])
print(nccl_library.loaded_version(), nccl_library.version(), nccl_library.describe_version(),
      backends.get("nccl").library(), sep="; ")
"""


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """A folder with a libnccl.so.2 and a librccl.so.1 that only tell a version."""
    if shutil.which("cc") is None:
        pytest.skip("needs cc")
    codes = {"libnccl.so.2": 23007, "librccl.so.1": 22105}
    for name, code in codes.items():
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", name, f"-Wl,-soname,{name}"]
        text = SOURCE.format(code=code, result=0)
        subprocess.run(command, input=text, text=True, cwd=tmp_path, check=True)
    return tmp_path


def shown(stubs: Path, load: str, hip: str = "") -> list[str]:
    """Show the versions in a process that finds the stubs by name, and loads one of them."""
    words = [sys.executable, "-c", SHOW, load, hip]
    if torch.version.cuda:
        pytest.skip("this torch brings an NCCL of its own")
    done = subprocess.run(
        words, env={"LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip().split("; ")


def test_the_loaded_library_tells_its_version(stubs: Path) -> None:
    """What is loaded counts, not the headers with which torch was built."""
    version = ["(2, 30, 7)", "(2, 30, 7)", "2.30.7", "NCCL 2.30.7"]
    assert shown(stubs, "libnccl.so.2") == version
    assert shown(stubs, str(stubs / "libnccl.so.2")) == version


def test_asking_loads_no_library(stubs: Path) -> None:
    """A library that is installed but not loaded does not answer: torch may load another one."""
    built = ["None", "(2, 29, 7)", "2.29.7 (as built)", "NCCL 2.29.7 (as built)"]
    assert shown(stubs, "") == built


def test_rccl_is_asked_by_its_name(stubs: Path) -> None:
    """On a build for AMD the version is that of RCCL, and is called so."""
    version = ["(2, 21, 5)", "(2, 21, 5)", "2.21.5", "RCCL 2.21.5"]
    assert shown(stubs, "librccl.so.1", "6.4") == version
    assert shown(stubs, "libnccl.so.2", "6.4")[0] == "None"
