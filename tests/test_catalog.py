"""Adding one thing touches one table: fakes of each kind go through help, sweep and output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from command_lines import QUICK, clean_environment

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
        [sys.executable, "front.py", *words],
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
            [sys.executable, *torchrun, "front.py", *words, *extra, *QUICK],
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
            assert "NOTE (fake): a fake finding" in done.stdout
            assert "gloo2" in done.stdout
            assert done.stdout.count(" ok") == 2
