"""The optimizers of a DDP step: one entry of OPTIMIZERS adds one. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Optimizer:
    """One of torch.optim's.

    kind    its name there
    copies  of the parameters' memory that its state takes
    """

    kind: str
    copies: int

    def make(self, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
        """With torch's own settings but for the learning rate."""
        import torch

        made: torch.optim.Optimizer = getattr(torch.optim, self.kind)(parameters, lr=learning_rate)
        return made


OPTIMIZERS = {
    "sgd": Optimizer("SGD", copies=0),
    "adam": Optimizer("Adam", copies=2),
    "adamw": Optimizer("AdamW", copies=2),
}
