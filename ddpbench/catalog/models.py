"""The workloads' models. This module imports torch; workloads.py imports it to build a task.

A model's weights depend on the order in which its layers are created.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from ddpbench.catalog.task import RankSetup

IMAGE, CLASSES = (3, 32, 32), 10  # of a residual net: channels, height, width; number of outputs
TOWERS = (768, 512)  # input widths


def build_mlp(*sizes: int) -> nn.Sequential:
    """Return linear layers between these widths, with ReLU in between."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    kernel = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(kernel, nn.BatchNorm2d(outputs))


class _ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride)
        self.second = _convolution(outputs, outputs, 3)
        same = inputs == outputs
        self.skip = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.second(functional.relu(self.first(x)))
        return functional.relu(inner + self.skip(x))


def build_residual_net(width: int, depth: int) -> nn.Module:
    """Return ResNet-(6 × depth + 2) for small images (He et al. 2015, 4.2).

    Each of the three stages halves the resolution and doubles the channels of the one before.
    """
    layers: list[nn.Module] = [_convolution(IMAGE[0], width, 3), nn.ReLU()]
    layers += [_ResidualBlock(width, width, 1) for _ in range(depth)]
    for channels in (2 * width, 4 * width):
        layers.append(_ResidualBlock(channels // 2, channels, 2))
        layers += [_ResidualBlock(channels, channels, 1) for _ in range(depth - 1)]
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, *pooled, nn.Linear(4 * width, CLASSES))


class _DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        gelu = nn.GELU(approximate="tanh")
        inner = nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), *inner)

    def forward(self, x: Tensor) -> Tensor:
        # Head by head, so that tensor parallel can divide the rows of the weights by heads.
        split = self.qkv(self.before_attention(x)).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = split.permute(3, 0, 2, 1, 4)  # (batch, heads, sequence, width of a head)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).flatten(2))
        output: Tensor = x + self.mlp(x)
        return output


class Decoder(nn.Module):
    """A decoder like GPT-2: (batch, sequence) tokens → (batch, sequence, vocabulary) scores."""

    def __init__(self, settings: Mapping[str, int], heads: int) -> None:
        """Read layers, width, sequence and vocabulary from the settings."""
        super().__init__()
        width = settings["width"]
        self.tokens = nn.Embedding(settings["vocabulary"], width)
        self.positions = nn.Embedding(settings["sequence"], width)
        blocks = [_DecoderBlock(width, heads) for _ in range(settings["layers"])]
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(width))
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores; the token table also serves as the output layer."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(positions))
        return functional.linear(x, self.tokens.weight)


class Towers(nn.Module):
    """Two towers as in CLIP: (features of both, normalised and stacked; scale of the scores)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(build_mlp(inputs, 2 * width, width) for inputs in TOWERS)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Pass each tensor of the batch through its tower."""
        features = [tower(x) for tower, x in zip(self.towers, batch, strict=True)]
        return torch.stack([functional.normalize(x) for x in features]), self.scale.exp()


def make_gather(setup: RankSetup) -> Callable[[Tensor], Tensor]:
    """Return a collective function: (k, samples, width) → (k, samples of all ranks, width).

    Its backward is collective, too, and returns the sum of all ranks' gradients of these features.
    """
    if setup.group is None or setup.world_size == 1:
        return lambda features: features

    # torch.distributed.nn has a function for this, but it is deprecated. This one needs only
    # all_gather and all_reduce of the backend.
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, features: Tensor) -> Tensor:
            parts = [torch.empty_like(features) for _ in range(setup.world_size)]
            dist.all_gather(parts, features.contiguous(), group=setup.group)
            return torch.cat(parts, dim=1)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            total = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=setup.group)
            return total.chunk(setup.world_size, dim=1)[setup.rank]

    apply: Callable[[Tensor], Tensor] = Gather.apply
    return apply
