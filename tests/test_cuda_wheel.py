"""A CUDA build of torch without a GPU: what it says, what is read from it, and ranks on the CPU.

DDPBENCH_CUDA_PYTHON=/path/to/python pytest -m cuda_wheel

That Python has a CUDA build of torch and ddpbench's dependencies. Without the variable, the tests
are skipped. No test needs a GPU or a driver: a library made of fake_driver.c answers for it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from command_lines import QUICK, clean_environment
from patience import PATIENCE_SECONDS

from ddpbench.records import store

PYTHON = os.environ.get("DDPBENCH_CUDA_PYTHON", "")
SOURCE = Path(__file__).parent / "fake_driver.c"
CASE = ("--op", "all_reduce", "--sizes", "1K")
COLLECTIVES = ("-m", "ddpbench", "collectives", *CASE, *QUICK)
TOO_OLD = {"FAKE_VERSION": "11040"}
TOO_OLD_SENTENCE = "The NVIDIA driver on your system is too old (found version 11040)"

pytestmark = [
    pytest.mark.cuda_wheel,
    pytest.mark.skipif(not PYTHON, reason="DDPBENCH_CUDA_PYTHON names no Python"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that stands for the driver."""
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    words = ["cc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", SOURCE, "-o", library]
    subprocess.run(words, check=True)
    return library


@pytest.fixture(scope="module")
def no_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that cannot be loaded in place of a driver, even on a machine that has one."""
    library = tmp_path_factory.mktemp("missing") / "libcuda.so.1"
    library.touch()
    return library


def run(
    driver: Path, cwd: Path, *words: str, gpus: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the Python with the CUDA build on a machine with this driver, and so many GPUs."""
    there = {"LD_LIBRARY_PATH": str(driver.parent), "CUDA_VISIBLE_DEVICES": "0,1,2,3", **variables}
    if gpus:
        there |= {"LD_PRELOAD": str(driver), "FAKE_GPUS": str(gpus)}
    return subprocess.run(
        [PYTHON, *words], cwd=cwd, env=clean_environment(**there),
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one sentence of a refusal, without its beginning."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("ddpbench: ")
    return line.removeprefix("ddpbench: ")


def test_the_python_has_a_cuda_build(no_driver: Path, tmp_path: Path) -> None:
    """Otherwise the other tests prove nothing."""
    done = run(no_driver, tmp_path, "-c", "import torch; print(torch.version.cuda)")
    assert re.fullmatch(r"\d+\.\d+\n", done.stdout), done.stderr


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        (["--device", "cuda"], "nccl"),
        (["--backend", "nccl"], "nccl"),
        (["--device", "cuda", "--backend", "gloo"], "gloo"),
        (["--device", "cuda", "--backend", "ucc"], None),
    ],
)
def test_without_a_driver_cuda_is_refused(
    no_driver: Path, tmp_path: Path, words: list[str], backend: str | None
) -> None:
    """One sentence quotes CUDA and says what to type; no traceback of torch's. Nothing is left."""
    sentence = refusal(run(no_driver, tmp_path, *COLLECTIVES, *words))
    if backend is not None:
        assert re.fullmatch(
            rf"{backend} with CUDA tensors needs a GPU, but CUDA \d+\.\d+ reports "
            r'"Found no NVIDIA driver on your system" with CUDA_VISIBLE_DEVICES=0,1,2,3: '
            r"run where torch finds a GPU, or use --device cpu --backend gloo",
            sentence,
        ), sentence
    assert not (tmp_path / "results").exists()


BROKEN = [
    (TOO_OLD, TOO_OLD_SENTENCE),
    ({"FAKE_INIT": "3"}, "CUDA driver initialization failed, you might not have a CUDA gpu"),
    ({"FAKE_INIT": "802"}, "Error 802: system not yet initialized"),
    ({"FAKE_INIT": "999"}, "CUDA unknown error - this may be due to an incorrectly set up"),
]


@pytest.mark.parametrize(("variables", "error"), BROKEN)
def test_auto_refuses_a_broken_driver(
    driver: Path, tmp_path: Path, variables: dict[str, str], error: str
) -> None:
    """A driver that is too old or does not start is quoted, in one line, and the CPU is not
    measured in its place."""
    sentence = refusal(run(driver, tmp_path, *COLLECTIVES, **variables))
    assert sentence.startswith("the GPUs cannot be used: CUDA ")
    assert f' reports "{error}' in sentence
    assert sentence.endswith(": fix this error, or measure with --device cpu")


def test_the_cpu_is_measured_without_starting_cuda(driver: Path, tmp_path: Path) -> None:
    """With --device cpu no process starts CUDA, so ranks can be forked, even if a driver is broken.
    The run is complete."""
    log = tmp_path / "log"
    words = ("--device", "cpu", "-n", "2", "--output", "run")
    done = run(driver, tmp_path, *COLLECTIVES, *words, FAKE_LOG=str(log), **TOO_OLD)
    assert done.returncode == 0, done.stderr
    assert not log.exists()
    stored = store.read(tmp_path / "run")
    assert stored.state == "complete"
    assert [result.summary is not None for result in stored.results] == [True]


def test_auto_forks_ranks_where_there_is_no_gpu(driver: Path, tmp_path: Path) -> None:
    """On a login node CUDA is asked once, in the process that then forks the ranks for the CPU."""
    log = tmp_path / "log"
    words = ("-n", "2", "--output", "run")
    done = run(driver, tmp_path, *COLLECTIVES, *words, FAKE_LOG=str(log))
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "started\n"
    assert store.read(tmp_path / "run").results[0].case.device == "cpu"


SHOW = """
import json, pickle, torch
from ddpbench.catalog import backends
from ddpbench.hang import flight_recorder
from ddpbench.runtime import nccl_library
recorders = flight_recorder.find_recorders()
print(json.dumps({
    "loaded": nccl_library.loaded_version(),
    "built": torch.cuda.nccl.version(),
    "described": backends.get("nccl").library(),
    "started": torch.cuda.is_initialized(),
    "recorders": {name: pickle.loads(each(includeCollectives=False))
                  for name, each in recorders.items()},
}))
"""


def test_versions_and_recorders_are_found(no_driver: Path, tmp_path: Path) -> None:
    """The NCCL that torch has loaded tells its version, without a GPU, and so do the recorders of
    calls, by the names that the watchdog knows."""
    done = run(no_driver, tmp_path, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["loaded"][:2] == seen["built"][:2]
    assert seen["described"] == "NCCL {}.{}.{}".format(*seen["loaded"])
    assert not seen["started"]
    assert {"_dump_fr_trace", "_dump_nccl_trace"} <= set(seen["recorders"])
    for status in seen["recorders"].values():
        assert isinstance(status, dict)


def test_ranks_that_would_share_a_gpu_are_refused(driver: Path, tmp_path: Path) -> None:
    """Three ranks see one GPU, by its UUID, and --share-gpu allows two."""
    words = ("--backend", "nccl", "-n", "3", "--share-gpu")
    sentence = refusal(run(driver, tmp_path, *COLLECTIVES, *words, gpus=1))
    assert sentence.startswith("ranks 0-2 would share GPUs: "), sentence
    assert not list((tmp_path / "results").glob("*"))


def test_each_gpu_gets_a_rank_until_nccl_connects(driver: Path, tmp_path: Path) -> None:
    """`auto` starts a rank for each GPU. Each selects its own, and nccl fails at the fake driver: a
    sentence from all ranks together."""
    sentence = refusal(run(driver, tmp_path, *COLLECTIVES, gpus=3))
    assert sentence.startswith("nccl cannot connect its ranks: "), sentence
    assert "(rank" not in sentence
