"""Origins of NaN and infinity: a rank's outputs and gradients before gradients are reduced.

After the reduction every rank has the NaN, and its origin is lost. Therefore hooks on the module's
forward and on each parameter sum up every output and gradient, on the tensor's device and without
waiting for it. Only a verification that finds a value that is not finite reads these sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ddpbench.replicas.digest import may_be_nonfinite, total
from ddpbench.replicas.state import unwrap


class Tracer:
    """Watch one replica until `close`."""

    def __init__(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._places = ["the output of forward"]
        self._passed: list[tuple[int, Tensor]] = []  # (place, sum) since the last optimizer step
        self._steps: list[tuple[list[int], Tensor]] = []  # places and sums per step since `clear`
        self._hooks: list[Any] = [module.register_forward_hook(_Hook(self._passed, 0))]
        for name, parameter in unwrap(module).named_parameters():
            if parameter.requires_grad:
                hook = _Hook(self._passed, len(self._places))
                self._hooks.append(parameter.register_hook(hook))
                self._places.append(f"the gradient of {name}")
        # Steps are counted at the first optimizer.
        self._hooks.append(optimizers[0].register_step_post_hook(lambda *_: self._end_step()))

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

        A gradient also counts as not finite if the sum of its elements overflows.
        """
        count = len(self._steps)
        self._end_step()
        for index, (places, values) in enumerate(self._steps):
            nonfinite = (~values.isfinite()).nonzero()
            if len(nonfinite):
                first = int(nonfinite[0])
                place = self._places[places[first]]
                # Backward begins with the loss: the first gradient may have the NaN from there.
                if places[first] and (first == 0 or not places[first - 1]):
                    place = f"its loss, or {place}"
                return max(0, count - 1 - index), place
        return None

    def _end_step(self) -> None:
        if self._passed:
            # Outputs may be on several devices. To collect sums on the CPU would wait for a GPU.
            used = (value.device for _, value in self._passed if not value.is_cpu)
            device = next(used, torch.device("cpu"))
            values = torch.stack([value.to(device, torch.float32) for _, value in self._passed])
            self._steps.append(([place for place, _ in self._passed], values))
            self._passed.clear()


class _Hook:
    """Adds up the output of forward, for place 0, or a gradient, for the other places."""

    def __init__(self, passed: list[tuple[int, Tensor]], place: int) -> None:
        self._passed, self._place = passed, place

    def __call__(self, *arguments: Any) -> None:
        is_traced = self._place or torch.is_grad_enabled()
        for tensor in tree_leaves(arguments[-1]) if is_traced else ():
            plain = type(tensor) is Tensor and tensor.layout == torch.strided
            if plain and may_be_nonfinite(tensor):
                value = total(tensor)
                # Infinite logits may be a mask. A single number is a loss and must be finite.
                if not self._place and tensor.numel() > 1:
                    value = torch.where(value.isnan(), value, 0.0)
                self._passed.append((self._place, value))

    def __reduce__(self) -> Any:
        """Give a copied or saved module a hook that does nothing and loads without ddpbench."""
        return getattr, (nullcontext(), "__exit__")
