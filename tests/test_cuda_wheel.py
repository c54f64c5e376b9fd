"""A CUDA build of torch without a GPU: refusals, and ranks on the CPU.

DDPBENCH_CUDA_PYTHON=/path/to/python pytest -m cuda_wheel

That Python has a CUDA build of torch and ddpbench's dependencies. Without the variable, the tests
are skipped. No test needs a GPU or a driver: a library made of fake_driver.c replaces it.
"""

from __future__ import annotations

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
COLLECTIVES = ("-m", "ddpbench", "collectives", "--op", "all_reduce", "--sizes", "1K", *QUICK)
TOO_OLD = {"FAKE_VERSION": "11040"}

pytestmark = [
    pytest.mark.cuda_wheel,
    pytest.mark.skipif(not PYTHON, reason="DDPBENCH_CUDA_PYTHON names no Python"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library that replaces the driver."""
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    words = ["cc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", SOURCE, "-o", library]
    subprocess.run(words, check=True)
    return library


@pytest.fixture(scope="module")
def no_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a file that cannot be loaded, which hides a real driver."""
    library = tmp_path_factory.mktemp("missing") / "libcuda.so.1"
    library.touch()
    return library


def run(
    driver: Path, cwd: Path, *words: str, gpus: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the Python with the CUDA build with this driver and this number of GPUs."""
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


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        (["--device", "cuda"], "nccl"),
        (["--backend", "nccl"], "nccl"),
        (["--device", "cuda", "--backend", "gloo"], "gloo"),
    ],
)
def test_without_a_driver_cuda_is_refused(
    no_driver: Path, tmp_path: Path, words: list[str], backend: str
) -> None:
    """One sentence quotes CUDA and suggests options; no traceback of torch's. No file is left."""
    sentence = refusal(run(no_driver, tmp_path, *COLLECTIVES, *words))
    assert re.fullmatch(
        rf"{backend} with CUDA tensors needs a GPU, but CUDA \d+\.\d+ reports "
        r'"Found no NVIDIA driver on your system" with CUDA_VISIBLE_DEVICES=0,1,2,3: '
        r"run where torch finds a GPU, or use --device cpu --backend gloo",
        sentence,
    ), sentence
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        (TOO_OLD, "The NVIDIA driver on your system is too old (found version 11040)"),
        ({"FAKE_INIT": "802"}, "Error 802: system not yet initialized"),
        ({"FAKE_INIT": "999"}, "CUDA unknown error - this may be due to an incorrectly set up"),
    ],
)
def test_auto_refuses_a_broken_driver(
    driver: Path, tmp_path: Path, variables: dict[str, str], error: str
) -> None:
    """A driver that is too old or does not start is quoted in one line. ddpbench does not measure
    the CPU instead."""
    sentence = refusal(run(driver, tmp_path, *COLLECTIVES, **variables))
    assert sentence.startswith("the GPUs cannot be used: CUDA ")
    assert f' reports "{error}' in sentence
    assert sentence.endswith(": fix this error, or measure with --device cpu")


@pytest.mark.parametrize(("device", "started"), [("cpu", 0), ("auto", 1)])
def test_the_cpu_is_measured_in_forked_ranks(
    driver: Path, tmp_path: Path, device: str, started: int
) -> None:
    """With --device cpu no process starts CUDA, even if a driver is broken. On a login node, `auto`
    asks CUDA once, in the process that then forks the ranks."""
    log, broken = tmp_path / "log", TOO_OLD if device == "cpu" else {}
    words = ("--device", device, "-n", "2", "--output", "run")
    done = run(driver, tmp_path, *COLLECTIVES, *words, FAKE_LOG=str(log), **broken)
    assert done.returncode == 0, done.stderr
    assert (log.read_text() if log.exists() else "") == "started\n" * started
    stored = store.read(tmp_path / "run")
    assert (stored.state, stored.results[0].case.device) == ("complete", "cpu")
    assert stored.results[0].summary is not None


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
