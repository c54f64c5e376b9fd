"""What a watch says, and does not say, of real ranks of which it does not see everything."""

import subprocess
from pathlib import Path

from command_lines import clean_environment
from warm_python import warm_python

from ddpbench.launch.placement import free_port
from ddpbench.records import store
from ddpbench.records.schema import Run

SCRIPT = """
import contextlib, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ddpbench

kind, wanted = sys.argv[1:]
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, last = dist.get_rank(), dist.get_world_size() - 1
late = rank == (last if kind == "missing" else 1)
ranks = {"messages": [0, 1, 2], "missing": [2]}.get(kind)
reports, until = [], time.monotonic() + 100

class Late(torch.nn.Linear):
    def forward(self, batch):
        time.sleep(0.06 if late and kind != "checkpoint" else 0.01)
        return super().forward(batch)

def receive(tensor, sender):
    dist.recv(tensor, sender) if kind == "pipeline" else dist.irecv(tensor, sender).wait()

def is_over():
    findings = reports[-1]["findings"] if reports else []
    found = any(f["code"] == wanted and f["place"].get("ranks") == ranks for f in findings)
    over = torch.tensor(float(found or time.monotonic() > until))
    dist.broadcast(over, 0)
    return over.item()

def train():
    model = Late(8, 8)
    if kind in ("checkpoint", "missing"):
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    step = 0
    while step % 30 or not is_over():
        step += 1
        batch = torch.ones(4, 8, requires_grad=True)
        if kind in ("pipeline", "messages"):
            if rank:
                receive(batch.data, rank - 1)
            output, gradient = model(batch), torch.ones(4, 8)
            if rank < last:
                dist.send(output.detach(), rank + 1)
                receive(gradient, rank + 1)
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

watched = kind != "missing" or rank < last
with ddpbench.watch(on_report=reports.append) if watched else contextlib.nullcontext():
    train()
dist.destroy_process_group()
"""


def watch(folder: Path, kind: str, ranks: int, wanted: str) -> Run:
    """Run the script until a finding of this code is reported; return the stored run."""
    (folder / "train.py").write_text(SCRIPT)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [*warm_python(), "train.py", kind, wanted],
            cwd=folder,
            env=clean_environment(RANK=str(rank), WORLD_SIZE=str(ranks), **variables),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    texts = [process.communicate(timeout=150)[1] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, texts
    (path,) = store.list_runs(folder / "results")
    return store.read(path)


def test_what_a_script_does_between_steps_is_no_input(tmp_path: Path) -> None:
    """In a job without a DataLoader, a checkpoint after each step is `other`, and no advice is
    about data loaders. The ranks of this job have no launcher."""
    run = watch(tmp_path, "checkpoint", 2, "straggler")
    (straggler,) = [f for f in run.findings if f.code == "straggler"]
    assert (straggler.place["rank"], straggler.place["phase"]) == (1, "other")
    assert "waits-for-input" not in {f.code for f in run.findings}
    watched = run.steps[0].watched
    assert watched is not None
    assert {phase.name: phase.slowest_seconds for phase in watched.phases}["input"] == 0
    assert run.launches[0].launcher == "no launcher"


def test_the_slow_stage_of_a_pipeline_is_found(tmp_path: Path) -> None:
    """Waits in send and recv are blocked, so that the stage is late for which the others wait.
    Advice on transfers is not given, because such a wait is none."""
    findings = watch(tmp_path, "pipeline", 3, "straggler").findings
    late = [(f.place["rank"], f.place["phase"]) for f in findings if f.code == "straggler"]
    assert late == [(1, "forward")]
    assert not {f.code for f in findings} & {"unseen-messages", "exposed-communication"}


def test_ranks_whose_waits_are_unseen_are_not_judged(tmp_path: Path) -> None:
    """Waits for irecv count as own time: no rank is called late, and one note names the reason."""
    findings = watch(tmp_path, "messages", 3, "unseen-messages").findings
    (note,) = [f for f in findings if f.code == "unseen-messages"]
    assert note.place["ranks"] == [0, 1, 2]
    assert not [f for f in findings if "straggler" in f.code or f.code == "exposed-communication"]


def test_nothing_is_said_of_all_ranks_if_some_are_missing(tmp_path: Path) -> None:
    """If the late rank does not report, the others wait long: no advice on communication follows
    from that, and a note counts the ranks on which the findings rest."""
    run = watch(tmp_path, "missing", 3, "missing-ranks")
    (note,) = [f for f in run.findings if f.code == "missing-ranks"]
    assert note.place["ranks"] == [2]
    assert "2 of 3 ranks" in note.sentence
    assert "exposed-communication" not in {f.code for f in run.findings}
    (table,) = tmp_path.glob("results/*/table.txt")
    assert "at most ×" not in table.read_text()


def test_a_job_whose_steps_are_sampled_is_told_so(tmp_path: Path) -> None:
    """Of steps with 60 collectives each, a few fit into a report; a note has the figures."""
    run = watch(tmp_path, "collectives", 2, "sampled-steps")
    (note,) = [f for f in run.findings if f.code == "sampled-steps"]
    watched = run.steps[0].watched
    assert watched is not None
    assert note.place == {"steps": watched.steps, "of_steps": watched.last_step + 1 - 5}
    assert 0 < 2 * watched.steps < note.place["of_steps"]
