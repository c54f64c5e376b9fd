"""Real jobs that pause now and then, under `ddpbench watch`."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_lines import run_ddpbench

from ddpbench.records import store

pytestmark = pytest.mark.usefixtures("warm_ranks")
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
    if step % 20 == 0:
        if dist.get_rank() == 0:
            time.sleep(0.1)  # save
        dist.barrier()  # meet
    if step % 50 == 0:
        with torch.no_grad():
            model.module(torch.ones(4, 8))
        time.sleep(0.2)  # evaluate
if dist.get_rank() == 0:
    print(time.perf_counter() - began)
"""


def place(comment: str, call: str) -> str:
    lines = JOB.splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))
    return f"train.py:{number} {call}"


@pytest.mark.measures_time
def test_pauses_are_found_with_their_period_and_line(tmp_path: Path) -> None:
    """One of one rank, for which the others wait in a barrier, and one of all ranks. The parts of
    the balance contain all steps, and the mean step is that of a stopwatch."""
    (tmp_path / "train.py").write_text(JOB)
    done = run_ddpbench(tmp_path, "watch", "-n", "2", "--output", "out", "train.py")
    assert done.returncode == 0, done.stderr
    run = store.read(next((tmp_path / "out").iterdir()))
    assert (run.state, run.exit_code) == ("complete", 0)
    found = {each.place.get("every"): each for each in run.findings if each.code == "pauses"}
    of_rank_0, of_all = found[20], found[50]
    assert {each.place["phase"] for each in (of_rank_0, of_all)} == {"other"}
    assert (of_rank_0.place["rank"], of_all.place.get("rank")) == (0, None)
    assert of_rank_0.place["line"] == place("save", "time.sleep")
    assert of_all.place["line"] == place("evaluate", "time.sleep")
    assert of_rank_0.sentence in done.stderr
    watched = run.steps[0].watched
    assert watched is not None
    balance = watched.balance
    assert balance is not None
    assert balance.steps == 399
    assert balance.stepping_seconds < float(done.stdout) + 0.3  # its last pause is after all steps
    assert balance.mean_seconds > watched.step_seconds
    assert balance.longer_seconds > 0.9 * (19 * 0.1 + 7 * 0.2)
    assert "= mean step" in done.stderr
    assert "= wall time" in done.stderr
