"""What is printed: any terminal can show it, and no name that it holds can steer the terminal."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_lines import (
    ONE_SENTENCE,
    QUICK,
    ROOT,
    ddpbench_command,
    read_stored_run,
    run_command,
)
from frozen import Frozen
from in_process import call_in_process
from warm_python import warm_python

from ddpbench import cli
from ddpbench.present.writers import WRITERS
from ddpbench.records import terminal_text

REFERENCE = ROOT / "results/reference"
RUNS = {
    "collectives": REFERENCE / "cpu-2-ranks/run.json",
    "ddp": REFERENCE / "ddp-cpu-2-ranks/run.json",
    "doctor": REFERENCE / "doctor-cpu-4-ranks/run.json",
}
CASES = 4  # of a stored run: that many are enough to be printed


def read_first_cases(kind: str) -> Any:
    """Return the JSON of a stored run with all launches of its first cases."""
    run = json.loads(RUNS[kind].read_bytes())
    for name in ("results", "steps"):
        cases: list[Any] = []
        for result in run.get(name, []):
            if result["case"] not in cases:
                cases.append(result["case"])
        run[name] = [each for each in run.get(name, []) if each["case"] in cases[:CASES]]
    return run


# Clear the screen, a bell, text from right to left, a line of somebody else's.
EVIL = "\x1b[2J\x07\r\x9b\u202e\nFORGED"
CODED = {"severity", "state", "kind", "form", "group", "device", "started", "command", "name"}


def poisoned(value: Any, key: str = "") -> Any:
    """JSON with EVIL at the end of every string, but for words that mean something to ddpbench."""
    if isinstance(value, dict):
        return {name: poisoned(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, key) for item in value]
    return value + EVIL if isinstance(value, str) and key not in CODED else value


@pytest.mark.parametrize("kind", RUNS)
def test_no_control_character_of_a_stored_name_is_printed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts, GPUs, backends, labels, files: in every format, list and comparison each
    control character is an escape, and no name begins a line. JSON has the very name."""
    monkeypatch.chdir(tmp_path)
    raw = poisoned(read_first_cases(kind))
    for name in ("one", f"two{EVIL}"):
        folder = Path("results") / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({**raw, "started": name[:3]}))
    operation = {"collectives": "all_reduce", "ddp": "mlp", "doctor": "all_reduce"}[kind]
    lines = [["show", "results/one", "--format", form] for form in WRITERS]
    lines += [["list"], ["list", "--case", operation]]
    lines += [["compare", "one", f"two{EVIL}", "--format", form] for form in ("table", "csv")]
    lines += [["show", f"no{EVIL}such"], ["collectives", "--op", EVIL], ["list", EVIL]]
    for words in lines:
        ended = call_in_process(words)
        text = ended.out + ended.err
        assert text, words
        assert {c for c in text if not c.isprintable()} == {"\n"}, words
        assert not re.search("^FORGED", text, re.MULTILINE), words
    assert json.loads(call_in_process(["show", "one", "--format", "json"]).out)["id"] == raw["id"]
    assert EVIL in raw["id"]


IN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def show_in(encoding: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what `show` prints on a terminal of this encoding."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        assert cli.main(["show", str(folder)]) == 0
    terminal.flush()
    assert isinstance(terminal.buffer, io.BytesIO)
    return terminal.buffer.getvalue().decode(encoding)


@pytest.mark.thorough
def test_a_terminal_without_unicode_gets_ascii(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """µ, ±, × and … have substitutes; every number is the same. A locale may be why."""
    folder = RUNS["collectives"].parent
    text = show_in("utf-8", folder, monkeypatch)
    assert {"µ", "±", "×", "⁹"} <= set(text)
    replaced = text
    for character, substitute in terminal_text.ASCII.items():
        replaced = replaced.replace(character, substitute)
    assert show_in("ascii", folder, monkeypatch) == replaced
    done = run_command(ddpbench_command("show", str(folder)), tmp_path, **IN_C)
    assert (done.stdout, done.stderr) == (replaced, "")


def bash(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A line of bash in which $D is this ddpbench: warm where only its stdout is special."""
    python = [sys.executable] if "2>" in script else warm_python()
    line = script.replace("$D", shlex.join([*python, "-m", "ddpbench"]))
    return run_command(["bash", "-c", line], cwd)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("show $RUN >&- 2>&-", 0),
        ("show $RUN > /dev/full", 2),
        ("show $RUN 2> /dev/full | head -1; exit ${PIPESTATUS[0]}", 0),
    ],
)
def test_output_that_cannot_be_printed_is_one_sentence(
    tmp_path: Path, script: str, code: int
) -> None:
    """Closed, full, or a pipe whose reader has left: no traceback, and the exit code says so."""
    done = bash(f"$D {script.replace('$RUN', str(RUNS['collectives'].parent))}", tmp_path)
    assert done.returncode == code
    assert ONE_SENTENCE.fullmatch(done.stderr) if code == 2 else done.stderr == ""


@pytest.mark.thorough
def test_results_are_stored_where_nothing_can_be_printed(tmp_path: Path, frozen: Frozen) -> None:
    """A full stdout is told, and where the results are; the exit code is that of what was measured;
    the same without stdin, stdout and stderr."""
    words = f"collectives --backend gloo --op barrier {' '.join(QUICK)}"
    done = bash(f"$D {words} > /dev/full", tmp_path)
    folder, run = read_stored_run(tmp_path)
    assert (done.returncode, run.state) == (0, "complete")
    assert ONE_SENTENCE.fullmatch(done.stderr)
    frozen.text(done.stderr.replace(folder.name, "FOLDER"))
    done = bash(f"$D {words} --output closed <&- >&- 2>&-", tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "closed/table.txt").stat().st_size > 0


def test_escapes_keep_what_can_be_printed() -> None:
    """Letters of any script stay; controls, bidirectional marks and half characters do not."""
    assert terminal_text.escape("größe µ±×… 日本 ✓") == "größe µ±×… 日本 ✓"
    assert terminal_text.escape("a\x1b[31m\n\t\x7f\u202e\udcff") == r"a\x1b[31m\n\t\x7f\u202e\udcff"
    assert terminal_text.escape_lines("a\nb\rc") == "a\nb\\rc"
