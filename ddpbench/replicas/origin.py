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

from ddpbench.replicas.digest import total
from ddpbench.replicas.state import unwrap


class Tracer:
    """Watch one replica until `close`."""

    def __init__(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._places = ["the output of forward"]
        self._passed: list[tuple[int, Tensor]] = []  # (place, sum) since the last optimizer step
        self._steps: list[tuple[list[int], Tensor]] = []  # places and sums per step since `clear`
        self._hooks: list[Any] = [module.register_forward_hook(_ForwardHook(self._passed))]
        for name, parameter in unwrap(module).named_parameters():
            if parameter.requires_grad:
                hook = _make_gradient_hook(self._passed, len(self._places))
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


def _make_gradient_hook(passed: list[tuple[int, Tensor]], place: int) -> Any:
    def hook(gradient: Tensor) -> None:
        if gradient.layout == torch.strided and type(gradient) is Tensor:
            passed.append((place, total(gradient)))

    return hook


class _ForwardHook:
    def __init__(self, passed: list[tuple[int, Tensor]]) -> None:
        self._passed = passed

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        for tensor in tree_leaves(output) if torch.is_grad_enabled() else ():
            plain = type(tensor) is Tensor and tensor.layout == torch.strided
            if plain and tensor.is_floating_point():
                value = total(tensor)
                # Infinite logits may be a mask. A single number is a loss and must be finite.
                if tensor.numel() > 1:
                    value = torch.where(value.isnan(), value, 0.0)
                self._passed.append((0, value))

    def __reduce__(self) -> Any:
        """Give a copied or saved module a hook that does nothing and loads without ddpbench."""
        return getattr, (nullcontext(), "__exit__")
