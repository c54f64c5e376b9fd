"""run_bench.sh in copies of the checkout whose ddpbench prints its command line.

No test needs a network: pip uses no index, and installs a wheel that is made here.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_SECONDS

from ddpbench import cli

CHECKOUT = Path(__file__).resolve().parents[1]
# Where run_bench.sh looks for GPUs → where it looks in the tests, in the folder `machine`.
PLACES = {
    "/proc/driver/nvidia": "driver",
    "/sys/module/nvidia": "module",
    "/sys/class/kfd/kfd/topology": "topology",
    "nvidia-smi -": "nvidia-smi -",
}
STUB = """\
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "python": sys.executable, "module": __file__}), flush=True)
sys.exit(int(os.environ.get("STUB_EXIT", "0")))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the checkout to a folder with a space; its ddpbench echoes its arguments, and its
    machine has the GPUs and the driver of `install_gpu`."""
    copy = tmp_path / "a checkout"
    (copy / "ddpbench").mkdir(parents=True)
    shutil.copy2(CHECKOUT / "run_bench.sh", copy)
    text = (copy / "run_bench.sh").read_text()
    for place, here in PLACES.items():
        assert place in text
        text = text.replace(place, f"{tmp_path}/machine/{here}")
    (copy / "run_bench.sh").write_text(text)
    shutil.copy2(CHECKOUT / "pyproject.toml", copy)
    (copy / "ddpbench" / "__init__.py").touch()
    (copy / "ddpbench" / "__main__.py").write_text(STUB)
    return copy


def environment(**changes: str) -> dict[str, str]:
    """Return this environment without this suite's path to ddpbench and without a package index."""
    kept = {**os.environ, "PYTHON": sys.executable, "PIP_NO_INDEX": "1", **changes}
    for name in {"VIRTUAL_ENV", "CONDA_PREFIX", "PIP_FIND_LINKS"} - changes.keys():
        kept.pop(name, None)
    paths = [path for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path]
    elsewhere = [path for path in paths if Path(path).resolve() != CHECKOUT]
    return {**kept, "PYTHONPATH": os.pathsep.join(elsewhere)}


def run_bench(
    checkout: Path, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "run_bench.sh", *arguments],
        cwd=cwd or checkout.parent,
        env=environment() if env is None else env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def read_calls(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert result.stdout, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def read_refusal(result: subprocess.CompletedProcess[str]) -> str:
    """Return the one line of a refusal."""
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def need_probe(checkout: Path, table: str = "dependencies") -> None:
    """Add a package that no index has to the dependencies, or to an extra."""
    project = checkout / "pyproject.toml"
    text = project.read_text()
    project.write_text(text.replace(f"{table} = [", f'{table} = ["ddpbench_probe>=1", ', 1))


def install_gpu(machine: Path, file: str, text: str) -> None:
    """Let a file of the driver have this text; nvidia-smi prints it."""
    write_program(machine / file, f"echo '{text}'\n")
    if file != "nvidia-smi":
        (machine / file).write_text(text)


def write_program(path: Path, text: str) -> Path:
    """Write a shell script that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def make_wheel(folder: Path, name: str) -> None:
    """Write a wheel of one empty module."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"{name}.py,,\n",
    }
    folder.mkdir()
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)


def make_environment(folder: Path, *paths: str | Path) -> Path:
    """Make a virtual environment that sees the packages of this Python, and these paths."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    seen = [entry for entry in sys.path if entry.endswith("-packages")]
    (packages / "seen.pth").write_text("\n".join(map(str, [*seen, *paths])) + "\n")
    return folder


@pytest.fixture
def active(checkout: Path, tmp_path: Path) -> Path:
    """Make an environment that has the checkout's ddpbench."""
    return make_environment(tmp_path / "active", checkout)


def test_an_unknown_command_is_refused(checkout: Path) -> None:
    """One line lists the commands, with exit code 2, before a Python is looked for."""
    env = environment(PYTHON="/nowhere/python")
    wanted = "not one of cpu, gpu, mpi, all, ddp, slurm, test, python"
    for arguments in ([], ["cup"], ["--cpu"]):
        assert wanted in read_refusal(run_bench(checkout, *arguments, env=env))


def test_help_lists_the_commands(checkout: Path) -> None:
    """--help needs no Python, goes to stdout, and names every command, even those of ddpbench."""
    result = run_bench(checkout, "--help", env=environment(PYTHON="/nowhere/python"))
    assert (result.returncode, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("  ")]
    own = {"cpu", "gpu", "mpi", "all", "ddp", "slurm", "test", "python"}
    assert {row[0] for row in rows[: len(own)]} == own
    assert own | set(rows[len(own)]) == own | set(cli.list_names())
    assert len(rows) == len(own) + 1


def test_slurm_submits_a_script_that_keeps_words_whole(
    checkout: Path, active: Path, tmp_path: Path
) -> None:
    """The words before -- are sbatch's; the others run under srun in this Python, quoted as given,
    with the CPUs of a task. The exit code is sbatch's."""
    write_program(tmp_path / "sbatch", 'echo "$@"\nexec bash\n')
    write_program(tmp_path / "srun", 'echo "$1" "$2"; shift 2; "$@"\n')
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = environment(VIRTUAL_ENV=str(active), PATH=path, STUB_EXIT="4", SLURM_CPUS_PER_TASK="3")
    given = ["ddp", "--output", "a b", "--op", "$HOME", ""]
    for words, command in (([], ["collectives"]), (["--", *given], given)):
        result = run_bench(checkout, "slurm", "-N2", "--comment", "x", *words, env=env)
        options, cpus, call = result.stdout.splitlines()
        assert options.endswith("--output results/slurm-%j.out --signal USR1@30 -N2 --comment x")
        assert cpus == "-c 3"
        assert json.loads(call)["argv"] == command
        assert json.loads(call)["python"] == str(active / "bin" / "python")
        assert result.returncode == 4
    assert (tmp_path / "results").is_dir()


def test_a_job_that_cannot_be_submitted_is_one_sentence(checkout: Path, tmp_path: Path) -> None:
    """It is refused before anything is set up, submitted or written."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "readlink"):
        (folder / name).symlink_to(str(shutil.which(name)))
    env = {"PATH": str(folder)}
    sentence = read_refusal(run_bench(checkout, "slurm", "-N2", env=env))
    assert "there is no sbatch in PATH: " in sentence
    (folder / "sbatch").symlink_to("bash")
    sentence = read_refusal(run_bench(checkout, "slurm", "-N2", "--", "dpd", env=env))
    assert "'dpd' cannot run in a Slurm job: choose collectives, " in sentence
    assert not (tmp_path / "results").exists()
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("driver/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06", False),
        ("driver/gpus/0000:01:00.0/information", "Model: NVIDIA H200", True),
        ("topology/nodes/0/gpu_id", "0\n", False),  # a CPU
        ("nvidia-smi", "GPU 0: NVIDIA H200 (UUID: GPU-1a2b)", True),
    ],
)
def test_gpu_without_a_gpu_is_refused_before_any_set_up(
    checkout: Path, tmp_path: Path, file: str, text: str, found: bool
) -> None:
    """Without a GPU, as on a login node with a driver, no Python is asked for and no .venv made."""
    install_gpu(tmp_path / "machine", file, text)
    env = environment(PYTHON="/nowhere/python")
    sentence = read_refusal(run_bench(checkout, "gpu", env=env))
    assert ("/nowhere/python" if found else "there is no GPU on this machine") in sentence
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(("error", "calls"), [("", 2), ("No CUDA GPUs are available", 1)])
def test_gpus_that_torch_cannot_use_are_skipped(
    checkout: Path, active: Path, tmp_path: Path, error: str, calls: int
) -> None:
    """A driver may list GPUs that this job may not use; the exit code is that of the CPU's part."""
    install_gpu(tmp_path / "machine", "driver/gpus/0000:01:00.0/information", "Model: NVIDIA H200")
    (tmp_path / "fake").mkdir()
    raised = f"raise RuntimeError({error!r})" if error else "pass"
    (tmp_path / "fake" / "torch.py").write_text(
        f"class cuda:\n    @staticmethod\n    def init():\n        {raised}\n"
    )
    env = environment(VIRTUAL_ENV=str(active), PYTHONPATH=str(tmp_path / "fake"), STUB_EXIT="4")
    result = run_bench(checkout, "all", env=env)
    devices = [call["argv"][2] for call in read_calls(result)]
    assert (devices, result.returncode) == (["cpu", "cuda"][:calls], 4)
    assert (f"RuntimeError: {error}\n" in result.stderr) == (calls == 1)


# A Python without torch, in which pip only prints what it is to install.
BARE_PYTHON = """\
case "$*" in
  *version_info\\[:2]*) echo 3 11 ;;
  "-m venv"*) for venv; do :; done; mkdir -p "$venv/bin"; cp "$0" "$venv/bin/python" ;;
  *sysconfig*) dirname "$0" ;;
  "-m pip install"*) echo "pip was asked for ${*#*constraints.txt }"; exit 1 ;;
  *find_spec*torch) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("file", "text", "named", "version"),
    [
        (
            "driver/version",
            "NVRM version: NVIDIA  570.86.15  Release\n",
            "570.86.15",
            "2.10.0",
        ),
        ("module/version", "580.65.06\n", "", "2.13.0"),
        ("nvidia-smi", "", "", "2.13.0"),
    ],
)
def test_the_torch_that_is_installed_fits_the_driver(
    checkout: Path, tmp_path: Path, file: str, text: str, named: str, version: str
) -> None:
    """A torch for CUDA 13 sees no GPU with a driver for CUDA 12. Without a driver, and with a new
    one, the tested torch is installed."""
    install_gpu(tmp_path / "machine", file, text)
    python = write_program(tmp_path / "python", BARE_PYTHON)
    output = run_bench(checkout, "cpu", env=environment(PYTHON=str(python))).stderr
    assert f"pip was asked for torch=={version} mpi4py==" in output
    assert named in output
    assert ("driver" in output) == bool(named)


def test_the_active_environment_is_used_unchanged(checkout: Path, tmp_path: Path) -> None:
    """An active environment with ddpbench runs its own ddpbench, not the checkout's."""
    installed = tmp_path / "installed"
    shutil.copytree(checkout / "ddpbench", installed / "ddpbench")
    active = make_environment(tmp_path / "active", installed)
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        env = environment(PYTHON="/nowhere/python", **{variable: str(active)})
        result = run_bench(checkout, "cpu", cwd=tmp_path, env=env)
        (call,) = read_calls(result)
        assert call["python"] == str(active / "bin" / "python")
        assert call["module"] == str(installed / "ddpbench" / "__main__.py")


@pytest.mark.thorough
def test_a_python_with_everything_needs_no_installation(checkout: Path, tmp_path: Path) -> None:
    """The checkout's ddpbench runs, through a link and from another folder, which stays the current
    one. Afterwards .venv/bin/ddpbench is the command."""
    (tmp_path / "bench").symlink_to(checkout / "run_bench.sh")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = "import ddpbench, json, os, torch; print(json.dumps([ddpbench.__file__, os.getcwd()]))"
    command = [str(tmp_path / "bench"), "python", "-c", code]
    output = subprocess.check_output(command, cwd=elsewhere, env=environment(), text=True)
    assert json.loads(output) == [str(checkout / "ddpbench" / "__init__.py"), str(elsewhere)]
    (packages,) = checkout.glob(".venv/lib/python*/site-packages")
    assert [path.name for path in packages.iterdir()] == ["ddpbench-checkout.pth"]

    (tmp_path / "ddpbench").symlink_to(checkout / ".venv/bin/ddpbench")
    output = subprocess.check_output(
        [tmp_path / "ddpbench", "show", "a b"], cwd=elsewhere, env=environment(), text=True
    )
    call = json.loads(output)
    assert (call["argv"], call["python"]) == (["show", "a b"], f"{checkout}/.venv/bin/python")


def test_a_checkout_that_cannot_be_written(checkout: Path) -> None:
    """A Python with everything runs without .venv; with something missing there is one sentence. A
    .venv that run_bench.sh did not make is neither used nor removed."""
    (checkout / ".venv").touch()  # so that not even root can make the folder
    result = run_bench(checkout, "cpu")
    assert read_calls(result)[0]["python"] == sys.executable
    need_probe(checkout)
    assert "cannot write" in read_refusal(run_bench(checkout, "cpu"))
    (checkout / ".venv").unlink()
    made = make_environment(checkout / ".venv")
    assert ".venv was not made by run_bench.sh: " in read_refusal(run_bench(checkout, "cpu"))
    assert (made / "bin" / "python").exists()


def test_arguments_and_exit_code_pass_through(checkout: Path, active: Path) -> None:
    """The caller's arguments come last, whole, so that they win; ddpbench's exit code is kept. A
    command of ddpbench itself gets nothing else."""
    env = environment(VIRTUAL_ENV=str(active), STUB_EXIT="4")
    given = ["--op", "all reduce", "-n", "3"]
    for command, backends in (("cpu", "gloo,mpi"), ("mpi", "mpi"), ("all", "all"), ("show", "")):
        result = run_bench(checkout, command, *given, env=env)
        own = ["collectives", "--device", "cpu", "--backend", backends, "-n", "2"]
        own = own if backends else [command]
        assert [call["argv"] for call in read_calls(result)] == [[*own, *given]]
        assert result.returncode == 4
        assert f"python -m ddpbench {' '.join(own)}" in result.stderr


@pytest.mark.nightly
@pytest.mark.thorough
def test_a_missing_package_is_installed_beside_the_torch_at_hand(
    checkout: Path, tmp_path: Path
) -> None:
    """A failed set-up reports the reason. The next call recovers, and .venv gets only the missing
    package: torch and the rest stay those of the Python at hand."""
    need_probe(checkout)
    failed = run_bench(checkout, "python")
    assert (failed.returncode, failed.stdout) == (2, "")
    *_, from_pip, sentence = failed.stderr.splitlines()
    assert from_pip.startswith("ERROR: No matching distribution found for ddpbench_probe>=1")
    assert "install ddpbench_probe>=1" in sentence
    assert (checkout / ".venv").exists()

    make_wheel(tmp_path / "wheels", "ddpbench_probe")
    env = environment(PIP_FIND_LINKS=str(tmp_path / "wheels"))
    code = "import ddpbench, ddpbench_probe, torch; print(ddpbench_probe.__file__)"
    result = run_bench(checkout, "python", "-c", code, env=env)
    (probe,) = checkout.glob(".venv/lib/python*/site-packages/ddpbench_probe.py")
    assert (result.returncode, result.stdout) == (0, f"{probe}\n"), result
    assert not (probe.parent / "torch").exists()


@pytest.mark.thorough
def test_a_missing_extra_stops_nothing(checkout: Path) -> None:
    """A package that only some backends need is left out by name if the .venv is the user's own, or
    if pip cannot install it."""
    need_probe(checkout, "mpi")
    foreign = make_environment(checkout / ".venv")
    for _ in range(2):
        result = run_bench(checkout, "mpi")
        assert read_calls(result)[0]["python"] == sys.executable
        assert "without ddpbench_probe>=1" in result.stderr
        shutil.rmtree(foreign)  # the second call sets up its own
    assert "install ddpbench_probe>=1" in result.stderr


def test_an_unusable_python_is_refused(checkout: Path, tmp_path: Path) -> None:
    """A Python that is missing or fails the version check is named."""
    old = write_program(tmp_path / "python", "exit 1\n")
    for python in ("/nowhere/python", str(old)):
        line = read_refusal(run_bench(checkout, "cpu", env=environment(PYTHON=python)))
        assert f"{python} is no Python 3.10 or newer: install one" in line


# A Python that has all modules. Run with -m, it prints its words, and ends with the next of the
# codes in a file beside it.
RECORDING_PYTHON = """\
[ "$1" = -m ] || exit 0
printf '%s|' "$PYTHONPATH" "$@"
echo
read -r code rest <"$0.codes"
echo "$rest" >"$0.codes"
exit "$code"
"""
QUICK = "not (thorough or measures_time)"
ALL = [QUICK, "thorough and not measures_time", "measures_time"]


def record_calls(checkout: Path, words: str, codes: str, cwd: Path) -> tuple[list[list[str]], int]:
    """Run run_bench.sh, in which each call of pytest ends with one of these codes; return the words
    of the calls and the exit code."""
    environ = checkout.parent / "recording"
    python = write_program(environ / "bin" / "python", RECORDING_PYTHON)
    Path(f"{python}.codes").write_text(f"{codes}\n")
    env = environment(VIRTUAL_ENV=str(environ))
    result = run_bench(checkout, *words.split(), cwd=cwd, env=env)
    calls = [line.split("|")[:-1] for line in result.stdout.splitlines()]
    for call in calls:  # of the checkout, with the checkout's settings
        assert call[0].split(os.pathsep)[0] == str(checkout)
        assert call[1:5] == ["-m", "pytest", "-c", f"{checkout}/pyproject.toml"]
    return [call[5:] for call in calls], result.returncode


@pytest.mark.parametrize(
    ("words", "codes", "tiers", "code"),
    [
        ("test -k one", "0", [QUICK], 0),
        ("test -k one --rest", "0 0", ALL[1:], 0),
        ("test --all -k one", "5 0 5", ALL, 0),  # 5: nothing was selected
        ("test --all -k one", "5 5 5", ALL, 5),
        ("test --all -k one", "3 1 0", ALL, 3),
        ("test --all -k one", "0 2 0", ALL[:2], 2),  # Ctrl-C
    ],
)
def test_the_suite_runs_in_tiers(
    checkout: Path, words: str, codes: str, tiers: list[str], code: int
) -> None:
    """`test` runs the first, --all also the rest, --rest the rest only, each on all tests; other
    words go to pytest in each of them. The first failure is the exit code, and Ctrl-C ends all."""
    calls, ended = record_calls(checkout, words, codes, checkout)
    assert ended == code
    assert [call[len(call) - call[::-1].index("-m")] for call in calls] == tiers
    for call, tier in zip(calls, tiers, strict=True):
        assert f"{checkout}/tests" in call
        assert call[-2:] == ["-k", "one"]
        assert ("--numprocesses" in call) == (tier != "measures_time")


def test_a_named_file_replaces_the_suite(checkout: Path) -> None:
    """A file, a folder or a test of the suite, seen from the current folder, is run once, whatever
    its tier is; its failure is the exit code."""
    (checkout / "tests" / "perf").mkdir(parents=True)
    (checkout / "tests" / "test_probe.py").touch()
    for word, cwd in (("test_probe.py::test_two", checkout / "tests"), ("tests/perf", checkout)):
        calls, code = record_calls(checkout, f"test {word} -x", "1", cwd)
        assert (calls, code) == ([[word, "-x"]], 1)
