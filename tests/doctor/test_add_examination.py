"""Adding an examination takes one file: help, run, findings and `show` follow."""

from pathlib import Path

import pytest
from command_lines import run_ddpbench
from frozen import Frozen

from ddpbench.records import store

# A user's own module. Every rank writes a file; rank 0 returns a table of the rates.
DISK = """
import time

from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.examinations import EXAMINATIONS, Examiner
from ddpbench.records.schema import Finding
from ddpbench.records.table import Table, TableColumn
from ddpbench.runtime import control


def examine(context: Context) -> Outcome:
    rates = control.gather_values(context.world, 1.5 + context.world.rank)
    columns = (TableColumn("disk", "left"), TableColumn("GB/s"), TableColumn("full %", decimals=0))
    rows = [(f"disk of rank {rank}", rate, None) for rank, rate in enumerate(rates)]
    return Outcome(
        lines=("wrote 1 GiB on every rank",),
        findings=(Finding("warning", "slow-disk", "the disk of rank 0 is slow", "buy another"),),
        figures={"rates": rates},
        tables=(Table("disks", columns, tuple(rows), ("GB/s: while all ranks write",)),),
    )


EXAMINATIONS["disk"] = Examiner("disk", "measure the local disk", examine)
"""
TABLE = """\
disks
disk              GB/s    full %
--------------  ------  --------
disk of rank 0   1.500         -
disk of rank 1   2.500         -

GB/s: while all ranks write
"""


@pytest.mark.thorough
def test_an_examination_is_added_by_one_file(tmp_path: Path, frozen: Frozen) -> None:
    """A module named with --import registers it. It stands in the help, it can be chosen, its table
    and its finding are printed, and `show` prints the same where the module is missing."""
    (tmp_path / "disk.py").write_text(DISK)
    path = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    done = run_ddpbench(tmp_path, "doctor", "--help", "--import", "disk", **path)
    assert "measure the local disk" in " ".join(done.stdout.split())
    words = ("doctor", "-n", "2", "--backend", "gloo", "--only", "disk", "--fail-on", "warning")
    done = run_ddpbench(tmp_path, *words, "--import", "disk", "--output", "run", **path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "\n\n" + TABLE in done.stdout
    assert "WARNING (slow-disk)" in done.stdout
    (tmp_path / "disk.py").unlink()
    shown = run_ddpbench(tmp_path, "show", "run")
    assert shown.stdout == done.stdout
    (examination,) = store.read(tmp_path / "run").examinations
    frozen.findings(examination.findings)
