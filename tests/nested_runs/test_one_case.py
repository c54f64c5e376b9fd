"""A case measured by another process: its command line, its run and end, and its JSON."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from frozen import Frozen
from left_processes import wait_for_end
from patience import PATIENCE_SECONDS
from stored_runs import a_case, a_result, a_run, a_summary
from stored_steps import a_step_result, a_step_run

from ddpbench.nested_runs import one_case
from ddpbench.records import codec
from ddpbench.records.schema import Finding, Run, Wrong

STUB = """\
import json, os, subprocess, sys, time
from pathlib import Path
folder = Path(next(w for w in sys.argv if w.startswith("--output=")).partition("=")[2])
script = json.loads(Path(__file__).with_name("script.json").read_text())
if script["run"]:
    folder.mkdir()
    (folder / "run.json").write_text(script["run"])
(Path(__file__).with_name("words.json")).write_text(json.dumps(sys.argv[1:]))
sys.stderr.write(script["stderr"])
if script["sleep"]:
    child = subprocess.Popen(["sleep", "600"])
    Path(__file__).with_name("child").write_text(str(child.pid))
    time.sleep(600)
sys.exit(script["code"])
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a ddpbench that follows a script, which other processes run."""
    package = tmp_path / "path" / "ddpbench"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STUB)
    monkeypatch.chdir(tmp_path / "path")  # `python -m` looks there first
    return package


def ended(stub: Path, run: Run | None, code: int, stderr: str = "", sleep: float = 0) -> Run:
    """Return the result of a command that ends in this way."""
    text = json.dumps(asdict(run)) if run else ""
    script = {"run": text, "code": code, "stderr": stderr, "sleep": sleep > 0}
    (stub / "script.json").write_text(json.dumps(script))
    seconds = sleep or PATIENCE_SECONDS
    return one_case.measure("collectives", ["--op=all_reduce"], stub / "run", seconds)


def test_the_run_of_a_clean_command_is_read(stub: Path) -> None:
    run = a_run(a_result())
    assert ended(stub, run, 0) == run
    assert json.loads((stub / "words.json").read_text()) == [
        "collectives", "--op=all_reduce", f"--output={stub / 'run'}", "--quiet", "--format=json",
    ]  # fmt: skip


DEAD = "ddpbench: rank 1 (vm, pid 7) has died, while rank 0 waited\nddpbench: stored in here\n"
ERROR = Finding("error", "wrong-result", "rank 1 got 4, expected 3", "do not train")


@pytest.mark.parametrize(
    ("run", "code", "stderr"),
    [
        (None, 2, "noise\nddpbench: --op: unknown operation 'x'\n"),
        (None, 1, "Traceback\nOSError: no\n"),
        (None, 5, ""),
        (replace(a_run(), state="failed"), 5, DEAD),
        (a_run(a_result(), findings=(ERROR,)), 4, ""),
    ],
    ids=["refused", "crashed", "silent", "dead rank", "wrong result"],
)
def test_what_went_wrong_is_one_sentence(
    stub: Path, frozen: Frozen, run: Run | None, code: int, stderr: str
) -> None:
    with pytest.raises(one_case.Unmeasured) as caught:
        ended(stub, run, code, stderr)
    frozen.text(str(caught.value))


def test_a_case_that_the_backend_does_not_have_is_a_run(stub: Path) -> None:
    """All cases were skipped, with exit code 2: the run has the reason, and this is no failure."""
    skipped = replace(a_result(), summary=None, reason="mpi has no max of complex numbers")
    run = ended(stub, a_run(skipped, exit_code=2), 2)
    found = one_case.only_case(run)
    assert (found.side, found.reason) == (None, "mpi has no max of complex numbers")


def test_when_time_is_up_all_its_processes_end(stub: Path) -> None:
    """A command that hangs is ended together with its child, and named."""
    for seconds in (0.5, 5, 50):  # until it has come so far as to have a child
        with pytest.raises(one_case.Unmeasured, match=r"`ddpbench collectives "):
            ended(stub, None, 0, sleep=seconds)
        if (stub / "child").exists():
            break
    wait_for_end(int((stub / "child").read_text()))


def test_keywords_are_options() -> None:
    """True is a flag, False and None are left out, `options` are passed as they are."""
    asked = {"sizes": "1M", "ranks": 2, "no_check": True, "limit": None, "static_graph": False}
    assert one_case.words({**asked, "options": ("--import", "x")}) == [
        "--sizes=1M", "--ranks=2", "--no-check", "--import", "x",
    ]  # fmt: skip
    assert one_case.words({"options": "--async"}) == ["--async"]


def test_only_one_valid_case_is_taken(frozen: Frozen) -> None:
    """Several cases, or a wrong one, are refused."""
    two = a_run(a_result(), a_result(a_case(nbytes=8, count=2)))
    wrong = a_run(a_result(wrong=(Wrong(1, 0, 0, "3", "4"),)))
    for run in (two, wrong):
        with pytest.raises(one_case.Unmeasured) as caught:
            one_case.only_case(run)
        frozen.text(str(caught.value))


def test_json_gives_the_same_again() -> None:
    """The measurement of a collective and of a DDP step survives JSON. Anything else is refused
    with the name of its file."""
    results = [a_result(a_case(), i, a_summary(1e-3 * (i + 1))) for i in range(6)]
    for run in (a_run(*results), a_step_run(a_step_result())):
        measured = one_case.summarise(run, one_case.only_case(run))
        stored = json.loads(json.dumps(codec.to_plain(measured)))
        assert one_case.decode(stored, "0001") == replace(measured, source="0001")
    with pytest.raises(ValueError, match="0001"):
        one_case.decode({"case": {}}, "0001")
