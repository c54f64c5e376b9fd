"""`python -m ddpbench.watch SCRIPT` is `python SCRIPT`: what a program can see of itself, and ends.

None of these programs imports torch, so nothing is watched yet, and torch is not imported either.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from by_hand import run_by_hand
from command_lines import ONE_SENTENCE, run_command
from frozen import Frozen

from ddpbench.watch import __main__ as entry

FACTS = """
import pickle, sys, threading, atexit, typing, inspect, dataclasses
print(__name__, __file__, __package__, __spec__ and __spec__.name, __builtins__, sorted(globals()))
print(sys.argv, sys.path[0], len(sys.path), sys.modules["__main__"].__dict__ is globals())
print(type(__loader__).__name__, sys.excepthook is sys.__excepthook__, threading.active_count())
@dataclasses.dataclass
class Point:
    x: "typing.Optional[int]" = 1
print(typing.get_type_hints(Point), inspect.getsource(Point).count("x"))
print(pickle.loads(pickle.dumps(Point(2))), "torch" in sys.modules, "numpy" in sys.modules)
atexit.register(print, "at the end")
threading.Timer(0.05, print, ["in a thread"]).start()
"""
SPAWN = """
import multiprocessing, sys
class Task:
    def __call__(self, n): return n * factor
factor = 3
if __name__ == "__main__":
    for how in ("spawn", "fork"):
        with multiprocessing.get_context(how).Pool(2) as pool:
            print(how, pool.map(Task(), range(4)), sys.argv)
"""
ERROR = """
def fail():
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("with a cause") from error
fail()
"""
SIGNAL = "import os, signal; print('before', flush=True); os.kill(os.getpid(), signal.{})"
ENDS = {
    "an error": ERROR,
    "a syntax error": "x = 1\nif x\n",
    "a sentence": "import sys; sys.exit('a sentence')",
    "a number": "raise SystemExit(7)",
    "Ctrl-C": SIGNAL.format("SIGINT"),
    "SIGKILL": SIGNAL.format("SIGKILL"),
    "os._exit": "import os; print('lost'); os._exit(9)",
    "a hook": "import sys; sys.excepthook = lambda *a: print(a[0], a[1]); 1 / 0",
}


def assert_same(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Assert that a program prints and ends alike with ddpbench and without; return how."""
    plain = run_command([sys.executable, *words], folder)
    watched = run_command([sys.executable, "-m", "ddpbench.watch", *words], folder)
    assert (watched.returncode, watched.stdout) == (plain.returncode, plain.stdout)
    assert watched.stderr.splitlines()[-2:] == plain.stderr.splitlines()[-2:]
    return watched


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the same program as a script, a module and a package."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(FACTS)
    (tmp_path / "link.py").symlink_to("scripts/train.py")
    (tmp_path / "package").mkdir()
    for name in ("__init__", "module", "__main__"):
        (tmp_path / "package" / f"{name}.py").write_text("" if name == "__init__" else FACTS)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("scripts/train.py", "--verify", "--", "-m", "x", "--help"),
        ("link.py",),
        ("-m", "package.module", "--verify", "-5"),
        ("-mpackage",),
    ],
    ids=" ".join,
)
def test_a_program_sees_itself_as_without_ddpbench(folder: Path, words: tuple[str, ...]) -> None:
    """Its words, names, path, modules, threads and exit functions are the same."""
    done = assert_same(folder, *words)
    assert "at the end" in done.stdout
    assert done.returncode == 0


def test_worker_processes_find_the_script_again(tmp_path: Path) -> None:
    """Spawned and forked workers import the script's classes as `__mp_main__` and `__main__`."""
    (tmp_path / "train.py").write_text(SPAWN)
    assert "[0, 3, 6, 9]" in assert_same(tmp_path, "train.py", "--n", "1").stdout


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_without_ddpbench(tmp_path: Path, end: str) -> None:
    """The exit code, and the last lines that are printed of an error."""
    (tmp_path / "train.py").write_text(ENDS[end])
    assert_same(tmp_path, "train.py")


def test_variables_that_a_script_sets_come_before_torch(tmp_path: Path) -> None:
    """torch is imported by the script and not before, and the watch is on from then on."""
    (tmp_path / "train.py").write_text(
        "import os, sys, importlib.util; print('torch' in sys.modules)\n"
        "os.environ['OMP_NUM_THREADS'] = '1'; importlib.util.find_spec('torch')\n"
        "import torch; print(torch.get_num_threads())\n"
        "from ddpbench.watch import api; print(api._on is not None)"
    )
    words = [sys.executable, "-m", "ddpbench.watch", "train.py"]
    done = run_command(words, tmp_path, OMP_NUM_THREADS="2")
    assert done.stdout.split() == ["False", "1", "True"]


@pytest.mark.parametrize(
    "words",
    [
        ["absent.py"],
        ["folder"],
        ["--verify", "0", "x.py"],
        ["--prometheus", "70000", "x.py"],
        ["-n", "2", "x.py"],
        [],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_one_sentence(
    frozen: Frozen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    """Exit code 2, before anything of the program has run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["watch", *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.py").touch()
    with pytest.raises(SystemExit) as end:
        entry.main(words)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert ONE_SENTENCE.fullmatch(err)
    frozen.text(err)


def test_one_rank_speaks_for_all(tmp_path: Path) -> None:
    """A script that does not exist ends both ranks with exit code 2, and rank 0 alone says why."""
    words = [sys.executable, "-m", "ddpbench.watch", "absent.py"]
    first, other = run_by_hand(tmp_path, 2, words)
    assert (first.returncode, other.returncode) == (2, 2)
    assert ONE_SENTENCE.fullmatch(first.stderr)
    assert other.stderr == ""
