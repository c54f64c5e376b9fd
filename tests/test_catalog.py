"""Adding one thing touches one table: fakes of each kind go through help, sweep and output."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from command_lines import QUICK, clean_environment
from warm_python import warm_python

import ddpbench
from ddpbench import cli

# What a user's own module would hold, registered before the command line is read.
FAKES = """
import sys
from dataclasses import replace

from ddpbench.analysis import findings, lines
from ddpbench.catalog import backends, operations
from ddpbench.records.schema import Finding
from ddpbench.render import formats
from ddpbench.render.collective_columns import COLUMNS
from ddpbench.render.column import extra_column

operations.OPERATIONS["all_reduce_twice"] = replace(
    operations.OPERATIONS["broadcast"], name="all_reduce_twice", help="a fake"
)
gloo = backends.BACKENDS["gloo"]
backends.BACKENDS["gloo2"] = replace(gloo, name="gloo2", register=lambda: "gloo")
formats.FORMATS["shout"] = lambda run, columns, quiet: f"SHOUTED {len(run.results)} cases\\n"
COLUMNS["ns"] = extra_column("time ns", lambda line: (line.seconds or 0) * 1e9)
findings.CHECKS.append(lambda run: [Finding("note", "fake", "a fake finding")])
"""
MAIN = "from ddpbench.cli import main\nsys.exit(main())\n"


def call(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """ddpbench with the fakes, in the ranks too: they import the same module first."""
    (tmp_path / "fakes.py").write_text(FAKES)
    (tmp_path / "front.py").write_text(FAKES + MAIN)
    return subprocess.run(
        [*warm_python(), "front.py", *words],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=f"{Path(__file__).parents[1]}:{tmp_path}"),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_fakes_appear_in_the_help(tmp_path: Path) -> None:
    """An operation, a backend, an output and a column stand in the help as soon as registered."""
    done = call(tmp_path, "collectives", "--help")
    assert done.returncode == 0
    for name in ("all_reduce_twice", "gloo2", "shout", "ns"):
        assert re.search(rf"\b{name}\b", done.stdout), name


def test_fakes_are_swept_and_shown(tmp_path: Path) -> None:
    """They are measured, checked and printed; a fake check of the run adds its finding."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["collectives", "--backend", "gloo2", "--op", "all_reduce_twice", "--sizes", "4,64"]
    (tmp_path / "front.py").write_text(FAKES + MAIN)
    for extra, expected in (
        (["--columns", "size,ns,check"], r"all_reduce_twice  float32[^\n]*\n[^\n]*time ns"),
        (["--format", "shout"], r"SHOUTED 2 cases"),
    ):
        done = subprocess.run(
            [*warm_python(), *torchrun, "front.py", *words, *extra, *QUICK],
            cwd=tmp_path,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert re.search(expected, done.stdout), done.stdout
        if "--columns" in extra:
            assert "NOTE (fake)" in done.stdout
            assert "gloo2" in done.stdout
            assert done.stdout.count(" ok") == 2


COMMAND = """
'''Greet the ranks.

python -m ddpbench greet --name Ada
'''

import numpy

GROUP = "diagnose"
HELP = "greet the ranks"


def add_arguments(parser):
    parser.add_argument("--name", default="you", help="whom to greet (default: you)")


def run(namespace, words):
    print(f"hello {namespace.name}")
    return 4
""".lstrip()


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--help"], 0, r"(?s)diagnose:\n.*\n  greet +greet the ranks\n(?:  [^\n]*\n)*\ncompare:"),
        (["greet", "--help"], 0, r"(?s)usage: ddpbench greet .*Greet the ranks.*whom to greet"),
        (["greet", "--name", "Ada"], 4, r"hello Ada\n"),
    ],
)
def test_a_command_is_one_file(tmp_path: Path, words: list[str], code: int, expected: str) -> None:
    """A module in commands/ stands in the overview, in its group, has a help of its own, and runs:
    no other file knows it. The overview does not import it."""
    root = Path(ddpbench.__file__).parents[1]
    shutil.copytree(root / "ddpbench", tmp_path / "ddpbench")
    (tmp_path / "ddpbench/commands/greet.py").write_text(COMMAND)
    done = subprocess.run(
        [sys.executable, "-m", "ddpbench", *words],
        cwd=tmp_path, env=clean_environment(PYTHONPATH=str(tmp_path)),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "")
    assert re.search(expected, done.stdout), done.stdout


def test_every_command_declares_its_line() -> None:
    """Each has a group of the overview, a line that fits into 100 columns, and a description."""
    for group, entries in cli.read_groups().items():
        assert group in cli.GROUPS
        for name, line in entries.items():
            assert len(line) <= 85
            assert import_module(f"ddpbench.commands.{name}").__doc__
