"""The NCCL of a process: its version and plug-ins, and its files."""

import ctypes
import json
import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpbench.runtime import environment, nccl_library


@pytest.mark.parametrize(
    ("hip", "loaded", "code", "shown"),
    [
        (None, "libnccl.so.2", 23007, "NCCL 2.30.7"),
        ("6.4", "librccl.so.1", 22105, "RCCL 2.21.5"),
        (None, "", 0, "NCCL 2.29.7 (as built)"),
    ],
)
def test_the_loaded_library_counts(
    hip: str | None, loaded: str, code: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version, not that of the headers with which torch was built; asking loads none."""

    def open_library(name: str, mode: int) -> SimpleNamespace:
        assert mode == os.RTLD_NOLOAD
        if name != loaded:
            raise OSError(name)

        def read_version(pointer: Any) -> int:
            pointer._obj.value = code
            return 0

        return SimpleNamespace(ncclGetVersion=read_version)

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 29, 7)))
    assert nccl_library.describe() == shown


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ("/usr/lib/libc.so.6", None),
        ("/usr/lib/libnccl.so.2", "none"),
        ("/usr/lib/libnccl.so.2\n7f /opt/libnccl-net-ofi.so", "libnccl-net-ofi.so"),
    ],
)
def test_loaded_plug_ins_are_named(
    files: str, names: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_library, "read", lambda _: f"7f {files}\n")
    assert nccl_library.plugins() == names


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
