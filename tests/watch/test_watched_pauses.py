"""Real jobs that pause now and then, under `ddpbench watch`."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_lines import run_ddpbench

from ddpbench.records import store
from ddpbench.records.schema import Run

JOB = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
began = time.perf_counter()
for step in range(1, 401):
    time.sleep(0.004)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if step % 20 == 0 and SAVES:
        if dist.get_rank() == 0:
            time.sleep(0.1)  # save
        dist.barrier()  # meet
    if step % 50 == 0 and EVALUATES:
        with torch.no_grad():
            model.module(torch.ones(4, 8))
        time.sleep(0.2)  # evaluate
if dist.get_rank() == 0:
    print(time.perf_counter() - began)
"""


def watch(folder: Path, saves: bool, evaluates: bool) -> tuple[Run, str, float]:
    """Run the job; return its run, what was printed on stderr, and the seconds of its steps."""
    script = JOB.replace("SAVES", str(saves)).replace("EVALUATES", str(evaluates))
    (folder / "train.py").write_text(script)
    done = run_ddpbench(folder, "watch", "-n", "2", "--output", "out", "train.py")
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "out").iterdir()
    return store.read(path), done.stderr, float(done.stdout)


def place(comment: str, call: str) -> str:
    lines = JOB.splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))
    return f"train.py:{number} {call}"


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_pause_is_found_with_its_period_and_line(tmp_path: Path, evaluates: bool) -> None:
    """Of one rank, for which the others wait in a barrier, and of all ranks."""
    run, shown, _ = watch(tmp_path, not evaluates, evaluates)
    findings = [finding for finding in run.findings if finding.code == "pauses"]
    found = findings[0].place
    assert found["phase"] == "other"
    if evaluates:
        assert (found.get("rank"), found["every"]) == (None, 50)
        assert found["line"] == place("evaluate", "time.sleep")
    else:
        assert (found["rank"], found["every"]) == (0, 20)
        assert found["line"] == place("save", "time.sleep")
        assert f"others wait at {place('meet', 'dist.barrier')};" in findings[0].sentence
    assert findings[0].sentence in shown


def test_all_the_time_is_accounted_for(tmp_path: Path) -> None:
    """The parts of the balance contain all steps, and the mean step is that of a stopwatch."""
    run, shown, seconds = watch(tmp_path, saves=True, evaluates=True)
    watched = run.steps[0].watched
    assert watched is not None
    balance = watched.balance
    assert balance is not None
    assert balance.steps == 399
    assert balance.stepping_seconds < seconds + 0.3  # the last pause is after the last step
    assert balance.mean_seconds > watched.step_seconds
    assert balance.longer_seconds > 0.9 * (19 * 0.1 + 7 * 0.2)
    assert "= mean step" in shown
    assert "= wall time" in shown
