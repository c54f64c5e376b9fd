"""Findings, and no others, on real ranks of which a watch does not see everything."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from by_hand import run_by_hand
from warm_python import warm_python

from ddpbench.records import store
from ddpbench.records.schema import Finding, Run
from ddpbench.records.watched import COLUMNS

pytestmark = pytest.mark.thorough
# The number of ranks. A job trains until a straggler is reported.
KINDS = {"checkpoint": 2, "pipeline": 3, "buffers": 3, "sync batch norm": 3, "collectives": 2}
SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ddpbench

kind = sys.argv[1]
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, last = dist.get_rank(), dist.get_world_size() - 1
late = rank == 1
reports, until = [], time.monotonic() + 100

class Late(torch.nn.Linear):
    def forward(self, batch):
        time.sleep(0.06 if late and kind != "checkpoint" else 0.01)
        return super().forward(batch)

class Sum(torch.autograd.Function):  # as of SyncBatchNorm, which needs GPUs
    @staticmethod
    def forward(context, value):
        dist.all_reduce(value := value.clone())
        return value

    backward = forward

class Synced(torch.nn.Linear):
    def forward(self, batch):
        return super().forward(batch - Sum.apply(batch).mean(0))

def is_over():
    findings = reports[-1]["findings"] if reports else []
    found = any(finding["code"] == "straggler" for finding in findings)
    over = torch.tensor(float(found or time.monotonic() > until))
    dist.broadcast(over, 0)
    return over.item()

def train():
    model = Late(8, 8)
    if kind == "buffers":
        model = torch.nn.Sequential(model, torch.nn.BatchNorm1d(8))
    if kind == "sync batch norm":
        model = torch.nn.Sequential(model, Synced(8, 8))
    if kind in ("buffers", "sync batch norm", "checkpoint"):
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    step = 0
    while step % 30 or not is_over():
        step += 1
        batch = torch.ones(4, 8, requires_grad=True)
        if kind == "pipeline":
            if rank:
                dist.recv(batch.data, rank - 1)
            output, gradient = model(batch), torch.ones(4, 8)
            if rank < last:
                dist.send(output.detach(), rank + 1)
                dist.irecv(gradient, rank + 1).wait()
            output.backward(gradient)
            if rank:
                dist.send(batch.grad, rank - 1)
        else:
            model(batch).sum().backward()
        for _ in range(60 if kind == "collectives" else 0):
            dist.all_reduce(torch.ones(8))
        optimizer.step()
        optimizer.zero_grad()
        if kind == "checkpoint":
            time.sleep(0.08 if late else 0.02)

with ddpbench.watch(on_report=reports.append):
    train()
dist.destroy_process_group()
"""


def find_late(findings: Sequence[Finding]) -> list[tuple[Any, Any]]:
    """Return rank and phase of each straggler."""
    return [(f.place["rank"], f.place["phase"]) for f in findings if f.code == "straggler"]


def watch(folder: Path, kind: str) -> Run:
    """Run the script until a straggler is reported; return the stored run."""
    (folder / "train.py").write_text(SCRIPT)
    done = run_by_hand(folder, KINDS[kind], [*warm_python(), "train.py", kind])
    assert {rank.returncode for rank in done} == {0}, done[0].stderr
    (path,) = store.list_runs(folder / "results")
    return store.read(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The stored run of each kind. All run at once, as their ranks mostly sleep."""
    warm_python()  # before the threads, which all call it
    places = [tmp_path_factory.mktemp(kind.replace(" ", "-")) for kind in KINDS]
    with ThreadPoolExecutor(len(KINDS)) as threads:
        return dict(zip(KINDS, threads.map(watch, places, KINDS), strict=True))


def test_what_a_script_does_between_steps_is_no_input(runs: dict[str, Run]) -> None:
    """In a job without a DataLoader, a checkpoint after each step is `other`, and no advice is
    about data loaders. The ranks of this job have no launcher."""
    run = runs["checkpoint"]
    (straggler,) = [f for f in run.findings if f.code == "straggler"]
    assert (straggler.place["rank"], straggler.place["phase"]) == (1, "other")
    assert "waits-for-input" not in {f.code for f in run.findings}
    watched = run.steps[0].watched
    assert watched is not None
    assert dict(zip(COLUMNS, watched.median_seconds, strict=True))["input"] == 0
    assert run.launches[0].launcher == "no launcher"


def test_the_slow_stage_of_a_pipeline_is_found(runs: dict[str, Run]) -> None:
    """Waits for messages are blocked, those of irecv too, so that the stage is late for which the
    others wait. Advice on transfers is not given, because such a wait is none."""
    findings = runs["pipeline"].findings
    assert find_late(findings) == [(1, "forward")]
    assert "exposed-communication" not in {f.code for f in findings}


@pytest.mark.parametrize("kind", ["buffers", "sync batch norm"])
def test_who_is_late_is_found_wherever_ranks_meet(runs: dict[str, Run], kind: str) -> None:
    """Ranks wait for the late one in DDP's broadcast of buffers or in SyncBatchNorm. Only the rank
    that makes them wait is late, in its phase."""
    assert find_late(runs[kind].findings) == [(1, "forward")]


def test_steps_with_many_collectives_count_all(runs: dict[str, Run]) -> None:
    """Of steps with 60 collectives each, the calls of a few fit into a report, and all steps."""
    run = runs["collectives"]
    assert find_late(run.findings) == [(1, "forward")]
    watched = run.steps[0].watched
    assert watched is not None
    assert watched.steps > 0.8 * watched.last_step
