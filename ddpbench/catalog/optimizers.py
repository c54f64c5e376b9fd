"""Optimizers of a DDP step. To add one, add an entry to OPTIMIZERS. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of torch.optim.

    kind    name of its class
    copies  memory of its state, in multiples of the parameters' memory
    """

    kind: str
    copies: int

    def make(self, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
        """Make the optimizer with this learning rate and torch's other defaults."""
        import torch

        made: torch.optim.Optimizer = getattr(torch.optim, self.kind)(parameters, lr=learning_rate)
        return made


OPTIMIZERS = {
    "sgd": Optimizer("SGD", copies=0),
    "adam": Optimizer("Adam", copies=2),
    "adamw": Optimizer("AdamW", copies=2),
}
