"""The models whose DDP step can be measured: one entry of WORKLOADS adds one.

All data are generated. Importing this module imports no torch; building a task does.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpbench.catalog import user_workload
from ddpbench.catalog.task import (
    EPOCHS,
    Place,
    Task,
    Training,
    Workload,
    generated_batches,
    generator,
    seeded_model,
    share_of_epoch,
)  # fmt: skip

if TYPE_CHECKING:
    from torch import Tensor, nn

IMAGE, CLASSES = (3, 32, 32), 10
BAG, HEAD, TOWERS = 32, 64, (768, 512)
STEPS, VALIDATION, NOISE = 16, 1009, 0.05  # regression: of an epoch; samples in all; of the targets


def _mlp(*sizes: int) -> nn.Sequential:
    """Linear layers between these widths, ReLU between them."""
    from torch import nn

    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _linear(settings: Mapping[str, int], place: Place) -> Task:
    from torch import nn

    return _random_targets(lambda: nn.Linear(10, 10), 10, place)


def _wide(settings: Mapping[str, int], place: Place) -> Task:
    width, depth = settings["width"], settings["depth"]
    return _random_targets(lambda: _mlp(*[width] * (depth + 1)), width, place)


def _random_targets(make: Callable[[], nn.Module], width: int, place: Place) -> Task:
    """Mean squared error against random targets, both `width` wide."""
    import torch
    from torch.nn import functional

    return Task(
        seeded_model(make, place),
        generated_batches(place, lambda g: (torch.randn(width, generator=g),
                                   torch.randn(width, generator=g))),
        lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
    )  # fmt: skip


def _convnet(settings: Mapping[str, int], place: Place) -> Task:
    """ResNet-(6 × depth + 2) for small images (He et al. 2015, 4.2): three stages, each of half the
    resolution and twice the channels of the one before."""
    import torch
    from torch import nn
    from torch.nn import functional

    def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
        kernel = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        return nn.Sequential(kernel, nn.BatchNorm2d(outputs))

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.first = convolution(inputs, outputs, 3, stride)
            self.second = convolution(outputs, outputs, 3)
            same = inputs == outputs
            self.skip = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

        def forward(self, x: Tensor) -> Tensor:
            inner: Tensor = self.second(functional.relu(self.first(x)))
            return functional.relu(inner + self.skip(x))

    def make() -> nn.Module:
        width = settings["width"]
        layers: list[nn.Module] = [convolution(IMAGE[0], width, 3), nn.ReLU()]
        layers += [Block(width, width, 1) for _ in range(settings["depth"])]
        for channels in (2 * width, 4 * width):
            layers.append(Block(channels // 2, channels, 2))
            layers += [Block(channels, channels, 1) for _ in range(settings["depth"] - 1)]
        pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return nn.Sequential(*layers, *pooled, nn.Linear(4 * width, CLASSES))

    return Task(
        seeded_model(make, place),
        generated_batches(place, lambda g: (torch.randn(IMAGE, generator=g),
                                   torch.randint(CLASSES, (), generator=g))),
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    )  # fmt: skip


def _transformer(settings: Mapping[str, int], place: Place) -> Task:
    import torch
    from torch.nn import functional

    vocabulary, sequence = settings["vocabulary"], settings["sequence"]
    heads = max(1, settings["width"] // HEAD)
    if settings["width"] % heads:
        raise ValueError(
            f"transformer: width {settings['width']} does not divide among {heads} heads "
            f"(width // {HEAD}): take a multiple of {HEAD}, or less than {2 * HEAD}"
        )

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        (tokens,) = batch  # one more than the model reads: each is followed by its target
        scores = model(tokens[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    return Task(
        seeded_model(lambda: _gpt(settings, heads), place),
        generated_batches(
            place, lambda g: (torch.randint(vocabulary, (sequence + 1,), generator=g),)
        ),
        loss,
    )


def _gpt(settings: Mapping[str, int], heads: int) -> nn.Module:
    """A decoder as GPT-2 is: (batch, sequence) tokens → (batch, sequence, vocabulary) scores."""
    import torch
    from torch import nn
    from torch.nn import functional

    width = settings["width"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before_attention = nn.LayerNorm(width)
            self.qkv = nn.Linear(width, 3 * width)
            self.joined = nn.Linear(width, width)
            gelu = nn.GELU(approximate="tanh")
            inner = nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width)
            self.mlp = nn.Sequential(nn.LayerNorm(width), *inner)

        def forward(self, x: Tensor) -> Tensor:
            split = self.qkv(self.before_attention(x)).unflatten(-1, (3, heads, -1))
            q, k, v = split.permute(2, 0, 3, 1, 4)  # (batch, heads, sequence, width of a head)
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.joined(seen.transpose(1, 2).flatten(2))
            deeper: Tensor = x + self.mlp(x)
            return deeper

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(settings["vocabulary"], width)
            self.positions = nn.Embedding(settings["sequence"], width)
            blocks = [Block() for _ in range(settings["layers"])]
            self.blocks = nn.Sequential(*blocks, nn.LayerNorm(width))
            for table in (self.tokens, self.positions):
                nn.init.normal_(table.weight, std=0.02)

        def forward(self, tokens: Tensor) -> Tensor:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            x = self.blocks(self.tokens(tokens) + self.positions(positions))
            return functional.linear(x, self.tokens.weight)

    return GPT()


def _embedding(settings: Mapping[str, int], place: Place) -> Task:
    """Dense gradients, as DDP reduces them best: all but a few rows of the table's are zero."""
    import torch
    from torch import nn
    from torch.nn import functional

    rows, width = settings["rows"], settings["width"]

    def make() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(rows, width), *_mlp(width, width, 1))

    return Task(
        seeded_model(make, place),
        generated_batches(place, lambda g: (torch.randint(rows, (BAG,), generator=g),
                                   torch.randint(2, (1,), generator=g).float())),
        lambda model, batch: functional.binary_cross_entropy_with_logits(
            model(batch[0]), batch[1]
        ),
    )  # fmt: skip


def _contrastive(settings: Mapping[str, int], place: Place) -> Task:
    """Two towers, trained as CLIP is: pairs of the joined batch of all ranks against one another.

    Every rank computes the whole loss L of the joined batch. Backward through the gather sums the
    gradients of all n equal losses, so the features of rank r get n × dL/d(features of r). Behind
    the towers DDP's mean over ranks takes away that n, and adds up the ranks' parts: dL/d(weights),
    the gradient of one process on the joined batch. The scale meets the loss behind the gather:
    every rank has its whole gradient, and the mean leaves it.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    width = settings["width"]

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList(_mlp(inputs, 2 * width, width) for inputs in TOWERS)
            self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            made = [tower(x) for tower, x in zip(self.towers, batch, strict=True)]
            return torch.stack([functional.normalize(x) for x in made]), self.scale.exp()

    gather = _gather(place)

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        features, scale = model(batch)
        left, right = gather(features)
        scores = scale * left @ right.T
        pairs = torch.arange(len(scores), device=scores.device)
        both = functional.cross_entropy(scores, pairs), functional.cross_entropy(scores.T, pairs)
        return (both[0] + both[1]) / 2

    return Task(
        seeded_model(Towers, place),
        generated_batches(
            place, lambda g: tuple(torch.randn(inputs, generator=g) for inputs in TOWERS)
        ),
        loss,
    )


def _gather(place: Place) -> Callable[[Tensor], Tensor]:
    """All ranks' (k, samples, width) as (k, samples of all, width), with gradient."""
    if place.group is None or place.world_size == 1:
        return lambda mine: mine
    import torch
    import torch.distributed as dist

    # Not torch.distributed.nn's, which is deprecated: this one needs no more of a backend than
    # all_gather and all_reduce.
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, mine: Tensor) -> Tensor:
            parts = [torch.empty_like(mine) for _ in range(place.world_size)]
            dist.all_gather(parts, mine.contiguous(), group=place.group)
            return torch.cat(parts, dim=1)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            whole = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(whole, group=place.group)
            return whole.chunk(place.world_size, dim=1)[place.rank]

    return Gather.apply


def _regression(settings: Mapping[str, int], place: Place) -> Task:
    """A smooth function of 8 inputs with a little noise, learned to the end.

    One sample less than fills all batches: the sampler repeats one or, for one rank, the last batch
    is short.
    """
    import torch
    from torch.nn import functional

    def made(samples: int, number: int) -> tuple[Tensor, Tensor]:
        g = generator(place.seed, number)
        x = 2 * torch.rand(samples, 8, generator=g) - 1
        y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + x[:, 3:].sum(1, keepdim=True) / 2
        y += NOISE * torch.randn(samples, 1, generator=g)
        return x.to(place.device), y.to(place.device)

    samples = STEPS * place.batch * place.world_size - 1
    x, y = made(samples, 0)

    def batches(epoch: int) -> Iterator[tuple[Any, int]]:
        mine = torch.tensor(share_of_epoch(samples, place, epoch), device=place.device)
        return (((x[rows], y[rows]), len(rows)) for rows in torch.split(mine, place.batch))

    # A strided share, which DistributedSampler would pad with samples counted twice.
    share = [each[place.rank :: place.world_size] for each in made(VALIDATION, 1)]
    parts = zip(*(torch.split(each, place.batch) for each in share), strict=True)
    validation = tuple((part, len(part[0])) for part in parts if len(part[0]))
    epochs = range(1, EPOCHS + 1)
    ready = [batch for epoch in epochs for batch, size in batches(epoch) if size == place.batch]
    sizes = [8, *[settings["width"]] * (settings["depth"] - 1), 1]
    return Task(
        seeded_model(lambda: _mlp(*sizes), place),
        lambda step: ready[step % len(ready)],
        lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
        Training(
            batches,
            validation,
            {**settings, "batch": place.batch, "ranks": place.world_size, "seed": place.seed},
        ),
    )


def _both(value: int) -> dict[str, int]:
    return {"cpu": value, "cuda": value}


WORKLOADS: dict[str, Workload] = {
    entry.name: entry
    for entry in (
        Workload(
            name="linear",
            help="one Linear(10, 10), the example of PyTorch's DDP notes: overhead and latency",
            batch=_both(20),
            build=_linear,
            learning_rate=0.001,
        ),
        Workload(
            name="mlp",
            help="equal wide layers: many bytes of gradients, reduced while others are computed",
            batch={"cpu": 256, "cuda": 512},
            settings={"width": {"cpu": 1024, "cuda": 4096}, "depth": _both(8)},
            build=_wide,
        ),
        Workload(
            name="convnet",
            help="a small residual net with BatchNorm: few gradients, and buffers to broadcast",
            batch={"cpu": 32, "cuda": 256},
            settings={"width": {"cpu": 16, "cuda": 64}, "depth": {"cpu": 1, "cuda": 3}},
            build=_convnet,
        ),
        Workload(
            name="transformer",
            help="a language model of GPT-2's shape, by default the small one's",
            batch={"cpu": 4, "cuda": 8},
            settings={
                "layers": _both(12),
                "width": _both(768),
                "sequence": {"cpu": 64, "cuda": 1024},
                "vocabulary": _both(50257),
            },
            build=_transformer,
            optimizer="adamw",
            learning_rate=3e-4,
        ),
        Workload(
            name="embedding",
            help="a large table under a small net: gradients that are mostly zero, all reduced",
            batch=_both(256),
            settings={"rows": {"cpu": 100_000, "cuda": 1_000_000}, "width": _both(64)},
            build=_embedding,
        ),
        Workload(
            name="contrastive",
            help="two towers as in CLIP, whose loss gathers all ranks' features with gradient",
            batch=_both(64),
            settings={"width": _both(256)},
            build=_contrastive,
            optimizer="adamw",
            learning_rate=3e-4,
        ),
        Workload(
            name="regression",
            help="a small net that is also trained to the end, with validation and checkpoints",
            batch=_both(32),
            settings={"width": _both(64), "depth": _both(3)},
            build=_regression,
            optimizer="adam",
            learning_rate=0.002,
            trains=True,
        ),
    )
}


def get(name: str) -> Workload:
    """The entry of a name; for "package.module:function" one around the user's function.

    That is called as function(rank, world_size, device) and returns (model, batch, loss), used as
    in Task; the model is moved to the device. Its `batch` is 0: user_workload.samples counts the
    samples in a batch. Raises ValueError with one sentence for anything else.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    if ":" not in name:
        close = difflib.get_close_matches(name, WORKLOADS, 1)
        meant = f"; did you mean {close[0]}?" if close else "."
        raise ValueError(
            f"unknown workload {name!r}{meant} Known: {', '.join(WORKLOADS)}; "
            "or package.module:function of your own"
        )
    function = user_workload.imported(name)
    return Workload(
        name=name,
        help="of your own",
        batch=_both(0),
        build=lambda _, place: user_workload.built(name, function, place),
    )
