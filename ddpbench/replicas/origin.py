"""Origins of NaN and infinity: a rank's outputs and gradients before gradients are reduced.

After the reduction every rank has the NaN, and its origin is lost. Therefore hooks on the module's
forward and on each parameter sum up every output and gradient, on the tensor's device and without
waiting for it. Only a verification that finds a value that is not finite reads these sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ddpbench.replicas.digest import may_be_nonfinite, total
from ddpbench.replicas.state import unwrap

OUTPUT = "the output of forward"


class Tracer:
    """Watch one replica until `close`."""

    def __init__(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._passed: list[tuple[str, Tensor]] = []  # places and sums since the last step
        self._steps: list[tuple[list[str], Tensor]] = []  # places and sums per step since `clear`
        self._hooks: list[Any] = [module.register_forward_hook(self._add_output)]
        for name, parameter in unwrap(module).named_parameters():
            if parameter.requires_grad:
                hook = partial(self._add, f"the gradient of {name}")
                self._hooks.append(parameter.register_hook(hook))
        # Steps are counted at the first optimizer.
        self._hooks.append(optimizers[0].register_step_post_hook(self._end_step))

    def _add_output(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                self._add(OUTPUT, tensor)

    def _add(self, place: str, tensor: Any) -> None:
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
        if is_plain and may_be_nonfinite(tensor):
            self._passed.append((place, total(tensor)))

    def _end_step(self, *_: Any) -> None:
        if self._passed:
            device = self._passed[-1][1].device  # of a gradient; outputs may be on the CPU
            sums = torch.stack([value.to(device, torch.float32) for _, value in self._passed])
            self._steps.append(([place for place, _ in self._passed], sums))
            self._passed.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Forget all sums."""
        self._passed.clear()
        self._steps.clear()

    def find_first(self) -> tuple[int, str] | None:
        """Return how many optimizer steps ago and where a value was not finite first, else None.

        A gradient also counts if the sum of its elements overflows, an output only if it has a NaN:
        infinite logits may be a mask.
        """
        count = len(self._steps)
        self._end_step()
        for number, (places, sums) in enumerate(self._steps):
            is_output = torch.tensor([place == OUTPUT for place in places], device=sums.device)
            bad = (sums.isnan() | ~(sums.isfinite() | is_output)).nonzero()
            if len(bad):
                first = int(bad[0])
                place = places[first]
                # Backward begins with the loss: the first gradient may have the NaN from there.
                if place != OUTPUT and (first == 0 or places[first - 1] == OUTPUT):
                    place = f"its loss, or {place}"
                return max(0, count - 1 - number), place
        return None
