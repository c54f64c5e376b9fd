"""DDP's communication hooks, and the trial in processes to throw away of whether one works."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_lines import mpirun, needs_mpirun, run_command, write_warm_python
from frozen import Frozen
from left_processes import wait_for_left_processes
from patience import PATIENCE_SECONDS
from slept_time import SleptTime
from warm_python import warm_python

from ddpbench.catalog import hooks
from ddpbench.catalog.hooks import HOOKS
from ddpbench.launch import placement
from ddpbench.launch.placement import Refused
from ddpbench.measure import hook_probe, throwaway_ranks

# Planted with modules=("planted",): what each does in rank 1 when its third step reduces.
PLANTED = """
import ctypes, os
import torch.distributed as dist
from ddpbench.catalog import hooks
from ddpbench.catalog.hooks import HOOKS, Hook

def planted(fault):
    steps = 0
    def hook(state, bucket):
        nonlocal steps
        steps += bucket.is_last()
        if dist.get_rank() == 1 and steps == 3:
            fault()
        return hooks.noop(state, bucket)
    return hook

def hang():  # with the interpreter in its hand, so that no Python thread answers a signal
    ctypes.PyDLL(None).sleep(600)

for name, fault in {"hang": hang, "abort": os.abort, "differ": lambda: None}.items():
    HOOKS[name] = Hook(name, "", lambda group, fault=fault: (None, planted(fault)))
"""


@pytest.fixture(autouse=True)
def warm_trials(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a trial need not import torch."""
    monkeypatch.setattr(sys, "executable", write_warm_python(tmp_path_factory.mktemp("python")))


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The module of faulty hooks, importable; the probe's folder lies in tmp_path."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return ("planted",)


# --- the table ------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A gloo group of this process alone."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def a_request(hook: str, **options: Any) -> hook_probe.Request:
    return hook_probe.Request("gloo", "cpu", 10, (), "torchrun", 1, hook, options, 3)


# PowerSGD's callbacks wait for each other in gloo's threads, or end their group there: it can hang
# or abort this process, and is tried in others below.
@pytest.mark.parametrize("hook", [name for name in HOOKS if name != "powersgd"])
def test_a_hook_trains_alone(alone: Any, hook: str) -> None:
    """Each entry is taken by DDP and trains in a world of one, where nothing can be lost on the
    way; bf16 at least says why torch does not take it."""
    said: list[str] = []

    def train() -> list[torch.Tensor]:
        return hook_probe._train(
            a_request(hook, gradient_as_bucket_view=True, static_graph=True), alone,
            torch.device("cpu"), 0, lambda kind, text: said.append(f"{kind} {text}"),
        )  # fmt: skip

    if hook == "bf16" and torch.version.cuda is None and torch.version.hip is None:
        with pytest.raises(TypeError, match="BF16"):
            train()
        return
    assert all(bool(parameter.isfinite().all()) for parameter in train())
    assert said == [f"doing step {n} of 5" for n in range(1, 6)]


def test_the_hook_is_tried_with_several_buckets(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PowerSGD, which works on gloo with one bucket, cannot have them in flight together there."""
    seen: list[int] = []

    def note(state, bucket):  # type: ignore[no-untyped-def]
        seen.append(bucket.index())
        return hooks.noop(state, bucket)

    monkeypatch.setitem(HOOKS, "note", hooks.Hook("note", "", lambda group: (None, note)))
    hook_probe._train(a_request("note"), alone, torch.device("cpu"), 0, lambda kind, text: None)
    assert seen[-3:] == [0, 1, 2]


def test_no_reduction_leaves_the_bucket(alone: Any) -> None:
    """DDP takes noop as a hook; every gradient is the rank's own, bit for bit."""
    torch.manual_seed(0)
    model, batch = torch.nn.Linear(8, 4), torch.randn(2, 8)
    model(batch).sum().backward()
    own = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=alone)
    ddp.register_comm_hook(None, hooks.noop)
    ddp(batch).sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(own) == 2
    assert all(map(torch.equal, grads, own))


def test_powersgd_acts_after_two_steps(alone: Any) -> None:
    """It is of rank 1 and starts in the third step, with error feedback and warm start; each
    replica gets a state of its own."""
    make = HOOKS["powersgd"].make
    assert make is not None
    state: Any = make(alone)[0]
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter) == (1, 2)
    assert state.use_error_feedback
    assert state.warm_start
    assert make(alone)[0] is not state


def test_a_gradient_that_is_not_finite_is_told(
    alone: Any, monkeypatch: pytest.MonkeyPatch, frozen: Frozen
) -> None:
    """A hook that makes one NaN is refused with the step."""

    def spoil(state, bucket):  # type: ignore[no-untyped-def]
        bucket.buffer()[-1] = float("nan")
        return hooks.noop(state, bucket)

    monkeypatch.setitem(HOOKS, "spoil", hooks.Hook("spoil", "", lambda group: (None, spoil)))
    with pytest.raises(Refused) as caught:
        hook_probe._train(
            a_request("spoil"), alone, torch.device("cpu"), 0, lambda kind, text: None
        )
    frozen.text(str(caught.value))


# --- what is made of a trial ----------------------------------------------------------------------

ABORTED = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 96 vs 88.
Fatal Python error: Aborted

Current thread 0x00007f (most recent call first):
"""
CRASHED = "Fatal Python error: Segmentation fault\n"


@pytest.mark.parametrize(
    ("ranks", "output", "code", "late", "told"),
    [
        (("works", "works"), "", 0, None, None),
        (("works",), "", 0, None, "exit code 0"),
        (("works", "doing step 2 of 5"), "", 5, None, "exit code 5, rank 1"),
        (("works",) * 2, "---\na\n\nb\n", 5, None, "exit code 5: a: b"),
        (("doing step 3 of 5", "failed TypeError: no"), "x", 5, None, "TypeError: no"),
        (("failed first", "failed second"), "", 1, "it hung", "first"),
        (("doing step 3 of 5",) * 2, "x", -9, "it hung", "it hung"),
        (("", "doing"), "", -9, "it hung", "it hung"),
        (("doing step 3 of 5", "failed Connection closed"), ABORTED, 5, None, "SIGABRT"),
        ((), CRASHED, 5, None, "SIGSEGV"),
    ],
    ids=[
        "all work", "one rank", "in a step", "output", "error", "first", "late", "silent",
        "aborted", "crashed",
    ],
)  # fmt: skip
def test_the_first_cause_is_told(
    tmp_path: Path, ranks: tuple[str, ...], output: str, code: int, late: str | None,
    told: str | None, frozen: Frozen,
) -> None:  # fmt: skip
    """A death comes before the errors that it causes in others, the earliest error before later
    ones, any of them before a deadline; an end without a word gives the code and the last lines."""
    (tmp_path / "output").write_text(output)
    for rank, text in enumerate(ranks):
        path = tmp_path / f"rank-{rank}"
        path.write_text(f"doing its start\n{text}\n" if text else "")
        os.utime(path, (rank, rank))
    reason = hook_probe._reason(tmp_path, 2, code, late)
    assert (reason is None) == (told is None)
    assert (told or "") in (reason or "")
    if reason:
        frozen.text(reason)


def test_an_error_that_came_through_futures_is_told_without_them() -> None:
    """What torch puts before an error in a callback, once for every callback, is left out."""
    before = "Got the following error when running the callback: "
    error = RuntimeError(f"{before}RuntimeError: {before}ValueError: bad\nAt:\n  a.py(1): f")
    assert throwaway_ranks.sentence(error) == "ValueError: bad"
    assert throwaway_ranks.sentence(RuntimeError("bad\nmore")) == "RuntimeError: bad"
    assert throwaway_ranks.sentence(Refused("it is bad")) == "it is bad"


def test_the_trial_is_nobody_s_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun, three MPIs and Slurm tell their ranks does not reach the trial; a user's
    settings do, those of Open MPI too."""
    told = [
        *("DDPBENCH_RANK", "DDPBENCH_WORLD_SIZE", "DDPBENCH_LOCAL_RANK"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME"),
        *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_UNIVERSE_SIZE", "PMIX_RANK"),
        *("PMIX_SERVER_URI41", "PRTE_LAUNCHED", "PMI_RANK", "PMI_SIZE", "PMI_FD"),
        *("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "HYDI_CONTROL_FD", "HYDRA_BOOTSTRAP"),
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_JOB_ID"),
    ]
    kept = ["OMPI_MCA_btl", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "RANKS"]
    for name in told + kept:
        monkeypatch.setenv(name, "1")
    environ = throwaway_ranks.environment()
    assert not environ.keys() & set(told)
    assert environ.keys() >= set(kept)
    assert placement.read_placement(environ) is None


# --- how long a trial may take --------------------------------------------------------------------


def step(number: int) -> str:
    return f"step {number} of {hook_probe.STEPS}"


class Script:
    """A trial whose ranks do what was written before, until some second."""

    def __init__(self, folder: Path, *states: str, ends: float = float("inf")) -> None:
        self.folder, self.ends, self.clock = folder, ends, SleptTime()
        self.began, self.process = self.clock.now, self
        for rank, text in enumerate(states):
            path = folder / f"rank-{rank}"
            path.write_text(f"doing {text}\n")
            os.utime(path, (self.began,) * 2)
        self.states = partial(throwaway_ranks.states, folder)

    def poll(self) -> int | None:
        return 0 if self.clock.now - self.began >= self.ends else None

    def wait(self, seconds: float) -> tuple[str | None, float]:
        """Return why the trial takes too long, and after how many seconds that is known."""
        late = hook_probe._await(self, seconds, self.clock)  # type: ignore[arg-type]
        return late, self.clock.now - self.began


def test_a_step_that_takes_too_long_is_told(tmp_path: Path) -> None:
    """Any step but the first, which loads libraries; the rank that is in it, not one that waits."""
    assert Script(tmp_path, step(2), step(2), ends=9.9).wait(60)[0] is None
    assert Script(tmp_path, step(1), step(1), ends=59).wait(60)[0] is None
    late, seconds = Script(tmp_path, "the comparison of the replicas", step(3)).wait(60)
    assert late == "it hung: rank 1 was in step 3 of 5 for over 10 s"
    assert seconds == pytest.approx(hook_probe.STEP_SECONDS, abs=0.1)


def test_a_trial_that_does_not_end_is_told(tmp_path: Path) -> None:
    """With what its first rank was doing, if one has started."""
    late, seconds = Script(tmp_path).wait(60)
    assert late == "its trial did not end within 60 s"
    assert seconds == pytest.approx(60, abs=0.1)
    late, _ = Script(tmp_path, step(1)).wait(60)
    assert late == "it did not end within 60 s: rank 0 was in step 1 of 5"


# --- real trials ----------------------------------------------------------------------------------


def test_a_hook_that_works_leaves_nothing(
    planted: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """fp16 works on gloo; nothing is printed, no process and no file stays."""
    options = {"bucket_cap_mb": None, "gradient_as_bucket_view": True}
    assert hook_probe.find_refusal("fp16", "gloo", "cpu", PATIENCE_SECONDS, options) is None
    assert capfd.readouterr() == ("", "")
    assert wait_for_left_processes(tmp_path) == []
    assert [path.name for path in tmp_path.glob("ddpbench-*")] == []


@pytest.mark.nightly
@pytest.mark.thorough
def test_powersgd_works_on_gloo_with_one_bucket(planted: tuple[str, ...]) -> None:
    """It is the buckets in flight together that it cannot have there."""
    words = ("powersgd", "gloo", "cpu", PATIENCE_SECONDS)
    assert hook_probe.find_refusal(*words, {}, buckets=1) is None


class UntilStep3:
    """A clock on which no time passes until rank 1 alone is in step 3; then the steps are late."""

    monotonic, sleep = time.monotonic, time.sleep

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def time(self) -> float:
        found = [state.text for path in self.folder.glob("ddpbench-*")
                 for state in throwaway_ranks.states(path)]  # fmt: skip
        return time.time() + 1e6 if found == ["the comparison of the replicas", step(3)] else 0.0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "hook", ["hang", pytest.param("abort", marks=pytest.mark.nightly), "differ"]
)
def test_a_faulty_hook_of_a_module(
    hook: str, planted: tuple[str, ...], tmp_path: Path, frozen: Frozen
) -> None:
    """A hook that a user's module brings is tried too. One that never ends and hears no signal is
    cut, one that aborts is told so, one that reduces nothing is found out; nothing is left."""
    words, clock = (hook, "gloo", "cpu", PATIENCE_SECONDS), UntilStep3(tmp_path)
    said = hook_probe.find_refusal(*words, {}, modules=planted, clock=clock)
    assert said is not None
    assert said.startswith(f"{hook} on gloo: ")
    frozen.verdict(said)
    assert wait_for_left_processes(tmp_path) == []


def test_the_deadline_holds_from_the_start(planted: tuple[str, ...], tmp_path: Path) -> None:
    """Too short a time is told as such, and ends what is just starting."""
    said = hook_probe.find_refusal("fp16", "gloo", "cpu", 0.05, {})
    assert said is not None
    assert re.match(r"fp16 on gloo: .* 0\.05 s", said)
    assert wait_for_left_processes(tmp_path) == []


INSIDE = """
import sys, time
from pathlib import Path
from ddpbench.measure import hook_probe
from ddpbench.mpi_backend import library as mpi_library
done, sys.executable = Path(sys.argv[1]), sys.argv[2]
if mpi_library.world() == (0, 2):
    done.write_text(str(hook_probe.find_refusal("powersgd", "mpi", "cpu", 120, {})))
while not done.exists():
    time.sleep(0.05)
"""


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.thorough
def test_a_rank_of_mpirun_may_ask(tmp_path: Path) -> None:
    """In a rank under mpirun, with MPI running, a trial on mpi starts an mpirun of its own; the job
    ends well. PowerSGD works there, with several buckets too."""
    outcome = tmp_path / "outcome"
    words = [*mpirun(2), *warm_python(), "-c", INSIDE, str(outcome), sys.executable]
    variables = {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl": "^ofi"}
    done = run_command(words, tmp_path, 2 * PATIENCE_SECONDS, **variables)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    assert outcome.read_text() == "None"
