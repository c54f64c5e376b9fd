"""Test whether a communication hook of DDP works on a backend, by using it for a few steps.

The steps run in throwaway processes: a hook that does not work may abort its process or hang.

A hook that waits inside a callback, as PowerSGD's does, blocks one of the backend's threads per
bucket in flight. gloo has two such threads and processes calls from several buckets in a different
order in each rank: with one bucket PowerSGD works there, with more it hangs or aborts. Therefore
the probe's model has several buckets.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddpbench.catalog import backends
from ddpbench.catalog.hooks import HOOKS
from ddpbench.launch.clock import Clock
from ddpbench.launch.placement import Refused
from ddpbench.measure import throwaway_ranks
from ddpbench.measure.throwaway_ranks import Report, Trial
from ddpbench.runtime import control, devices
from ddpbench.runtime.world import World

MODULE = "ddpbench.measure.hook_probe"
STEPS = 5
STEP_SECONDS = 10.0  # deadline of every step but the first; a step takes a few ms


@dataclass(frozen=True)
class Request(throwaway_ranks.Request):
    """The hook that the ranks try, and DDP's options."""

    hook: str
    options: Mapping[str, Any]
    buckets: int


def find_refusal(
    hook: str,
    backend: str,
    device: str,
    timeout_seconds: float,
    options: Mapping[str, object],
    *,
    modules: Sequence[str] = (),
    buckets: int = 4,
    clock: Clock = time,
) -> str | None:
    """Return None if the hook works on this backend and device, else why not, in one sentence.

    Two ranks of this host (nccl: one per GPU) train a small model for a few steps. Its gradients
    must be finite and its replicas equal. This takes a few seconds, and little more than
    `timeout_seconds`. Rank 0 of a running job may call it while the other ranks wait.

    options: arguments of DistributedDataParallel that JSON can represent; bucket_cap_mb is ignored.
    modules: imported by the ranks first. buckets: number of buckets of the model, at most 8.
    clock: for the deadline of the trial.
    """
    request = Request(
        backend=backend,
        device=device,
        seconds=timeout_seconds,
        modules=list(modules),
        launcher=backends.get(backend).launcher,
        ranks=throwaway_ranks.RANKS,
        hook=hook,
        options=dict(options),
        buckets=min(buckets, 8),
    )
    with throwaway_ranks.started(MODULE, request) as trial:
        late = _await(trial, timeout_seconds, clock)
        reason = _reason(trial.folder, request.ranks, trial.end(), late)
    return None if reason is None else f"{hook} on {backend}: {reason}"


def _await(trial: Trial, seconds: float, clock: Clock) -> str | None:
    """Wait until the process ends. Return a reason if one step, or all together, take too long."""
    deadline = clock.monotonic() + seconds
    while trial.process.poll() is None:
        busy = [state for state in trial.states() if state.kind == "doing"]
        if clock.monotonic() > deadline:
            if not busy:
                return f"its trial did not end within {seconds:g} s"
            return f"it did not end within {seconds:g} s: rank {busy[0].rank} was in {busy[0].text}"
        for rank, _, text, since in busy:
            # The first step loads libraries and takes longer.
            if text in map(_step, range(2, STEPS + 1)) and clock.time() - since > STEP_SECONDS:
                return f"it hung: rank {rank} was in {text} for over {STEP_SECONDS:g} s"
        clock.sleep(0.02)
    return None


def _reason(folder: Path, ranks: int, code: int, late: str | None) -> str | None:
    """Return None if the hook worked in every rank, else the first cause of its failure."""
    states = throwaway_ranks.states(folder)
    if code == 0 and [state.kind for state in states] == ["works"] * ranks:
        return None
    lines = throwaway_ranks.output(folder)
    if (died := throwaway_ranks.death(lines)) is not None:
        return f"the process {died}"
    failed = [state for state in states if state.kind == "failed"]
    if failed:
        return min(failed, key=lambda state: state.since).text
    if late is not None:
        return late
    busy = [f", rank {state.rank} in {state.text}" for state in states if state.kind == "doing"]
    ended = f"its trial ended with exit code {code}{''.join(busy)}"
    return throwaway_ranks.short(": ".join([ended, *throwaway_ranks.last_words(lines)]))


def _step(number: int) -> str:
    return f"step {number} of {STEPS}"


# --- in the throwaway processes -------------------------------------------------------------------


def main(folder: Path) -> int:
    """Start the ranks, or try the hook if this process is one of them."""
    request = Request(**json.loads((folder / "request").read_text()))
    return throwaway_ranks.run(MODULE, folder, request, partial(_try, request))


def _try(request: Request, world: World, report: Report) -> None:
    """Train a small model with the hook. Raises Refused for a wrong outcome."""
    report("doing", "the set-up of the group")
    with throwaway_ranks.tested(request, world) as (tested, device):
        parameters = _train(request, tested, device, world.rank, report)
        report("doing", "the comparison of the replicas")
        data = b"".join(p.detach().cpu().numpy().tobytes() for p in parameters)
        if len(set(control.gather_values(world, hashlib.sha256(data).hexdigest()))) > 1:
            raise Refused(f"the replicas' parameters differ after {STEPS} steps")
    report("works")


def _train(request: Request, tested: Any, device: Any, rank: int, report: Report) -> list[Any]:
    """Train a model with one layer per bucket. Return its parameters after all steps."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    # The layers differ in shape: mismatched calls then fail instead of adding unrelated numbers.
    widths = [64 + 8 * i for i in range(request.buckets + 1)]
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers).to(device),
        device_ids=devices.of(device).ddp_device_ids(device),
        process_group=tested,
        **{**request.options, "bucket_cap_mb": 0.001 if request.buckets > 1 else 25},
    )
    make = HOOKS[request.hook].make
    if make is not None:
        model.register_comm_hook(*make(tested))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    for number in range(1, STEPS + 1):
        report("doing", _step(number))
        optimizer.zero_grad()
        model(torch.randn(8, widths[0], device=device)).square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            raise Refused(f"a gradient is not finite after {_step(number)}")
        optimizer.step()
    return list(model.parameters())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
