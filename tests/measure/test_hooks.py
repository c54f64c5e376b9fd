"""DDP's communication hooks, and the trial in processes to throw away of whether one works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_lines import clean_environment, needs_mpirun, write_warm_python
from frozen import Frozen
from left_processes import wait_for_left_processes
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
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "static_graph": True}])
def test_a_hook_trains_alone(alone: Any, hook: str, options: dict[str, Any]) -> None:
    """Each entry is taken by DDP and trains in a world of one, where nothing can be lost on the
    way; bf16 at least says why torch does not take it."""
    said: list[str] = []

    def train() -> list[torch.Tensor]:
        return hook_probe._train(
            a_request(hook, **options), alone, torch.device("cpu"), 0,
            lambda kind, text: said.append(f"{kind} {text}"),
        )  # fmt: skip

    if hook == "bf16" and torch.version.cuda is None and torch.version.hip is None:
        with pytest.raises(TypeError, match="BF16"):
            train()
        return
    assert all(bool(parameter.isfinite().all()) for parameter in train())
    assert said == [f"doing step {n} of 5" for n in range(1, 6)]


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


# --- real trials ----------------------------------------------------------------------------------

OPTIONS = {"bucket_cap_mb": None, "gradient_as_bucket_view": True}


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_hooks_on_gloo(
    hook: str, planted: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """fp16 works; bf16 does or torch says what it lacks; PowerSGD, with several buckets, hangs or
    dies. The sentence names hook, backend and reason, and nothing else is printed or left."""
    if hook == "powersgd":
        monkeypatch.setattr(hook_probe, "STEP_SECONDS", 3.0)
    said = hook_probe.find_refusal(hook, "gloo", "cpu", 60, OPTIONS)
    if hook == "fp16":
        assert said is None
    elif hook == "bf16":
        assert said is None or said.startswith("bf16 on gloo: TypeError: ")
    else:
        assert said is None or re.match(r"powersgd on gloo: .*(rank \d|SIGABRT|\w+Error: )", said)
    assert said is None or "\n" not in said
    assert capfd.readouterr() == ("", "")
    assert wait_for_left_processes(tmp_path) == []
    assert [path.name for path in tmp_path.glob("ddpbench-*")] == []


def test_powersgd_works_on_gloo_with_one_bucket(planted: tuple[str, ...]) -> None:
    """It is the buckets in flight together that it cannot have there."""
    assert hook_probe.find_refusal("powersgd", "gloo", "cpu", 60, {}, buckets=1) is None


@pytest.mark.parametrize("hook", ["hang", "abort", "differ"])
def test_a_faulty_hook_of_a_module(
    hook: str, planted: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    frozen: Frozen,
) -> None:  # fmt: skip
    """A hook that a user's module brings is tried too. One that never ends and hears no signal is
    cut, one that aborts is told so, one that reduces nothing is found out; nothing is left."""
    if hook == "hang":
        monkeypatch.setattr(hook_probe, "STEP_SECONDS", 2.0)
    said = hook_probe.find_refusal(hook, "gloo", "cpu", 60, {}, modules=planted)
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
done = Path(sys.argv[1])
if mpi_library.world() == (0, 2):
    done.write_text(str(hook_probe.find_refusal("powersgd", "mpi", "cpu", 60, {})))
while not done.exists():
    time.sleep(0.05)
"""


@needs_mpirun
def test_a_rank_of_mpirun_may_ask(tmp_path: Path) -> None:
    """In a rank under mpirun, with MPI running, a trial on mpi starts an mpirun of its own; the job
    ends well. PowerSGD works there, with several buckets too."""
    found = placement.find_mpirun()
    assert found is not None
    root = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    outcome = tmp_path / "outcome"
    version = subprocess.run(
        [found, "--version"], capture_output=True, text=True, check=True
    ).stdout
    done = subprocess.run(
        [found, *(root if "Open MPI" in version else []), "-n", "2", *warm_python(), "-c", INSIDE,
         str(outcome)],
        env=clean_environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    assert outcome.read_text() == "None"
