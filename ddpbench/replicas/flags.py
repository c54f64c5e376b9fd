"""Facts about this rank's replica as integers, to compare over all ranks in one all_reduce."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpbench.replicas.digest import of_bytes
from ddpbench.replicas.state import IGNORED, State, is_option, shards_state, unwrap, wrapper
from ddpbench.replicas.usage import Usage
from ddpbench.runtime import devices


def read_flags(
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: State,
    usage: Usage,
) -> dict[str, int]:
    """Return non-negative integers by name: digests of facts, and flags that are 0 or 1."""
    ddp = wrapper(module)
    return {
        "rng": _rng_digest(module),
        "usage": _digest(usage),
        "skipped": _digest(skipped_rows(state)),
        "unsynced": _is_unsynced(ddp),
        "unmanaged": _count_unmanaged(ddp, state),
        "finds_unused": _finds_unused(ddp),
        "rebroadcast": _rebroadcasts_buffers(module),
        "stateless": _is_stateless(optimizers),
        "stepped": int(any(not is_option(entry.name) for entry in state.entries["optimizer"])),
        "trains": int(any(held.parameter.grad is not None for held in state.parameters)),
    }


def skipped_rows(state: State) -> list[list[str]]:
    """Return kind, name and reason of each tensor that is not compared, as JSON keeps them."""
    return [list(astuple(skipped)) for skipped in state.not_compared]


def _digest(value: Any) -> int:
    return of_bytes(json.dumps(value).encode()) >> 1


def _rng_digest(module: torch.nn.Module) -> int:
    """Digest the states of torch's random number generators that this replica can draw from."""
    used = (p.device for p in unwrap(module).parameters() if not p.is_meta)
    device = next(used, torch.device("cpu"))
    states = devices.of(device).random_states(device)
    return of_bytes(b"".join(state.numpy().tobytes() for state in states)) >> 1


def _is_unsynced(ddp: Any) -> int:
    """Return 1 if DDP does not reduce after its last forward, else or if unknown 0."""
    # The attribute is not documented. Without it, one cause is reported less precisely.
    return int(not getattr(ddp, "require_forward_param_sync", True))


def _count_unmanaged(ddp: Any, state: State) -> int:
    """Count the trained parameters that were added or unfrozen since DDP wrapped the module."""
    if ddp is None:
        return 0
    trained = {h.parameter for h in state.parameters if h.parameter.requires_grad}
    ignored = {n for n in state.not_compared if n.kind == "parameter" and n.reason == IGNORED}
    count = len(trained) - len(ignored)
    return max(0, count - int(ddp._get_ddp_logging_data().get("num_parameter_tensors", count)))


def find_averager() -> int:
    """Return 1 if this process has an object that averages parameters, else 0. It is slow."""
    averagers: Any = sys.modules.get("torch.distributed.algorithms.model_averaging.averagers")
    kind = getattr(averagers, "ModelAverager", None)
    return int(kind is not None and any(isinstance(each, kind) for each in gc.get_objects()))


def _finds_unused(ddp: Any) -> int:
    names = ("find_unused_parameters", "static_graph")
    return int(any(getattr(ddp, name, False) for name in names))


def _is_stateless(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return 1 if an optimizer keeps no state (SGD without momentum) or none that is compared."""
    # Only optimizers that keep no state without momentum have the option momentum=0.
    plain = any(group.get("momentum", 1) == 0 for o in optimizers for group in o.param_groups)
    return int(plain or any(map(shards_state, optimizers)))


def _rebroadcasts_buffers(module: torch.nn.Module) -> int:
    """Return 1 if a DDP around or within the module sends rank 0's buffers before each forward."""
    wrapped = (m for m in module.modules() if isinstance(m, DistributedDataParallel))
    return int(any(getattr(m, "broadcast_buffers", True) for m in wrapped))
