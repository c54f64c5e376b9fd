"""A new entry touches one table: fakes of each kind appear in help, sweep and output."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from command_lines import QUICK, run_command
from warm_python import warm_python

import ddpbench

# A user's module, registered before the command line is parsed.
FAKES = """
import sys
from dataclasses import replace

from ddpbench.analysis import findings, lines
from ddpbench.catalog import backends, operations
from ddpbench.records.schema import Finding
from ddpbench.present.collectives.columns import COLUMNS
from ddpbench.present.columns import Column
from ddpbench.present.writers import WRITERS

operations.OPERATIONS["all_reduce_twice"] = replace(
    operations.OPERATIONS["broadcast"], name="all_reduce_twice", help="a fake"
)
gloo = backends.BACKENDS["gloo"]
backends.BACKENDS["gloo2"] = replace(gloo, name="gloo2", register=lambda: "gloo")
WRITERS["shout"] = lambda document: f"SHOUTED: {document.title}\\n"
COLUMNS["ns"] = Column("ns", lambda line: (line.seconds or 0) * 1e9, default=False)
findings.CHECKS.append(lambda run: [Finding("note", "fake", "a fake finding")])
"""
MAIN = "from ddpbench.cli import main\nsys.exit(main())\n"


def test_fakes_are_in_help_sweep_and_output(tmp_path: Path) -> None:
    """An operation, a backend, a format and a column are in the help, measured, checked and
    printed; a fake check of the run adds its finding."""
    (tmp_path / "front.py").write_text(FAKES + MAIN)

    def call(*words: str, launcher: Sequence[str] = ()) -> str:
        done = run_command([*warm_python(), *launcher, "front.py", *words], tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["--backend", "gloo2", "--op", "all_reduce_twice", "--sizes", "4,64", *QUICK]
    columns = ["--columns", "size,ns,check"]
    table = call("collectives", *words, *columns, launcher=torchrun)
    assert re.search(r"all_reduce_twice  float32[^\n]*\n[^\n]*  ns  ", table), table
    assert "NOTE (fake)" in table
    assert "gloo2" in table
    assert table.count(" ok") == 2
    assert "SHOUTED: ddpbench" in call("show", "last", "--format", "shout")
    text = call("collectives", "--help")
    for name in ("all_reduce_twice", "gloo2", "shout"):
        assert re.search(rf"\b{name}\b", text), name
    assert call("collectives", "--columns", "help").endswith("\nns\n")


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


def test_a_command_is_one_file(tmp_path: Path) -> None:
    """A module in commands/ is in its group of the overview, has help, and runs without a change of
    another file. The overview does not import it."""
    root = Path(ddpbench.__file__).parents[1]
    shutil.copytree(root / "ddpbench", tmp_path / "ddpbench")
    (tmp_path / "ddpbench/commands/greet.py").write_text(COMMAND)
    for words, code, expected in (
        ("--help", 0, r"(?s)diagnose:\n.*\n  greet +greet the ranks\n(?:  [^\n]*\n)*\ncompare:"),
        ("greet --help", 0, r"(?s)usage: ddpbench greet .*Greet the ranks.*whom to greet"),
        ("greet --name Ada", 4, r"hello Ada\n"),
    ):
        command = [sys.executable, "-m", "ddpbench", *words.split()]
        done = run_command(command, tmp_path, PYTHONPATH=str(tmp_path))
        assert (done.returncode, done.stderr) == (code, "")
        assert re.search(expected, done.stdout), done.stdout
