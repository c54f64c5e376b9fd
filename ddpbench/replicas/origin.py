"""Where a NaN comes from: each rank's own outputs and gradients, before gradients are reduced.

After the reduction every rank has it, and nothing tells whose it was. So a hook on the module's
forward and one on each parameter keep a sum of what passes, in the tensor's own device, and wait
for nothing; only a verification that finds something not finite reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ddpbench.replicas.digest import total
from ddpbench.replicas.state import unwrap

OUTPUT = "the output of forward"


class Tracer:
    """Watches one replica from now on; `close` ends that."""

    def __init__(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._places = [OUTPUT]
        self._passed: list[tuple[int, Tensor]] = []  # place, sum: since the last optimizer step
        self._steps: list[tuple[list[int], Tensor]] = []  # of each step since the last clear
        # Functions, not methods: a copy of the module must not copy what this refers to.
        self._hooks: list[Any] = [module.register_forward_hook(_forward_hook(self._passed))]
        for name, parameter in unwrap(module).named_parameters():
            if parameter.requires_grad:
                hook = _gradient_hook(self._passed, len(self._places))
                self._hooks.append(parameter.register_hook(hook))
                self._places.append(f"the gradient of {name}")
        # The first one's steps are counted.
        self._hooks.append(optimizers[0].register_step_post_hook(lambda *_: self._end_step()))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Forget what has passed."""
        self._passed.clear()
        self._steps.clear()

    def first(self) -> tuple[int, str] | None:
        """How many optimizer steps ago, and where, something was not finite first; None: never.

        A gradient is taken as not finite, too, if the sum of its elements overflows.
        """
        count = len(self._steps)
        if self._passed:
            self._end_step()
        for index, (places, values) in enumerate(self._steps):
            bad = (~values.isfinite()).nonzero()
            if len(bad):
                at = int(bad[0])
                place = self._places[places[at]]
                # Backward begins with the loss; what it reaches first has it from there.
                if places[at] and (at == 0 or not places[at - 1]):
                    place = f"its loss, or {place}"
                return max(0, count - 1 - index), place
        return None

    def _end_step(self) -> None:
        if self._passed:
            values = torch.stack([value.float() for _, value in self._passed])
            self._steps.append(([place for place, _ in self._passed], values))
            self._passed.clear()


def _gradient_hook(passed: list[tuple[int, Tensor]], place: int) -> Any:
    def hook(gradient: Tensor) -> None:
        if gradient.layout == torch.strided and type(gradient) is Tensor:
            passed.append((place, total(gradient)))

    return hook


def _forward_hook(passed: list[tuple[int, Tensor]]) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        for tensor in _tensors(output) if torch.is_grad_enabled() else ():
            value = total(tensor)
            # Infinite logits may be a mask; a loss, a single number, has to be finite.
            if tensor.numel() > 1:
                value = torch.where(value.isnan(), value, 0.0)
            passed.append((0, value))

    return hook


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in nested outputs."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and type(value) is Tensor and value.layout == torch.strided:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
