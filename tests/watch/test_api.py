"""`ddpbench.watch(...)`: a package that can be called, its arguments, its beginning and its end."""

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from by_hand import run_by_hand
from command_lines import run_command
from frozen import Frozen
from warm_python import warm_python

import ddpbench
from ddpbench.watch import api, command

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, ddpbench
from torch import nn
reports = []
if os.environ["WHEN"] == "before":
    ddpbench.watch(on_report=reports.append)
dist.init_process_group("gloo")
if os.environ["WHEN"] == "after":
    ddpbench.watch(on_report=reports.append, output=None)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ddpbench.watch() as watch:
    for _ in range(20):
        time.sleep(0.1)  # in a job that is over at once, ranks do not meet
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
pid = os.fork()
if not pid:
    watch.close()
    os._exit(0)
os.waitpid(pid, 0)
watch.close()
print(dist.get_rank(), len(reports) > 0)
dist.destroy_process_group()
"""


def test_the_package_can_be_called() -> None:
    """`ddpbench.watch` is the package of that name, and calls a function that documents each
    argument."""
    package: Any = sys.modules["ddpbench.watch"]
    assert ddpbench.watch is package
    assert package.__call__ is api.watch
    assert api.watch.__doc__ is not None
    assert all(f"{name}:" in api.watch.__doc__ for name in inspect.signature(api.watch).parameters)


WRONG = {"verify": -1, "timeout": float("nan"), "prometheus": 70000}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused_at_once(frozen: Frozen, name: str) -> None:
    """A ValueError says what was given and what is allowed, and nothing is watched."""
    arguments: dict[str, Any] = {name: WRONG[name]}
    with pytest.raises(ValueError, match=r"^ddpbench\.watch: ") as caught:
        ddpbench.watch(**arguments)
    frozen.text(str(caught.value))
    assert api._on is None


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.nightly)])
def test_one_line_in_the_script_is_enough(tmp_path: Path, when: str) -> None:
    """Before or after init_process_group; a second call returns the same watch, whose end in `with`
    gives the last report to rank 0; a forked child and a second end do nothing."""
    (tmp_path / "train.py").write_text(SCRIPT)
    first, other = run_by_hand(tmp_path, 2, [*warm_python(), "train.py"], WHEN=when)
    assert (first.returncode, other.returncode) == (0, 0), first.stderr
    assert (first.stdout.split(), other.stdout.split()) == (["0", "True"], ["1", "False"])
    assert "part of a step" in first.stderr
    assert other.stderr == ""
    assert (tmp_path / "results").exists() == (when == "before")


def test_the_folder_of_runs_stays_where_the_job_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the script changes its folder before there is a process group."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert command.parse(["train.py"]).options["output"] == tmp_path / "results"


def test_a_watch_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    """The job goes on, with its own exit code, if a part of the watch cannot be imported."""
    (tmp_path / "msgspec.py").write_text("raise ImportError('no msgspec')")
    (tmp_path / "train.py").write_text("import ddpbench, sys\nddpbench.watch()\nsys.exit(3)")
    done = run_command([sys.executable, "train.py"], tmp_path)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "ImportError: no msgspec" in done.stderr
