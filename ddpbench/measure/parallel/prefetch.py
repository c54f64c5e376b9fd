"""Switch on and off that fully_shard gathers the next layer group while this one computes."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def set_prefetch(model: nn.Module, on: bool) -> None:
    """Let each layer group start the all_gather of the next one, or none; before the first step.

    on: the next in forward and the one before in backward, by fully_shard's explicit prefetch, and
    with asynchronous calls. Without these, an all_gather on the CPU blocks in the call, and
    prefetch hides nothing.
    off: a layer group's all_gather starts when its compute needs it. An empty list would leave
    fully_shard's own prefetch in backward on; a module that prefetches itself, when it is gathered
    already, switches it off. Asynchronous calls then keep the all_gather on the stream of the
    compute, as fully_shard's own streams would start it early on a GPU.

    The reduce_scatter of fully_shard is synchronous in both cases: on the CPU it is always exposed.
    The modules run in the order in which they are registered. Does nothing without fully_shard.
    """
    forward: list[Any] = [each for each in model.modules() if isinstance(each, FSDPModule)]
    root = forward[: isinstance(model, FSDPModule)]
    backward = [*root, *reversed(forward[len(root) :])]
    following = dict(itertools.pairwise(backward)) if on else {}
    for number, module in enumerate(forward, 1):
        module._set_unshard_async_op(True)
        module.set_modules_to_forward_prefetch(forward[number : number + 1] if on else [])
        module.set_modules_to_backward_prefetch([following.get(module, module)])
