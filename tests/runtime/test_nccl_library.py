"""The NCCL of a process: its version and plug-ins, from stub libraries, and its files."""

import json
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpbench.runtime import environment, nccl_library

SOURCE = "int ncclGetVersion(int *version) {{ *version = {code}; return 0; }}"
# The library decides, not torch: a stand-in of the parts of torch that are asked starts faster.
SHOW = """
import ctypes, sys
from types import SimpleNamespace
sys.modules["torch"] = SimpleNamespace(
    version=SimpleNamespace(hip=sys.argv[2] or None),
    cuda=SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 29, 7))),
)
from ddpbench.catalog import backends
from ddpbench.runtime import nccl_library
for name in filter(None, sys.argv[1].split(",")):
    ctypes.CDLL(name)
library = backends.get("nccl").library()
print(nccl_library.describe_version(), library, nccl_library.plugins(), sep="; ")
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnccl.so.2 and a librccl.so.1 that only tell a version."""
    if shutil.which("cc") is None:
        pytest.skip("needs cc")
    folder = tmp_path_factory.mktemp("stubs")
    codes = {"libnccl.so.2": 23007, "librccl.so.1": 22105, "libnccl-net-ofi.so": 0}
    for name, code in codes.items():
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", name, f"-Wl,-soname,{name}"]
        text = SOURCE.format(code=code)
        subprocess.run(command, input=text, text=True, cwd=folder, check=True)
    return folder


def shown(stubs: Path, load: str, hip: str = "") -> list[str]:
    """Show the versions in a process that finds the stubs by name, and loads one of them."""
    words = [sys.executable, "-c", SHOW, load, hip]
    done = subprocess.run(
        words, env={"LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip().split("; ")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("load", "hip", "expected"),
    [
        ("libnccl.so.2", "", ["2.30.7", "NCCL 2.30.7", "none"]),
        ("", "", ["2.29.7 (as built)", "NCCL 2.29.7 (as built)", "None"]),
        ("librccl.so.1", "6.4", ["2.21.5", "RCCL 2.21.5", "none"]),
        (
            "libnccl.so.2,libnccl-net-ofi.so",
            "",
            ["2.30.7", "NCCL 2.30.7", "libnccl-net-ofi.so"],
        ),
    ],
    ids=["loaded", "not loaded", "RCCL", "plug-in"],
)
def test_the_loaded_library_counts(stubs: Path, load: str, hip: str, expected: list[str]) -> None:
    """Its version and plug-ins, not the headers with which torch was built; asking loads none."""
    assert shown(stubs, load, hip) == expected


def test_the_files_of_nccl_are_read_as_nccl_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL_CONF_FILE replaces the file in the home folder, and that of the host comes last.

    Comments and lines without a value do not count. Of two lines for a name the first does.
    """
    own, chosen, host = (tmp_path / name for name in (".nccl.conf", "chosen", "host"))
    own.write_text("NCCL_ALGO=Ring\n")
    host.write_text("# NCCL_IB_DISABLE=1\nNCCL_IB_HCA==mlx5_0:1\nnothing\nNCCL_IB_HCA=mlx5_9")
    home = SimpleNamespace(pw_dir=str(tmp_path))
    monkeypatch.setattr(pwd, "getpwuid", lambda number: home)
    monkeypatch.setattr(nccl_library, "CONF_OF_HOST", str(host))
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    of_host = {str(host): {"NCCL_IB_HCA": "=mlx5_0:1"}}
    assert nccl_library.read_conf_files() == {str(own): {"NCCL_ALGO": "Ring"}, **of_host}
    monkeypatch.setenv("NCCL_CONF_FILE", str(chosen))
    assert nccl_library.read_conf_files() == of_host
    chosen.write_text("")
    assert nccl_library.read_conf_files() == {str(chosen): {}, **of_host}


def test_a_secret_in_a_file_of_nccl_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may set any variable of the process; only those that steer collectives are kept."""
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_ALGO=Ring\nNCCL_API_KEY=hunter2\nAWS_SECRET_ACCESS_KEY=hunter2\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(file))
    facts = environment.rank_facts()
    assert {"NCCL_ALGO": "Ring"} in facts["nccl_conf"].values()  # type: ignore[attr-defined]
    assert "hunter2" not in json.dumps(facts)
