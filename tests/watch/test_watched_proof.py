"""`ddpbench watch --verify` on real ranks: faults in jobs of an unusual form."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_lines import run_ddpbench, write_warm_python

from ddpbench.records import store
from ddpbench.records.schema import Finding

pytestmark = pytest.mark.thorough
SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from ddpbench.watch import proof

proof.FREE_SECONDS = 60.0  # a busy host delays ranks
kind, steps = sys.argv[1], 24
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
rank, world_size = dist.get_rank(), dist.get_world_size()
members = [world_size - 2, world_size - 1]
group = dist.new_group(members)
if rank in members:
    model = DistributedDataParallel(torch.nn.Linear(8, 8), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        time.sleep(0.1)  # a job that is over at once may end before its ranks have met
        model(torch.ones(4, 8)).square().mean().backward()
        if kind == "by hand":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(parameter.grad, alpha=-0.01)
        elif (kind, rank, step) != ("skipped", members[1], 5):
            optimizer.step()
        model.zero_grad()
        if kind == "by hand" and (rank, step) == (members[1], 9):
            model.module.weight.data[2, 3] = 9.0
dist.barrier()
dist.destroy_process_group()
"""


Watched = tuple[int, list[Finding]]
JOBS = {  # the words of the script, --verify, ranks
    "skipped": ("skipped", 4, 2),
    "by hand": ("by hand", 4, 4),
    "never compared": ("healthy", 100, 2),
    "healthy": ("healthy", 4, 2),
}


def watch(folder: Path, job: str) -> Watched:
    """Return exit code and findings of a watched job."""
    kind, every, ranks = JOBS[job]
    (folder / "train.py").write_text(SCRIPT)
    words = ("-n", str(ranks), "--verify", str(every), "train.py", kind)
    done = run_ddpbench(folder, "watch", *words)
    (run,) = store.list_runs(folder / "results")
    record = store.read(run)
    assert record.launches[0].launcher == "ddpbench"
    return done.returncode, list(record.findings)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Watched]:
    """What was found in each job. All run at once, as they mostly sleep."""
    folders = [tmp_path_factory.mktemp(job.replace(" ", "-")) for job in JOBS]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(JOBS)) as threads:
        patch.setenv("PYTHON_EXEC", write_warm_python(tmp_path_factory.mktemp("python")))
        return dict(zip(JOBS, threads.map(watch, folders, JOBS), strict=True))


def find(findings: list[Finding], severity: str, code: str = "") -> list[Finding]:
    return [f for f in findings if f.severity == severity and (not code or f.code == code)]


@pytest.mark.parametrize(("job", "equal_until", "wrong"), [("skipped", 3, 7), ("by hand", 7, 11)])
def test_a_difference_is_found_at_a_point_that_the_ranks_share(
    watched: dict[str, Watched], job: str, equal_until: int, wrong: int
) -> None:
    """A rank skips an optimizer step; a weight changes in a job that updates by hand, whose model
    only the last two of four ranks train. Each is an error of the step in which it was compared
    next, the job does not wait, and the end counts the comparisons."""
    code, findings = watched[job]
    assert code == 4
    errors = find(findings, "error")
    assert {f.place["step"] for f in errors} == {wrong}
    assert "weight" in {f.place["tensor"] for f in errors}
    (summary,) = find(findings, "note", "replicas-compared")
    assert summary.place["step"] == equal_until
    assert summary.place["compared"] == summary.place["equal"] + 1
    assert not find(findings, "warning", "replicas-not-compared")


def test_replicas_that_were_never_compared_are_an_error(watched: dict[str, Watched]) -> None:
    """So it is with --verify 100 in a job of 24 steps; with --verify 4, each one is counted."""
    code, findings = watched["never compared"]
    assert (code, [f.code for f in find(findings, "error")]) == (1, ["replicas-not-compared"])
    code, findings = watched["healthy"]
    assert (code, find(findings, "error")) == (0, [])
    (summary,) = find(findings, "note", "replicas-compared")
    assert summary.place == {"compared": 6, "equal": 6, "step": 23}
